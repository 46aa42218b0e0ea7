# SPDX-License-Identifier: MIT
"""vLLM's scheduler, with less to ask of the KV cache for each token.

For every request and step vLLM's scheduler frees blocks that left the window, counts the blocks
that are missing, takes them and looks for full ones to share, although a request that decodes
crosses a block's edge once in 16 steps. At 256 requests that is half of the scheduler's time, and
the scheduler takes as long as the kernels (docs/decode.md). ``StepKVCacheManager`` first checks
whether there is a block to free, to take or to share. If so, vLLM's code runs: blocks are freed,
taken and shared in the same step and order as in vLLM.

registration.py selects this scheduler. The option short_step=false or ``--scheduler-cls`` selects
another.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request, RequestStatus

from oss_fused.plugin.burst import BurstScheduler, say_single, start_bursts
from oss_fused.plugin.options import serving_options


class StepKVCacheManager(KVCacheManager):
    """vLLM's manager, for full attention and sliding windows; skips steps that stay in a block."""

    # of each group: tokens of a block, tokens kept behind the next one, blocks and number of
    # shared blocks by request
    views: list[tuple[int, int, dict[str, list[Any]], dict[str, int]]]

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *args: Any,
        num_lookahead_tokens: int = 0,
        **options: Any,
    ) -> KVCacheBlocks | None:
        """As KVCacheManager; returns at once where no block is to be freed, taken or shared."""
        if (
            num_new_tokens > 0
            and not args
            and not options
            and request.status is RequestStatus.RUNNING
            and self._stays(request, num_new_tokens, num_lookahead_tokens)
        ):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(
            request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **options
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """As KVCacheManager; returns at once where every full block is shared already."""
        name = request.request_id
        for size, _, _, shared in self.views:
            if shared.get(name, 0) < num_computed_tokens // size:
                super().cache_blocks(request, num_computed_tokens)
                return

    def _stays(self, request: Request, new: int, lookahead: int) -> bool:
        """Whether the blocks of ``request`` stay what and whose they are in this step.

        vLLM caps ``end`` and ``read`` at the model's length; without the cap this asks more often.
        """
        name, computed = request.request_id, request.num_computed_tokens
        end = computed + new
        # steps under way still read behind their own windows
        read = computed - request.num_in_flight_tokens
        # drafts may be rejected
        settled = min(end, request.num_tokens) if self.enable_caching else 0
        null = self.block_pool.null_block
        for size, kept, held, shared in self.views:
            blocks = held.get(name, ())
            if len(blocks) * size < end + lookahead or shared.get(name, 0) < settled // size:
                return False
            left = (read - kept) // size
            if left > 0 and blocks[left - 1] is not null:
                return False
        return True


def make_scheduler(vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """What vLLM's engine calls in place of a scheduler class; ``options`` are the class's."""
    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    if serving_options(vllm_config).burst != 1:
        if chosen is AsyncScheduler:
            chosen = BurstScheduler
        else:
            say_single("synchronous scheduling (as with --no-async-scheduling)")
    scheduler = chosen(vllm_config=vllm_config, **options)
    shorten(scheduler.kv_cache_manager)
    if isinstance(scheduler, BurstScheduler):
        start_bursts(scheduler, vllm_config)
    return scheduler


def shorten(manager: KVCacheManager) -> None:
    """Make ``manager`` a StepKVCacheManager, if nothing but attention layers is cached."""
    groups = manager.coordinator.single_type_managers
    if type(manager) is KVCacheManager and all(map(_is_known, groups)):
        manager.__class__ = StepKVCacheManager
        manager.views = [
            (group.block_size, _kept(group), group.req_to_blocks, group.num_cached_block)
            for group in groups
        ]


def _is_known(group: SingleTypeKVCacheManager) -> bool:
    if type(group) is FullAttentionManager:
        # with finer hashes vLLM shares a prompt's last, partly filled block as well
        return group.block_size == group.block_pool.hash_block_size
    return type(group) is SlidingWindowManager


def _kept(group: SingleTypeKVCacheManager) -> int:
    """Tokens before the next one that a group's blocks must hold."""
    if isinstance(group, SlidingWindowManager):
        return group.sliding_window - 1 + group.extra_retained_tokens
    return sys.maxsize
