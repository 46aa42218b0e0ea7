# SPDX-License-Identifier: MIT
"""Bursts beside vLLM's scheduler over random workloads: the same answers; and when K is 1."""

import functools
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics import stats as vllm_stats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from oss_fused.plugin import burst as module
from oss_fused.plugin.burst import (
    SECONDS,
    WORKER,
    BurstScheduler,
    StepTimes,
    needs_host,
    start_bursts,
    why_single,
)
from oss_fused.plugin.burst_metrics import count_bursts
from oss_fused.plugin.scheduler import StepKVCacheManager, make_scheduler, shorten
from tests.plugin.conftest import build
from tests.plugin.stub_worker import BLOCK, VOCABULARY, StubWorker, continue_text

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)
GROUPS = [(None,), (None, 128), (None, 20), (None, 32, 5), (40,)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("model"), "gpt_oss", max_position_embeddings=1 << 12)
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
        "windows": (None,), "blocks": 400, "caching": True, "length": 256, "places": 8,
        "budget": 64, "burst": burst, "depth": 2,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


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


def add(scheduler, name, prompt, tokens, extra=None):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **(extra or {}))
    request = Request(name, prompt, params, None, block_hasher=HASHER)
    scheduler.add_request(request)
    return request


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


def test_a_burst_ends_with_the_longest_request(config):
    scheduler = make(config, BurstScheduler, small())
    add(scheduler, "a", [1, 2, 3], 20)
    # the prompt's token, 16 in two bursts, and the last three
    assert steps(scheduler, 6) == [1, 8, 8, 3]
    add(scheduler, "b", [1, 2, 3], 2)
    add(scheduler, "c", [1, 2, 3], 12)
    assert steps(scheduler, 4) == [1, 8, 3]


def test_a_burst_stays_within_the_models_length(config):
    scheduler = make(config, BurstScheduler, small(length=32))
    add(scheduler, "a", [1] * 20, 12)
    add(scheduler, "b", [2, 3, 4], 29)
    # the first request has room for three more, the second one wants eight
    assert steps(scheduler, 6) == [1, 8, 3, 8, 8, 1]


def test_a_request_whose_last_token_is_under_way_is_left_out(config):
    scheduler = make(config, BurstScheduler, small())
    add(scheduler, "a", [1, 2, 3], 12)
    add(scheduler, "b", [1, 2, 4], 60)
    assert steps(scheduler, 2) == [1, 8]
    for names in ({"a", "b"}, {"b"}):
        scheduled = scheduler.schedule()
        assert set(scheduled.num_scheduled_tokens) == names and scheduled.burst == 8


def test_a_prompt_in_pieces_and_an_arrival_take_single_steps(config):
    scheduler = make(config, BurstScheduler, small(budget=32))
    add(scheduler, "a", [1, 2, 3], 100)
    assert steps(scheduler, 2) == [1, 8]
    add(scheduler, "b", list(range(90)), 100)
    # three pieces of 31 tokens, since each step also decodes a token of the first request
    assert steps(scheduler, 5) == [1, 1, 1, 8, 8]


def test_a_full_server_goes_on_in_bursts(config):
    scheduler = make(config, BurstScheduler, small(places=2))
    for name in "abc":
        add(scheduler, name, [1, 2, 3], 17)
    # the third one is let in when the others have ended
    assert steps(scheduler, 8) == [1, 8, 8, 1, 8, 8]


