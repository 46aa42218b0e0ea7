# SPDX-License-Identifier: MIT
"""The tuner on a CPU with simulated times: search, pruning, failures, cache, portability."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch

from oss_fused.errors import (
    BackendUnavailableError,
    SchemeError,
    ShapeMismatchError,
    TritonKernelError,
    UnsupportedDeviceError,
)
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.decorator import autotune
from oss_fused.tuning.device import load_description
from oss_fused.tuning.lookup import get_cached_config
from oss_fused.tuning.objective import KernelMetrics, Objective
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.result import Status, trials_csv
from oss_fused.tuning.simulate import simulated_gemm_ms, tune_simulated
from oss_fused.tuning.space import FP8_GEMM_CONFIGS
from oss_fused.tuning.tuner import TritonAutoTuner, _Run

SPACE = {"BLOCK_SIZE": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)}
X = torch.ones(4)


class Simulated:
    """A kernel whose time is a function of its config, and the timer that reads it."""

    def __init__(self, cost):
        self.cost = cost
        self.now = 0.0
        self.calls = []

    def __call__(self, x, **config):
        self.calls.append(config)
        self.now = self.cost(config)
        return x * 2

    def timer(self, call, repeats, device):
        call()
        return [self.now] * repeats


def bowl(config):
    """Best at 64, 4, 3."""
    return 1.0 + sum(
        abs(math.log2(config[name] / best))
        for name, best in (("BLOCK_SIZE", 64), ("num_warps", 4), ("num_stages", 3))
    )


def tuner_of(tmp_path, kernel, space=SPACE, **options):
    return TritonAutoTuner(
        kernel,
        space,
        warmup_runs=1,
        benchmark_runs=20,
        operation="toy",
        cache=TuningCache(tmp_path / "c.json"),
        timer=kernel.timer,
        **options,
    )


def test_finds_the_optimum_without_trying_everything(tmp_path):
    kernel = Simulated(bowl)
    result = tuner_of(tmp_path, kernel).tune(X, problem_size=(4,), device="cpu")
    assert result.best_config == {"BLOCK_SIZE": 64, "num_warps": 4, "num_stages": 3}
    assert result.metrics.latency_ms == 1.0
    assert len(result.trials) < 48


def test_the_best_fifth_of_the_grid_is_refined_not_only_the_best(tmp_path):
    """The best point of the grid has no better neighbour; the second's neighbour is the best."""
    space = {"A": (1, 2, 3, 4, 5, 6, 7, 8), "B": (1, 2, 3, 4)}
    grid = [(a, b) for a in (3, 7) for b in (2, 4)]
    costs = {(3, 2): 2.0, (7, 4): 2.5, (8, 4): 1.0}

    def cost(config):
        at = (config["A"], config["B"])
        return costs.get(at, 5.0 if at in grid else 9.0)

    kernel = Simulated(cost)
    tuner = tuner_of(tmp_path, kernel, space)
    run = _Run(tuner, (X,), (4,), torch.device("cpu"))
    assert [tuple(c.values()) for c in tuner.config_space.coarse()] == grid
    # four configs keep one: the best alone, which no step improves
    assert tuner.tune(X, problem_size=(4,), device="cpu").best_config == {"A": 3, "B": 2}
    # of six the best two are kept
    run._measure_all([*tuner.config_space.coarse(), {"A": 1, "B": 1}, {"A": 1, "B": 2}])
    run._refine()
    assert run._best().config == {"A": 8, "B": 4}


def test_second_call_measures_nothing_and_force_does(tmp_path):
    kernel = Simulated(bowl)
    tuner = tuner_of(tmp_path, kernel)
    first = tuner.tune(X, problem_size=(4,), device="cpu")
    count = len(kernel.calls)
    again = tuner_of(tmp_path, kernel).tune(X, problem_size=(4,), device="cpu")
    assert len(kernel.calls) == count and again.from_cache
    assert again.best_config == first.best_config and again.metrics == first.metrics
    tuner.tune(X, problem_size=(4,), device="cpu", force=True)
    assert len(kernel.calls) > count


