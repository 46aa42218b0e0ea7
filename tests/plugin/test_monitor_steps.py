# SPDX-License-Identifier: MIT
"""What the monitor takes for a step, and whose steps it counts."""

from __future__ import annotations

import gc
import logging
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

import oss_fused.kernels  # noqa: F401
from oss_fused.kernels import op as registration
from oss_fused.plugin.monitor import watch
from oss_fused.quant.settings import ServingOptions
from tests.plugin.conftest import PROMPT, build, calibrate
from tests.plugin.test_monitor import linear_layer

TOKENS, REQUESTS = 7, 3


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No monitor of an earlier test, and none that outlives this one."""
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path / "figures"))
    monkeypatch.setattr(watch, "_monitor", None)
    yield
    if watch.current() is not None:
        watch.current().stop()


class Model(torch.nn.Module):
    """A layer and a head, both FP8."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = linear_layer("layer"), linear_layer("head")
        for each in (self.layer, self.head):
            codes, each.scale = torch.ops.oss_fused.quantize_fp8(
                torch.ones(32, 32), None, "channel"
            )
            each.weight = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, tokens):
        return self._run(self.layer, tokens)

    def compute_logits(self, tokens):
        return self._run(self.head, tokens)

    @staticmethod
    def _run(layer, tokens):
        x = torch.ones(tokens, 32)
        return torch.ops.oss_fused.fp8_linear(x, layer.weight, layer.scale, None, None)


class Runner:
    """Calls what vLLM's runner of that version calls of the model in a step."""

    def __init__(self, model, kind):
        self.model, self.kind = model, kind
        self.log = []

    def execute_model(self):
        self.model(TOKENS)
        if self.kind == "V1":
            self.model.compute_logits(REQUESTS)

    def sample_tokens(self, grammar_output):
        for _ in range({"V1": 0, "V2": 1, "burst": 4}[self.kind]):
            self.model.compute_logits(REQUESTS)
        # prompt log-probabilities of two requests, and a draft model that shares the head
        for tokens in (5, 1, 1):
            self.model.compute_logits(tokens)
        self.log.append("end")
        return "output"


class Worker:
    """As much of vLLM's as the monitor needs."""

    def __init__(self, model, kind="V2"):
        self.model_runner = Runner(model, kind)

    def get_model(self):
        return self.model_runner.model

    def compile_or_warm_up_model(self):
        self.step()

    def step(self):
        self.model_runner.execute_model()
        assert self.model_runner.sample_tokens(None) == "output"


def config(**model):
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"runner_type": "generate"} | model),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_rank=0,
            world_size=1,
            rank=0,
            worker_cls=f"{__name__}.Worker",
        ),
    )


@pytest.fixture(params=["V1", "V2", "burst"])
def worker(request):
    model = Model()
    watch.install(model, config(), ServingOptions(monitor_every=2))
    worker = Worker(model, request.param)
    worker.compile_or_warm_up_model()
    worker.compile_or_warm_up_model()
    return worker


def monitor_thread():
    return next(each for each in threading.enumerate() if each.name == "oss-fused-monitor")


def test_a_step_counts_once_however_often_its_head_runs(worker, monkeypatch):
    """A sample holds the tokens of its own step's sampling alone."""
    monitor, samples = watch.current(), []
    monkeypatch.setattr(monitor.statistics, "add", lambda rows, counts: samples.append(counts))
    monitor._steps = 0
    for _ in range(7):
        worker.step()
    assert monitor._steps == 7
    thread = monitor_thread()
    monitor.stop()
    thread.join(10)
    assert samples == [[TOKENS, REQUESTS]] * 3


def test_every_step_is_a_sample_where_all_are_asked_for():
    model = Model()
    watch.install(model, config(), ServingOptions(monitor_every=1))
    worker = Worker(model)
    worker.compile_or_warm_up_model()
    for _ in range(4):
        worker.step()
    thread = monitor_thread()
    watch.current().stop()
    thread.join(10)
    # the first step after the start was not announced by one before it
    assert watch.current().statistics.samples == 3


def test_layers_switch_between_steps(worker):
    log = worker.model_runner.log
    log.clear()
    monitor = watch.current()
    monitor.statistics.saturating["layer"] = "why"
    monitor._fallback = SimpleNamespace(switch=lambda wanted, policy: log.append("switch") or 0)
    for _ in range(3):
        worker.step()
    assert log == ["end", "switch"] * 3


def test_freeing_an_older_model_leaves_the_newer_one_watched():
    old, new = Model(), Model()
    monitor = watch.Monitor(2, rank=0)
    monitor.watch(old)
    monitor.start()
    monitor.watch(new)
    monitor.watch(new)
    del old
    gc.collect()
    assert monitor.serving and len(monitor._index) == 2
    del new
    gc.collect()
    assert not monitor.serving


def test_a_monitor_of_other_options_ends_the_one_before():
    """The end of the older model would take the observer of the newer one."""
    old, new = Model(), Model()
    watch.install(old, config(), ServingOptions(monitor_every=2))
    before = watch.current()
    before.start()
    watch.install(new, config(), ServingOptions(monitor_every=1))
    after = watch.current()
    assert after is not before and not before.serving
    registration.set_observer(after.observe)
    del old
    gc.collect()
    new(TOKENS)
    assert after._counts == [TOKENS, 0]


def test_an_engine_without_a_monitor_does_not_start_that_of_another():
    model, other = Model(), Model()
    watch.install(model, config(), ServingOptions(monitor_every=1))
    worker = Worker(other)
    worker.compile_or_warm_up_model()
    worker.step()
    assert not watch.current().serving and not watch.current().sampling
    # a model that contains the watched one, as models of images contain their language model
    assert watch.current().watches(torch.nn.ModuleList([model]))


def test_a_pooling_model_is_not_watched(caplog, monkeypatch):
    from vllm.logger import _print_warning_once

    _print_warning_once.cache_clear()
    monkeypatch.setattr(watch.logger, "propagate", True, raising=False)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        watch.install(Model(), config(runner_type="pooling"), ServingOptions(monitor_every=1))
    assert watch.current() is None
    (record,) = caplog.records
    assert "is off for a pooling model" in record.getMessage()


@pytest.mark.serve
def test_prompt_logprobs_are_no_steps_of_their_own(tmp_path, engine):
    from vllm import SamplingParams

    options = {"oss_fused": {"monitor_every": 2}}
    served = engine(calibrate(build(tmp_path / "m", "llama")), additional_config=options)
    monitor = watch.current()
    for prompt_logprobs in (None, 0):
        before = monitor._steps
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=prompt_logprobs, detokenize=False
        )
        for _ in range(5):
            served.llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, use_tqdm=False)
        assert monitor._steps - before == 5, prompt_logprobs
