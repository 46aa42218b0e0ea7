# SPDX-License-Identifier: MIT
"""The library's figures: norm bandwidth, matmul steps, tuning gain, host overhead."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from harness.chapters import chapter
from harness.summary import merge_summary
from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.statistics import MIN_SAMPLES, collect
from oss_fused.bench.suite import BenchmarkRow, BenchmarkSuite
from oss_fused.bench.timing import host_overhead_us, time_calls, warm_up
from oss_fused.environment import fingerprint
from oss_fused.files import write_json
from oss_fused.functional import fused_rmsnorm_rope
from oss_fused.kernels.op import backend_for, get_kernel
from oss_fused.specs import RMSNormRoPEInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.space import Config
from oss_fused.tuning.targets import get_target
from oss_fused.tuning.tuner import TritonAutoTuner


def norm_figures(
    suite: BenchmarkSuite, seq_len: int, hidden_dims: Sequence[int]
) -> dict[str, float]:
    """Smallest bandwidth share and speed-ups of ``fused_rmsnorm_rope``; the rows stay in ``suite``.

    Raises:
        RuntimeError: the native row or PyTorch's has no time. Another backend's row may fail.
    """
    rows: list[BenchmarkRow] = []
    for hidden in hidden_dims:
        # heads of 64 up to the size of Llama 3.2 1B, 128 beyond, as scripts/bench_kernels.py has it
        head_dim = 64 if hidden <= 2048 else 128
        rows += suite.benchmark_rmsnorm_rope((1,), (seq_len,), (hidden,), head_dim)
    by_problem: dict[str, dict[str, BenchmarkRow]] = {}
    for row in rows:
        by_problem.setdefault(row.problem, {})[row.implementation] = row
    native = [found["oss_fused"] for found in by_problem.values()]
    compared = {"speedup_eager_min": "pytorch", "speedup_compile_min": "pytorch compiled"}
    figures = {}
    for figure, name in compared.items():
        baseline = [found[name] for found in by_problem.values() if name in found]
        bad = [row for row in (*native, *baseline) if row.latency_ms is None]
        if bad:
            raise RuntimeError(f"{bad[0].name}: {bad[0].status}: {bad[0].message}")
        if baseline:
            ratios = [(b.latency_ms or 0) / (a.latency_ms or 1) for a, b in zip(native, baseline)]
            figures[f"library.rmsnorm_rope.{figure}"] = min(ratios)
    shares = [row.bandwidth_utilization or 0.0 for row in native]
    return {"library.rmsnorm_rope.bandwidth_min": min(shares), **figures}


def matmul_steps(
    device: torch.device, size: int, max_rounds: int = 5, tuned: Config | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Median ms of every step of docs/tutorial/06-matmul.py and of its cuBLAS counterpart.

    v3 and v4 take ``tuned``, a config that ``tuning_gain`` found; None leaves their default.
    """
    steps = chapter("06-matmul")
    config = tuned or {}
    made = chapter("10-autotuning").MatmulProblem(size, size, size).make(device)
    a, b = made["a"], made["b"].contiguous()
    bias = torch.ones(size, dtype=a.dtype, device=device)
    product = a.float() @ b.float()
    calls = {
        "v0": (lambda: steps.matmul_v0(a, b), product),
        "v1": (lambda: steps.matmul_v1(a, b), product),
        "v2": (lambda: steps.matmul_v2(a, b), product),
        "v3": (lambda: steps.matmul_v3(a, b, **config), product),
        "v4": (lambda: steps.matmul_v4(a, b, bias, **config), F.silu(product + 1)),
        "cublas": (lambda: a @ b, product),
        "cublas+bias+silu": (lambda: F.silu(a @ b + bias), F.silu(product + 1)),
    }
    times = {}
    for name, (call, expected) in calls.items():
        verdict = check_accuracy(call(), expected)
        if not verdict.passed:
            raise RuntimeError(f"matmul {name}: {verdict.reason}")
        warm_up(call, 3, device)
        sampler = functools.partial(time_calls, call, device=device)
        times[name] = collect(sampler, MIN_SAMPLES, max_rounds)[1].p50
    return {"library.matmul_v3.fraction_of_cublas": times["cublas"] / times["v3"]}, times


def tuning_gain(
    device: torch.device, name: str, sizes: Sequence[int], cache: TuningCache
) -> tuple[float, dict[str, Any]]:
    """Gain of tuning ``get_target(name)`` at ``sizes`` over its default, and the search's detail.

    The default of "matmul" is the config of v2; that of the library's own kernels is their
    untuned config.
    """
    chapter("10-autotuning")  # adds the target "matmul"
    target = get_target(name)
    problem = target.problem(*sizes)
    tuner = TritonAutoTuner(
        target.function,
        target.space,
        warmup_runs=3,
        benchmark_runs=MIN_SAMPLES,
        operation=name,
        reference=target.reference,
        tolerance=target.tolerance,
        accumulators=target.accumulators,
        cache=cache,
        compile_workers=8,
    )
    result = tuner.tune(
        *target.arguments(problem, device),
        problem_size=problem,
        device=device,
        force=True,
        default=target.default,
    )
    detail = {
        "key": result.key,
        "config": result.best_config,
        "gain": result.gain,
        "metrics": result.metrics.to_dict(),
        "default": result.default_metrics.to_dict() if result.default_metrics else None,
        "trials": [[t.config, t.status.value, t.message[:200]] for t in result.trials],
    }
    return result.gain or 0.0, detail


def host_overhead(device: torch.device) -> dict[str, float]:
    """Host microseconds that the public function adds to the kernel's own launcher."""
    args = RMSNormRoPEInput(1, 1, 64, 64).make(device)
    launcher = get_kernel(backend_for("rmsnorm_rope", device), "rmsnorm_rope")
    with torch.inference_mode():
        public = host_overhead_us(lambda: fused_rmsnorm_rope(**args), 500)
        raw = host_overhead_us(lambda: launcher(*args.values(), 1e-6), 500)
    return {"library.door_overhead_us": public - raw}


def write_figures(folder: Path, figures: Mapping[str, float], detail: Mapping[str, Any]) -> None:
    """Write ``library.json`` with everything, and merge the figures into ``summary.json``."""
    write_json(
        folder / "library.json", {"environment": fingerprint(), "figures": figures, **detail}
    )
    merge_summary(folder / "summary.json", figures, folder / "library.json")
