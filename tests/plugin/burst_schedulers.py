# SPDX-License-Identifier: MIT
"""Schedulers over small caches, for the tests of bursts."""

from collections import deque
from types import SimpleNamespace

import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from oss_fused.plugin.burst import BurstScheduler
from oss_fused.plugin.scheduler import StepKVCacheManager, shorten
from tests.plugin.conftest import build
from tests.plugin.stub_worker import BLOCK

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def engine_config(folder):
    """vLLM's configuration of a small gpt-oss, scheduling ahead of the device."""
    folder = build(folder, "gpt_oss", max_position_embeddings=1 << 12)
    arguments = EngineArgs(model=str(folder), enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    # vLLM schedules ahead on GPUs only
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.max_num_batched_tokens = 8192
    return config


def make(config, kind, case):
    """A scheduler by ``kind`` with ``case``'s cache and limits."""
    sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    groups = []
    for window in case.windows:
        spec = kv.FullAttentionSpec(**sizes)
        if window is not None:
            spec = kv.SlidingWindowSpec(**sizes, sliding_window=window)
        groups.append(kv.KVCacheGroupSpec([f"layer.{len(groups)}"], spec))
    config.cache_config.num_gpu_blocks = case.blocks
    config.cache_config.enable_prefix_caching = case.caching
    config.model_config.max_model_len = config.scheduler_config.max_model_len = case.length
    config.scheduler_config.max_num_seqs = case.places
    config.scheduler_config.max_num_batched_tokens = case.budget
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=kv.KVCacheConfig(case.blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    scheduler.use_v2_model_runner = True  # which the CPU build has not
    if isinstance(scheduler, BurstScheduler):
        shorten(scheduler.kv_cache_manager)
        assert type(scheduler.kv_cache_manager) is StepKVCacheManager
        scheduler.longest = case.burst
    return scheduler


def small(burst=8, **changes):
    """A case of one full-attention group with room for everything."""
    fields = {
        "windows": (None,),
        "blocks": 400,
        "caching": True,
        "length": 256,
        "places": 8,
        "budget": 64,
        "burst": burst,
        "depth": 2,
    }
    return SimpleNamespace(**(fields | changes))


def add(scheduler, name, prompt, tokens, extra=None):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **(extra or {}))
    request = Request(name, prompt, params, None, block_hasher=HASHER)
    scheduler.add_request(request)
    return request


def steps(scheduler, number, depth=2, **report):
    """The burst sizes of ``number`` steps, answered with token 5 after ``depth`` steps."""
    queue, sizes = deque(), []
    for _ in range(number):
        scheduled = scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        if names:
            sizes.append(scheduled.burst)
            ends = [scheduler.requests[name].num_output_placeholders > 0 for name in names]
            ids = [[5] * (scheduled.burst * end) for end in ends]
            output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, ids)
            vars(output).update(report)
            queue.append((scheduled, output))
        if queue and (len(queue) >= depth or not names):
            scheduler.update_from_output(*queue.popleft())
    while queue:
        scheduler.update_from_output(*queue.popleft())
    return sizes
