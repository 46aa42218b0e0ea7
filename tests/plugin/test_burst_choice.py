# SPDX-License-Identifier: MIT
"""When bursts are chosen, what stops them, and what metrics say of them."""

import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics import stats as vllm_stats
from vllm.v1.request import Request

from oss_fused.plugin import burst as module
from oss_fused.plugin.burst import WORKER, BurstScheduler, needs_host, start_bursts, why_single
from oss_fused.plugin.burst_metrics import count_bursts
from oss_fused.plugin.scheduler import make_scheduler
from tests.plugin.burst_schedulers import engine_config, make, small


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


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
    told = []
    monkeypatch.setattr(module.logger, "info", lambda text, *args: told.append(text % args))
    case = small()
    case.burst = 1
    scheduler = make(config, make_scheduler, case)
    assert type(scheduler) is kind
    why = (
        "oss_fused: each engine step is one decode step, because of synchronous scheduling (as "
        "with --no-async-scheduling). Bursts of several need a server without it."
    )
    assert (why in told) == (kind is Scheduler)


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
