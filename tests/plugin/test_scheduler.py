# SPDX-License-Identifier: MIT
"""Our scheduler beside vLLM's, step by step over the same requests: the same decisions."""

import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from oss_fused.plugin.registration import shorten_steps
from oss_fused.plugin.scheduler import StepKVCacheManager, make_scheduler, shorten
from tests.plugin.conftest import build

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scheduler.py"
Simulated = runpy.run_path(str(SCRIPT))["Simulated"]
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"), "gpt_oss")


def vllm_config(folder, asynchronous=False, **options):
    arguments = {"max_model_len": 64, "enforce_eager": True, "skip_tokenizer_init": True} | options
    config = EngineArgs(model=str(folder), **arguments).create_engine_config()
    # vLLM schedules ahead on GPUs only
    config.scheduler_config.async_scheduling = asynchronous
    return config


def decisions(simulated, depth):
    """Of a step: what the model runner, the client and the prefix cache see."""
    scheduled, outputs, _ = simulated.step(depth)
    cached = scheduled.scheduled_cached_reqs
    pool = simulated.scheduler.kv_cache_manager.block_pool
    return {
        "tokens": scheduled.num_scheduled_tokens,
        "new": [(r.req_id, r.block_ids) for r in scheduled.scheduled_new_reqs],
        "blocks": list(zip(cached.req_ids, cached.new_block_ids, strict=True)),
        "resumed": cached.resumed_req_ids,
        "finished": scheduled.finished_req_ids,
        "answers": [
            (o.request_id, o.new_token_ids, o.finish_reason)
            for of in outputs.values()
            for o in of.outputs
        ],
        "free": pool.get_num_free_blocks(),
        "shared": len(pool.cached_block_hash_to_block),
    }


FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def sliding(window):
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.bfloat16,
        sliding_window=window,
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("groups", "blocks"),
    [((FULL,), 400), ((FULL,), 22), ((FULL, sliding(32)), 400), ((FULL, sliding(32)), 36)],
    ids=["full", "full-preempts", "sliding", "sliding-preempts"],
)
def test_same_decisions(groups, blocks, asynchronous, caching, folder):
    config = vllm_config(folder, asynchronous, max_num_batched_tokens=96, max_num_seqs=12)
    theirs = AsyncScheduler if asynchronous else Scheduler
    runs = [Simulated(config, make, groups, blocks, caching) for make in (theirs, make_scheduler)]
    assert type(runs[0].scheduler.kv_cache_manager) is KVCacheManager
    assert type(runs[1].scheduler.kv_cache_manager) is StepKVCacheManager
    source = random.Random(f"{blocks} {asynchronous} {caching}")
    beginnings = [[source.randrange(99) for _ in range(40)] for _ in range(3)]
    preempted = 0
    for number in range(300):
        for i in range(source.choice((0, 0, 0, 1, 2)) if number < 200 else 0):
            beginning = source.choice(beginnings)[: source.randrange(1, 40)]
            prompt = beginning + [source.randrange(99) for _ in range(source.randrange(8))]
            request = (f"{number}-{i}", prompt, source.randrange(1, 24))
            for run in runs:
                run.add(*request)
        expected, got = (decisions(run, 2 if asynchronous else 1) for run in runs)
        assert got == expected, number
        preempted += len(expected["resumed"])
    assert not runs[0].scheduler.requests, "every request came to its end"
    assert bool(preempted) == (blocks < 100)


def test_a_step_within_a_block_asks_nothing(folder, monkeypatch):
    config = vllm_config(folder, asynchronous=True)
    run = Simulated(config, make_scheduler, (FULL, sliding(32)), 100, True)
    run.add("a", list(range(20)), 40)
    asked = []
    ask = KVCacheManager.allocate_slots

    def counting(self, request, *args, **options):
        asked.append(request.num_computed_tokens)
        return ask(self, request, *args, **options)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", counting)
    for _ in range(31):
        run.step(2)
    assert asked == [0, 31, 32, 47, 48]


def test_room_for_drafts_is_asked_for(folder):
    run = Simulated(vllm_config(folder), make_scheduler, (FULL,), 100, True)
    run.add("a", list(range(20)), 40)
    run.step(1)
    manager, request = run.scheduler.kv_cache_manager, run.scheduler.requests["a"]
    assert not any(manager.allocate_slots(request, 1, num_lookahead_tokens=0).blocks)
    (blocks,) = manager.allocate_slots(request, 1, num_lookahead_tokens=12).blocks
    assert len(blocks) == 1


def test_a_block_that_drafts_filled_is_shared_at_once(folder):
    run = Simulated(vllm_config(folder), make_scheduler, (FULL,), 100, True)
    run.add("a", list(range(20)), 40)
    run.step(1)
    manager, request = run.scheduler.kv_cache_manager, run.scheduler.requests["a"]
    (group,) = manager.coordinator.single_type_managers
    # 14 drafts are accepted: their positions are computed, and two blocks full
    manager.allocate_slots(request, 15, num_lookahead_tokens=0)
    request.append_output_token_ids(list(range(14)))
    request.num_computed_tokens = 34
    assert group.num_cached_block["a"] == 1
    assert not any(manager.allocate_slots(request, 1, num_lookahead_tokens=0).blocks)
    assert group.num_cached_block["a"] == 2


def test_other_caches_keep_vllms_manager():
    manager = KVCacheManager.__new__(KVCacheManager)
    manager.coordinator = SimpleNamespace(single_type_managers=(SimpleNamespace(block_size=16),))
    shorten(manager)
    assert type(manager) is KVCacheManager


@pytest.mark.parametrize(
    ("options", "step", "chosen"),
    [
        ({"quantization": "oss_fp8"}, "short", "oss_fused.plugin.scheduler.make_scheduler"),
        ({"quantization": "oss_fp8"}, "vllm", None),
        ({}, "short", None),
        ({"quantization": "oss_fp8", "scheduler_cls": "my.Scheduler"}, "short", "my.Scheduler"),
    ],
    ids=["ours", "switched off", "another quantisation", "the user's own"],
)
def test_chosen_only_where_the_model_is_ours(options, step, chosen, folder, monkeypatch):
    monkeypatch.setenv("OSS_FUSED_STEP", step)
    config = vllm_config(folder, **options)
    assert config.scheduler_config.scheduler_cls == chosen
    assert config.structured_outputs_config.reasoning_parser == "openai_gptoss", "vLLM's settings"
    shorten_steps(config)
    assert config.scheduler_config.scheduler_cls == chosen