@pytest.mark.parametrize(("blocks", "bursts"), [(17, True), (16, False)])
def test_no_request_is_preempted_for_anothers_later_tokens(blocks, bursts, config):
    # both prompts take 7 blocks, and both need one more for 16 tokens: two are free, or one
    scheduler = make(config, BurstScheduler, small(blocks=blocks, caching=False, burst=16))
    add(scheduler, "a", [1] * 100, 60)
    add(scheduler, "b", [2] * 100, 60)
    # the prompts take four steps of 64 tokens
    assert steps(scheduler, 5, depth=1) == [1, 1, 1, 1, 16 if bursts else 1]
    assert not any(request.num_preemptions for request in scheduler.requests.values())


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3, "min_p": 0.1}, None),
        ({"stop": ["x"], "stop_token_ids": [3], "detokenize": True}, None),
        ({"min_tokens": 3, "logit_bias": {3: 1.0}, "allowed_token_ids": [1, 2]}, None),
        ({"logprobs": 0}, "num_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"extra_args": {"a": 1}}, "extra_args"),
        ({"structured_outputs": StructuredOutputsParams(json_object=True)}, "structured output"),
    ],
)
def test_who_needs_the_host(extra, reason):
    params = SamplingParams(max_tokens=9, **extra)
    assert needs_host(Request("a", [1, 2], params, None)) == reason


def test_a_request_that_needs_the_host_stops_bursts_while_it_runs(config):
    scheduler = make(config, BurstScheduler, small(places=2))
    add(scheduler, "a", [1, 2, 3], 100)
    assert steps(scheduler, 2) == [1, 8]
    add(scheduler, "b", [1, 2, 3], 3, {"logprobs": 1})
    assert steps(scheduler, 5) == [1, 1, 1, 8, 8]
    # one that waits for a place stops nothing
    add(scheduler, "c", [1, 2, 3], 60)
    add(scheduler, "d", [1, 2, 3], 3, {"logprobs": 1})
    assert steps(scheduler, 3) == [1, 8, 8]


def test_auto_takes_what_fits_into_the_time(config):
    scheduler = make(config, BurstScheduler, small(burst=16))
    scheduler.auto = True
    add(scheduler, "a", [1] * 3, 200)
    # nothing is known of the first decode steps
    slow = ((1, SECONDS / 3.5),)
    assert steps(scheduler, 5, decode_times=slow) == [1, 1, 3, 3, 3]
    # one slow step changes nothing
    assert steps(scheduler, 1, decode_times=((1, 1.0),)) == [3]
    assert steps(scheduler, 2, decode_times=slow) == [3, 3]
    # another batch size has times of its own
    add(scheduler, "b", [1] * 3, 200)
    assert steps(scheduler, 4, decode_times=((2, SECONDS / 2),)) == [1, 1, 2, 2]


def test_auto_never_takes_more_than_the_longest(config):
    scheduler = make(config, BurstScheduler, small(burst=16))
    scheduler.auto = True
    add(scheduler, "a", [1] * 3, 200)
    assert steps(scheduler, 5, decode_times=((1, SECONDS / 99),)) == [1, 1, 16, 16, 16]


def test_times_of_steps():
    times = StepTimes()
    assert times.get(1) is None
    for seconds in (1.0, 2.0, 9.0):
        times.add(5, seconds)
    assert times.get(5) == times.get(8) == 2.0
    assert times.get(4) is None and times.get(9) is None
    for _ in range(5):
        times.add(8, 3.0)
    assert times.get(5) == 3.0