def test_get_cached_config(tmp_path):
    tuner = tuner_of(tmp_path, Simulated(bowl))
    best = tuner.tune(X, problem_size=(4,), device="cpu").best_config
    cached = {"dtype": torch.float32, "device": "cpu", "cache": tuner.cache}
    assert get_cached_config("toy", (4,), **cached) == best
    assert get_cached_config("toy", (5,), **cached) is None
    assert get_cached_config("toy", (4,), **{**cached, "dtype": torch.float16}) is None


def test_one_config_that_crashes_or_is_wrong_does_not_end_the_run(tmp_path):
    def cost(config):
        if config["num_warps"] == 4:
            raise RuntimeError("out of resource: shared memory")
        if config["num_stages"] == 3:
            raise IndexError("bad index")
        return bowl(config)

    class Sometimes(Simulated):
        def __call__(self, x, **config):
            result = super().__call__(x, **config)
            # the tempting one: fastest, and wrong
            return (
                result + 1
                if config == {"BLOCK_SIZE": 64, "num_warps": 8, "num_stages": 4}
                else result
            )

    result = tuner_of(tmp_path, Sometimes(cost), reference=lambda x: x * 2, exhaustive=True).tune(
        X, problem_size=(4,), device="cpu"
    )
    assert result.count(Status.TOO_LARGE) == 16
    assert result.count(Status.FAILED) == 8
    assert result.count(Status.WRONG) == 1
    assert result.best_config["BLOCK_SIZE"] == 64
    assert result.best_config != {"BLOCK_SIZE": 64, "num_warps": 8, "num_stages": 4}
    assert "wrong result" in result.summary()


def test_when_nothing_works_the_error_says_why(tmp_path):
    def cost(config):
        raise RuntimeError("no such instruction")

    with pytest.raises(TritonKernelError, match=r"no config.*no such instruction"):
        tuner_of(tmp_path, Simulated(cost)).tune(X, problem_size=(4,), device="cpu")
    assert not (tmp_path / "c.json").exists()


def test_history_seeds_and_remembers_what_cannot_run(tmp_path):
    def cost(config):
        if config["BLOCK_SIZE"] == 128:
            raise RuntimeError("out of resource: registers")
        return bowl(config)

    tuner_of(tmp_path, Simulated(cost)).tune(X, problem_size=(4,), device="cpu")
    later = Simulated(cost)
    result = tuner_of(tmp_path, later).tune(X, problem_size=(8,), device="cpu")
    assert later.calls[0] == result.best_config
    assert any("before" in trial.message for trial in result.trials)


def test_every_config_stands_in_the_csv(tmp_path):
    def cost(config):
        if config["num_warps"] == 8:
            raise RuntimeError("out of resource: registers, and more")
        return bowl(config)

    results = []
    for size in (4, 5):
        tuner = tuner_of(tmp_path, Simulated(cost), exhaustive=True)
        results.append(tuner.tune(X, problem_size=(size,), device="cpu"))
    cached = tuner_of(tmp_path, Simulated(cost)).tune(X, problem_size=(4,), device="cpu")
    rows = list(csv.DictReader(io.StringIO(trials_csv([*results, cached]))))
    assert len(rows) == 2 * 48
    assert {row["key"] for row in rows} == {result.key for result in results}
    for row in rows:
        config = {name: int(row[name]) for name in SPACE}
        if config["num_warps"] == 8:
            why = {"too large": "and more", "skipped": "did not fit the device before"}
            assert row["latency_ms"] == "" and why[row["status"]] in row["message"]
        else:
            assert float(row["latency_ms"]) == bowl(config) and row["status"] == "ok"


