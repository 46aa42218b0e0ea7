# SPDX-License-Identifier: MIT
"""Our scheduler beside vLLM's, step by step over the same requests: the same decisions."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    RSWAManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from oss_fused.plugin.registration import prepare_server
from oss_fused.plugin.scheduler import StepKVCacheManager, make_scheduler, shorten
from tests.loading import load_script
from tests.plugin.conftest import build

script = load_script("bench_scheduler")
Simulated, TOKEN = script.Simulated, script.TOKEN
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
        "found": [r.num_computed_tokens for r in scheduled.scheduled_new_reqs],
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


def state(simulated):
    """Of the cache: who holds which block, what is shared, and what is taken next."""
    manager = simulated.scheduler.kv_cache_manager
    groups, pool = manager.coordinator.single_type_managers, manager.block_pool
    held = [
        {name: [block.block_id for block in of] for name, of in group.req_to_blocks.items() if of}
        for group in groups
    ]
    shared = pool.cached_block_hash_to_block._cache
    return {
        "held": held,
        "shared": [dict(group.num_cached_block) for group in groups],
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "found": list(shared),
        "found in": [list(of) if isinstance(of, dict) else of.block_id for of in shared.values()],
    }


class Drafting(Simulated):
    """Each request is given ``drafts`` tokens a step, of which some are accepted."""

    drafts = 3

    def __init__(self, *args, lookahead=0):
        super().__init__(*args)
        self.scheduler.num_spec_tokens = self.drafts
        self.scheduler.num_lookahead_tokens = lookahead

    def sample(self, scheduled, yields):
        """How many drafts are accepted depends on the request and the step alone."""
        answers = []
        for name, end in zip(scheduled.num_scheduled_tokens, yields, strict=True):
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            accepted = random.Random(f"{name} {self.scheduler.current_step}").randint(0, drafts)
            answers.append([TOKEN] * (1 + accepted) if end else [])
        # a scheduler that runs ahead has the worker fill in the drafts
        if not self.scheduler.scheduler_config.async_scheduling:
            names = [n for n, end in zip(scheduled.num_scheduled_tokens, yields) if end]
            self.following = DraftTokenIds(names, [[TOKEN] * self.drafts for _ in names])
        return answers

    def step(self, depth):
        self.following = None
        result = super().step(depth)
        if self.following is not None:
            self.scheduler.update_draft_token_ids(self.following)
        return result


def serve_both(runs, depth, steps, source, draw):
    """Random arrivals and aborts, for vLLM's scheduler and ours; all decisions are the same.

    ``draw`` gives a request's prompt and its number of tokens. Returns how often a request was
    preempted, and how many tokens of prompts were found in the cache.
    """
    preempted = found = 0
    for number in range(50 * steps):
        arrivals = source.choice((0, 0, 0, 1, 2)) if number < steps else 0
        for i in range(arrivals):
            request = (f"{number}-{i}", *draw())
            for run in runs:
                run.add(*request)
        expected, got = (decisions(run, depth) for run in runs)
        assert got == expected, number
        if number % 16 == 0:
            assert state(runs[1]) == state(runs[0]), number
        preempted += len(expected["resumed"])
        found += sum(expected["found"])
        names = sorted(runs[0].scheduler.requests)
        if names and source.random() < 0.01:
            name = source.choice(names)
            for run in runs:
                run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if number >= steps and not names:
            assert state(runs[1]) == state(runs[0])
            return preempted, found
    raise AssertionError("some requests never end")


def make_runs(kind, config, groups, blocks, caching=True, **options):
    asynchronous = config.scheduler_config.async_scheduling
    theirs = AsyncScheduler if asynchronous else Scheduler
    runs = [
        kind(config, make, groups, blocks, caching, **options) for make in (theirs, make_scheduler)
    ]
    assert type(runs[0].scheduler.kv_cache_manager) is KVCacheManager
    assert type(runs[1].scheduler.kv_cache_manager) is StepKVCacheManager
    return runs


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "blocks"),
    [((FULL,), 400), ((FULL,), 22), ((FULL, sliding(32)), 400), ((FULL, sliding(32)), 36)],
    ids=["full", "full-preempts", "sliding", "sliding-preempts"],
)
def test_same_decisions(groups, blocks, depth, caching, folder):
    config = vllm_config(folder, depth > 1, max_num_batched_tokens=96, max_num_seqs=12)
    runs = make_runs(Simulated, config, groups, blocks, caching)
    source = random.Random(f"{blocks} {depth} {caching}")
    beginnings = [[source.randrange(99) for _ in range(40)] for _ in range(3)]

    def draw():
        beginning = source.choice(beginnings)[: source.randrange(1, 40)]
        return (
            beginning + [source.randrange(99) for _ in range(source.randrange(8))],
            source.randrange(1, 24),
        )

    preempted, found = serve_both(runs, depth, 150, source, draw)
    assert bool(preempted) == (blocks < 100)
    assert bool(found) == caching


LENGTH = 8192
WINDOWS = [
    # of each group, the number of steps under way, and whether prefixes are shared
    ((None, 128), 1, True),
    ((None, 128), 2, True),
    ((None, 128), 3, True),
    ((None, 128), 3, False),
    ((None, 100), 2, True),
    ((None, 130), 3, True),
    ((None, 17, 1), 2, True),
    ((100,), 3, True),
]


@pytest.mark.parametrize("kind", [Simulated, Drafting])
@pytest.mark.parametrize(("windows", "depth", "caching"), WINDOWS)
def test_same_decisions_far_beyond_the_window(kind, windows, depth, caching, folder):
    """As gpt-oss is served: long contexts in chunks, a cache that is nearly full."""
    config = vllm_config(folder, depth > 1, max_num_batched_tokens=256, max_num_seqs=16)
    config.model_config.max_model_len = config.scheduler_config.max_model_len = LENGTH
    # without drafts, prompts are admitted by their first chunk: they fill the cache
    crowded = kind is Simulated
    config.scheduler_config.scheduler_reserve_full_isl = not crowded
    groups = [FULL if window is None else sliding(window) for window in windows]
    # one request of the largest length fits, and some of the smaller ones beside it
    blocks = LENGTH // BLOCK * windows.count(None) + 64 * len(windows) + 64 * (None not in windows)
    # with a depth of 2 the draft model has keys of its own
    options = {"lookahead": Drafting.drafts * (depth == 2)} if kind is Drafting else {}
    runs = make_runs(kind, config, groups, blocks, caching, **options)
    source = random.Random(f"{windows} {depth} {caching} {kind.__name__}")
    beginnings = [[source.randrange(99) for _ in range(LENGTH)] for _ in range(3)]

    def draw():
        length = source.randrange(1, source.choice((100, 1000, 3000, LENGTH - 400)))
        # half of the prompts share a beginning
        first = source.choice((0, source.randrange(LENGTH)))
        told = source.choice(beginnings)
        return (told[first:] + told[:first])[:length], source.randrange(1, 400)

    preempted, found = serve_both(runs, depth, 40, source, draw)
    # little is kept of contexts that are seen through windows alone
    assert preempted or not crowded or None not in windows
    assert caching or not found


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
    # room for 32 and 48; what left the window before 47 is free once the step under way is
    assert asked == [0, 32, 48]


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


@pytest.mark.parametrize(
    ("kind", "hashes", "ours"),
    [
        (FullAttentionManager, BLOCK, True),
        # vLLM then shares a prompt's last, partly filled block as well
        (FullAttentionManager, BLOCK // 2, False),
        (SlidingWindowManager, BLOCK // 2, True),
        (MambaManager, BLOCK, False),
        (RSWAManager, BLOCK, False),
    ],
)
def test_other_caches_keep_vllms_manager(kind, hashes, ours):
    group = kind.__new__(kind)
    group.block_size, group.block_pool = BLOCK, SimpleNamespace(hash_block_size=hashes)
    group.sliding_window, group.extra_retained_tokens = 32, 0
    group.req_to_blocks, group.num_cached_block = {}, {}
    manager = KVCacheManager.__new__(KVCacheManager)
    manager.coordinator = SimpleNamespace(single_type_managers=(group,))
    shorten(manager)
    assert type(manager) is (StepKVCacheManager if ours else KVCacheManager)


@pytest.mark.parametrize(
    ("options", "short", "chosen"),
    [
        ({"quantization": "oss_fp8"}, True, "oss_fused.plugin.scheduler.make_scheduler"),
        ({"quantization": "oss_fp8"}, False, None),
        ({}, True, None),
        ({"quantization": "oss_fp8", "scheduler_cls": "my.Scheduler"}, True, "my.Scheduler"),
    ],
    ids=["ours", "switched off", "another quantisation", "the user's own"],
)
def test_chosen_only_where_the_model_is_ours(options, short, chosen, folder):
    config = vllm_config(folder, additional_config={"oss_fused": {"short_step": short}}, **options)
    assert config.scheduler_config.scheduler_cls == chosen
    assert config.structured_outputs_config.reasoning_parser == "openai_gptoss", "vLLM's settings"
    prepare_server(config)
    assert config.scheduler_config.scheduler_cls == chosen
