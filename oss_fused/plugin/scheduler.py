# SPDX-License-Identifier: MIT
"""vLLM's scheduler, with less to ask of the KV cache for each token.

For every request and step vLLM's scheduler frees blocks that left the window, counts the blocks
that are missing, takes them and looks for full ones to share, although a request that decodes
crosses a block's edge once in 16 steps. At 256 requests that is half of the scheduler's time, and
the scheduler's as long as the kernels' (docs/decode.md). ``StepKVCacheManager`` asks at the edges
only; what is scheduled, where it is stored and what the prefix cache holds stay the same.

registration.py makes it vLLM's choice; OSS_FUSED_STEP=vllm or a ``--scheduler-cls`` prevents that.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

_ONE_TOKEN = {"num_lookahead_tokens": 0}


class StepKVCacheManager(KVCacheManager):
    """vLLM's, for full attention and sliding windows: a decode step within a block is free."""

    # tokens from one edge of a block, in any group, to the next
    stride: int

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **options: Any
    ) -> KVCacheBlocks | None:
        """As KVCacheManager; no new blocks for one token within a block that is there."""
        place = request.num_computed_tokens % self.stride
        if (
            num_new_tokens == 1
            # the token opens a block at 0, and a window leaves one at stride - 1 or 0, unless more
            # than one step is under way: then at the next edge
            and 0 < place < self.stride - 1
            and options == _ONE_TOKEN
            and not args
            and request.status is RequestStatus.RUNNING
        ):
            if self.enable_caching:
                # drafts that were accepted may have filled a block
                self.cache_blocks(request, min(request.num_computed_tokens + 1, request.num_tokens))
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **options)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """As KVCacheManager; returns at once where every full block is shared already."""
        name = request.request_id
        for manager in self.coordinator.single_type_managers:
            if manager.num_cached_block.get(name, 0) < num_computed_tokens // manager.block_size:
                super().cache_blocks(request, num_computed_tokens)
                return


def make_scheduler(vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """What vLLM's engine calls in place of a scheduler class; ``options`` are the class's."""
    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = chosen(vllm_config=vllm_config, **options)
    shorten(scheduler.kv_cache_manager)
    return scheduler


def shorten(manager: KVCacheManager) -> None:
    """Make ``manager`` a StepKVCacheManager, if nothing but attention layers is cached."""
    groups = manager.coordinator.single_type_managers
    known = (FullAttentionManager, SlidingWindowManager)
    if type(manager) is KVCacheManager and all(type(group) in known for group in groups):
        manager.__class__ = StepKVCacheManager
        manager.stride = math.gcd(*(group.block_size for group in groups))