def test_a_decorated_function_finds_and_keeps_its_config(tmp_path):
    kernel = Simulated(bowl)
    options = {"warmup_runs": 1, "benchmark_runs": 20, "timer": kernel.timer}
    cache = TuningCache(tmp_path / "c.json")

    @autotune(SPACE, lambda x: (x.numel(),), cache=cache, **options)
    def double(x, **config):
        """Twice x."""
        return kernel(x, **config)

    best = {"BLOCK_SIZE": 64, "num_warps": 4, "num_stages": 3}
    assert torch.equal(double(X), X * 2) and kernel.calls[-1] == best
    assert double.best_config(X) == best and double.__doc__ == "Twice x."
    assert double.tuner.operation == "double"
    count = len(kernel.calls)
    double(X)
    assert len(kernel.calls) == count + 1, "no search, one call"
    double(torch.ones(5))
    assert len(kernel.calls) > count + 5, "another problem is searched"
    searched = len(kernel.calls)
    double(X.double())
    assert len(kernel.calls) > searched + 5, "another dtype, too"


def test_gain_over_a_default(tmp_path):
    default = {"BLOCK_SIZE": 16, "num_warps": 2, "num_stages": 1}
    result = tuner_of(tmp_path, Simulated(bowl)).tune(
        X, problem_size=(4,), device="cpu", default=default
    )
    assert result.gain == pytest.approx(bowl(default) - 1)