def fitting(config):
    """A scheduler and a configuration with which nothing speaks against bursts."""
    scheduler = make(config, BurstScheduler, small(burst=1))
    fields = {name: getattr(config, name) for name in ("model_config", "speculative_config")}
    parallel = SimpleNamespace(
        worker_cls=WORKER,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_eplb=False,
    )
    options = {"oss_fused": {"burst": "auto"}}
    return scheduler, SimpleNamespace(**fields, parallel_config=parallel, additional_config=options)


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("scheduler", {"use_v2_model_runner": False}, "V1 model runner"),
        ("scheduler", {"num_sampled_tokens_per_step": 0}, "one new token"),
        ("scheduler", {"connector": object()}, "connector"),
        ("scheduler", {"is_encoder_decoder": True}, "encoder"),
        ("scheduler", {"return_sampling_mask": True}, "sampling masks"),
        ("config", {"speculative_config": object()}, "drafts"),
        ("parallel", {"worker_cls": "my.Worker"}, "worker class"),
        ("parallel", {"pipeline_parallel_size": 2}, "pipeline"),
        ("parallel", {"data_parallel_size": 2}, "data parallel"),
        ("parallel", {"decode_context_parallel_size": 2}, "context parallel"),
        ("parallel", {"enable_eplb": True}, "load balancing"),
    ],
)
def test_where_steps_stay_single(where, change, words, config, monkeypatch):
    scheduler, fits = fitting(config)
    assert why_single(fits, scheduler) is None
    changed = {"scheduler": scheduler, "config": fits, "parallel": fits.parallel_config}[where]
    vars(changed).update(change)
    assert words in why_single(fits, scheduler)
    told = []
    monkeypatch.setattr(module.logger, "info", lambda text, *args: told.append(text % args))
    start_bursts(scheduler, fits)
    assert scheduler.longest == 1 and len(told) == 1 and words in told[0]


def test_the_monitor_samples_single_steps(config):
    scheduler, fits = fitting(config)
    fits.additional_config["oss_fused"]["monitor_every"] = 100
    assert "the monitor" in why_single(fits, scheduler)


@pytest.mark.parametrize(("setting", "longest"), [("auto", 16), (4, 4), (1, 1)])
def test_the_choice_is_logged_once(setting, longest, config, monkeypatch):
    scheduler, fits = fitting(config)
    fits.additional_config["oss_fused"]["burst"] = setting
    told = []
    monkeypatch.setattr(module.logger, "info", lambda text, *args: told.append(text % args))
    start_bursts(scheduler, fits)
    assert (scheduler.longest, scheduler.auto) == (longest, setting == "auto")
    assert told == [f"oss_fused: burst={setting}: up to {longest} decode steps per engine step"]


@pytest.mark.parametrize(
    ("setting", "asynchronous", "kind"),
    [(1, True, AsyncScheduler), ("auto", True, BurstScheduler), ("auto", False, Scheduler)],
)
def test_which_scheduler(setting, asynchronous, kind, config, monkeypatch):
    monkeypatch.setattr(config, "additional_config", {"oss_fused": {"burst": setting}})
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", asynchronous)
    case = small()
    case.burst = 1
    scheduler = make(config, make_scheduler, case)
    assert type(scheduler) is kind


class Stats:
    """What of vLLM's IterationStats a burst changes."""

    def __init__(self, itl):
        self.inter_token_latencies_iter, self.num_generation_tokens, self.itl = [], 0, itl

    def update_from_output(self, output, is_prefilling):
        self.num_generation_tokens += len(output.new_token_ids)
        if not is_prefilling:
            self.inter_token_latencies_iter.append(self.itl)


def test_metrics_count_each_token_of_a_burst(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    counter = functools.partial(prometheus.Counter, registry=registry)
    monkeypatch.setattr(prometheus, "Counter", counter)
    monkeypatch.setattr(vllm_stats, "IterationStats", Stats)
    theirs = Stats.update_from_output
    count_bursts()
    count_bursts()  # a second engine in this process
    try:
        stats = Stats(0.008)
        stats.update_from_output(SimpleNamespace(new_token_ids=[1]), True)
        stats.update_from_output(SimpleNamespace(new_token_ids=[1, 2, 3, 4]), False)
        stats.update_from_output(SimpleNamespace(new_token_ids=[1]), False)
        stats.update_from_output(SimpleNamespace(new_token_ids=[]), False)
    finally:
        Stats.update_from_output = theirs
    assert stats.inter_token_latencies_iter == [0.002] * 4 + [0.008, 0.008]
    # as in vLLM: the tokens of an engine step, and of the server
    assert stats.num_generation_tokens == 6

    def counted(burst):
        return registry.get_sample_value("oss_fused:burst_tokens_total", {"burst": burst})

    assert (counted("1"), counted("4"), counted("2")) == (2, 4, None)
