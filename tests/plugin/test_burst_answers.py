# SPDX-License-Identifier: MIT
"""Bursts beside vLLM's scheduler over random workloads: the same answers."""

import random
from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from oss_fused.plugin.burst import BurstScheduler
from tests.plugin.burst_schedulers import add, engine_config, make
from tests.plugin.stub_worker import BLOCK, VOCABULARY, StubWorker, continue_text

GROUPS = [(None,), (None, 128), (None, 20), (None, 32, 5), (40,)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


def draw(seed, burst):
    """A random workload: limits, and what arrives and is aborted when."""
    source = random.Random(seed)
    choice, length = source.choice, source.choice((48, 100, 200, 330))
    windows = choice(GROUPS)
    smallest = len(windows) * (length // BLOCK + 2) + 1
    case = SimpleNamespace(burst=burst, windows=windows, length=length, requests=[])
    case.blocks = choice((smallest, smallest + 6, 2 * smallest, 2000))
    case.caching = source.random() < 0.6
    case.places, case.budget = choice((1, 3, 8, 16)), choice((32, 64, 512))
    case.depth = choice((1, 2, 2, 2, 3))
    # everything is preempted, and resumed at once, as when weights are replaced
    case.reset = source.random() < 0.15
    told = [[source.randrange(VOCABULARY) for _ in range(length)] for _ in range(2)]
    step = 0
    for number in range(source.randrange(3, 16)):
        step += choice((0, 0, 1, 5, 30))
        begin = choice(told)[: source.randrange(0, length - 8)]
        prompt = begin + [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 6))]
        most = length - len(prompt)
        tokens = choice((most, min(most, source.randrange(1, 20)), source.randrange(1, most + 1)))
        extra = {"stop_token_ids": [source.randrange(VOCABULARY)] * (source.random() < 0.4)}
        if source.random() < 0.06:
            extra |= choice(({"min_tokens": 1}, {"presence_penalty": 0.5}, {"logprobs": 1}))
        abort = source.randrange(0, tokens) if source.random() < 0.12 else None
        case.requests.append((step, f"r{number}", prompt, tokens, extra, abort))
        told.append(prompt + continue_text(prompt, most))
    return case


def check_counters(scheduler, queue):
    """What vLLM counts of each request is what the steps under way will make true."""
    for request in scheduler.running:
        if not request.is_prefill_chunk:
            length = request.num_tokens + request.num_output_placeholders
            assert request.num_computed_tokens == length - 1, "counts"
        ran = [(s.num_scheduled_tokens.get(request.request_id, 0), s) for s, _ in queue]
        sizes = sum(n + getattr(s, "burst", 1) - 1 for n, s in ran if n)
        assert request.num_in_flight_tokens == sizes, "in flight"


def serve(config, kind, case):
    """Every request's tokens and why it ended, and the worker that made them."""
    scheduler = make(config, kind, case)
    worker = StubWorker(case.windows, case.blocks, case.length)
    coming, queue, answers, ends = deque(case.requests), deque(), {}, {}
    aborts = {name: abort for _, name, *_, abort in coming if abort is not None}
    step = 0
    while coming or queue or scheduler.has_requests():
        assert step < 20000, "no progress"
        while coming and coming[0][0] <= step:
            _, name, *request, _ = coming.popleft()
            answers[name] = []
            add(scheduler, name, *request)
        check_counters(scheduler, queue)
        scheduled = scheduler.schedule()
        names, ids = worker.execute(scheduled)
        if names:
            places = {name: i for i, name in enumerate(names)}
            queue.append((scheduled, ModelRunnerOutput(names, places, ids)))
        if queue and (len(queue) >= case.depth or not names):
            outputs = scheduler.update_from_output(*queue.popleft())
            worker.under_way.popleft()
            for out in (out for of in outputs.values() for out in of.outputs):
                assert out.request_id not in ends, "an answer after the end"
                answers[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    ends[out.request_id] = (str(out.finish_reason), out.stop_reason)
        for name in [n for n in aborts if len(answers.get(n, ())) > aborts[n] and n not in ends]:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            ends[name] = ("abort", None)
        if case.reset and step % 37 == 36:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        step += 1
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == case.blocks - 1, "leak"
    assert not getattr(scheduler, "_host_bound", None)
    return answers, ends, worker


@pytest.mark.parametrize("burst", [2, 3, 8, 16])
def test_same_answers(burst, config):
    bursts = preempted = saved = 0
    for seed in range(8):
        case = draw(f"{burst} {seed}", burst)
        texts, ends, theirs = serve(config, AsyncScheduler, case)
        got, got_ends, ours = serve(config, BurstScheduler, case)
        assert got_ends.keys() == ends.keys() == got.keys()
        for _, name, prompt, tokens, *_ in case.requests:
            truth = continue_text(prompt, tokens)
            assert texts[name] == truth[: len(texts[name])], (seed, name)
            assert got[name] == truth[: len(got[name])], (seed, name)
            aborted = "abort" in (ends[name][0], got_ends[name][0])
            same = (got[name], got_ends[name]) == (texts[name], ends[name])
            assert aborted or same, (seed, name)
        bursts, preempted = bursts + ours.bursts, preempted + ours.preempted
        saved += theirs.steps - ours.steps
    assert bursts and saved > 0 and preempted