def test_real_function_on_the_real_clock(tmp_path):
    def chunked(x, BLOCK_SIZE):
        return torch.cat([part.exp() for part in x.split(BLOCK_SIZE)])

    x = torch.randn(4096)
    result = TritonAutoTuner(
        chunked,
        {"BLOCK_SIZE": (16, 256, 4096)},
        warmup_runs=1,
        benchmark_runs=20,
        reference=torch.exp,
        cache=TuningCache(tmp_path / "c.json"),
    ).tune(x, problem_size=(4096,), device="cpu")
    assert result.best_config["BLOCK_SIZE"] != 16
    assert result.metrics.latency_ms > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_runs": -1}, "warmup_runs=-1"),
        ({"benchmark_runs": 3}, "benchmark_runs=3"),
        ({"config_space": {}}, "parameters"),
        ({"config_space": {"BLOCK_SIZE": ()}}, "BLOCK_SIZE"),
        ({"config_space": {"BLOCK_SIZE": (16, 16)}}, "distinct"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        TritonAutoTuner(torch.exp, **{"config_space": SPACE, **options})


def test_bad_problem_size_and_objective(tmp_path):
    with pytest.raises(ShapeMismatchError, match="problem_size='big'"):
        tuner_of(tmp_path, Simulated(bowl)).tune(X, problem_size="big", device="cpu")
    with pytest.raises(ValueError, match="expected weights"):
        Objective(latency=0)
    with pytest.raises(SchemeError, match="finite"):
        Objective(memory=float("nan"))
    tuner = tuner_of(tmp_path, Simulated(bowl), objective=Objective(energy=1.0))
    with pytest.raises(BackendUnavailableError, match=r"objective\.energy"):
        tuner.tune(X, problem_size=(4,), device="cpu")


def test_objectives_weigh_against_each_other():
    def metrics(latency, memory):
        return KernelMetrics(latency, latency, latency, 0.0, 20, memory_bytes=memory)

    quick, small = metrics(1.0, 4000), metrics(1.5, 1000)
    assert Objective().score(quick) < Objective().score(small)
    assert Objective(1, 1).score(small) < Objective(1, 1).score(quick)


def test_retuned_for_a_weaker_device_reaches_80_percent_of_its_best(tmp_path):
    problem = FP8GEMMInput(4096, 4096, 4096)
    low, h200 = load_description("low_bw"), load_description("h200")
    cache = TuningCache(tmp_path / "c.json")
    on_h200, on_low = (tune_simulated(d, problem, cache) for d in (h200, low))
    fitting = [c for c in FP8_GEMM_CONFIGS if reason_to_skip(c, low, (), 1) is None]
    best = min(simulated_gemm_ms(low, problem, config) for config in fitting)
    assert best / on_low.metrics.latency_ms >= 0.8
    assert len(on_low.trials) < len(FP8_GEMM_CONFIGS) / 4
    # the other device's answer is refused, or slower: retuning is what earns the figure
    if reason_to_skip(on_h200.best_config, low, (), 1) is None:
        assert simulated_gemm_ms(low, problem, on_h200.best_config) > on_low.metrics.latency_ms
    # and the cache keeps the two devices apart
    assert len(cache.entries()) == 2


def test_summary_reports_latency_throughput_and_bandwidth_share(tmp_path):
    problem = FP8GEMMInput(512, 512, 512)
    result = tune_simulated(load_description("h200"), problem, TuningCache(tmp_path / "c.json"))
    for word in (" ms,", " TFLOP/s,", " GB/s (", " of nominal) with BLOCK_M="):
        assert word in result.summary()


def from_cache(tmp_path, function, *args, objective=None):
    """Whether the cache had the answer; operation, sizes and file are the same in every call."""
    tuner = TritonAutoTuner(
        function,
        {"BLOCK": (1, 2)},
        0,
        20,
        operation="one",
        cache=TuningCache(tmp_path / "c.json"),
        timer=lambda call, repeats, device: [1.0] * repeats,
        objective=objective,
    )
    return tuner.tune(*args, problem_size=(4,), device="cpu").from_cache


def scaled(factor):
    return lambda *tensors, BLOCK: tensors[0] * factor


def test_the_key_holds_kernel_objective_and_every_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(Objective, "check_device", lambda self, device: None)
    double, triple = (lambda *t, BLOCK: t[0] * 2), (lambda *t, BLOCK: t[0] * 3)
    searches = [
        (double, X),
        (triple, X),
        (scaled(2), X),
        (scaled(3), X),
        (double, X, X),
        (double, X, X.bfloat16()),
    ]
    for search in searches:
        assert not from_cache(tmp_path, *search), search
    for search in searches:
        assert from_cache(tmp_path, *search), search
    memory = Objective(latency=1, memory=1)
    assert not from_cache(tmp_path, double, X, objective=memory)
    assert not from_cache(tmp_path, double, X, objective=Objective(memory=0.5))
    assert from_cache(tmp_path, double, X, objective=memory)

    known = {"problem_size": (4,), "device": "cpu", "cache": TuningCache(tmp_path / "c.json")}
    with pytest.raises(SchemeError, match="6 tuned entries fit"):
        get_cached_config("one", dtype=torch.float32, **known)
    both = (torch.float32, torch.bfloat16)
    assert get_cached_config("one", dtype=both, kernel_fn=double, **known)
    assert get_cached_config("one", dtype=both, **known)
    assert get_cached_config("one", dtype=both, kernel_fn=triple, **known) is None
    alone = {"dtype": [torch.float32], "kernel_fn": double, **known}
    assert get_cached_config("one", objective=memory, **alone)
    assert get_cached_config("one", objective=Objective(energy=1), **alone) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_missing_gpu_is_named(tmp_path):
    with pytest.raises(BackendUnavailableError, match="device='cuda:0'"):
        tuner_of(tmp_path, Simulated(bowl)).tune(X, problem_size=(4,))
    with pytest.raises(BackendUnavailableError, match="device='cuda:0'"):
        get_cached_config("toy", (4,))


@pytest.mark.parametrize("device", ["meta", "nonsense", "cpu:x"])
def test_an_unknown_device_is_named(tmp_path, device):
    with pytest.raises(UnsupportedDeviceError, match="device="):
        tuner_of(tmp_path, Simulated(bowl)).tune(X, problem_size=(4,), device=device)
