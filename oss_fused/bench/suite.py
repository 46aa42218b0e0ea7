# SPDX-License-Identifier: MIT
"""BenchmarkSuite: the library's functions against PyTorch and the vendor's libraries.

Every implementation is verified before it is timed: by the oracle on a small problem, and at the
measured size against the first implementation. One that is wrong, fails or is missing gets a row
that says so, and no time. One without memory is measured on half of the problem. Times follow the
measuring method of bench/statistics.py.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from oss_fused.bench.energy import energy_per_call_mj, gops_per_watt
from oss_fused.bench.implementations import implementations
from oss_fused.bench.memory import peak_memory_bytes, with_memory
from oss_fused.bench.operators import OperatorBenchmarks
from oss_fused.bench.problems import OperatorProblem
from oss_fused.bench.report import Report
from oss_fused.bench.roofline import Ceilings, RooflinePoint, analyse, measure_ceilings
from oss_fused.bench.runner import Implementation, Problem, difference, halved, shrunk, verify
from oss_fused.bench.statistics import MIN_SAMPLES, collect
from oss_fused.bench.timing import copies_for, time_calls, time_replays, warm_up
from oss_fused.environment import fingerprint
from oss_fused.errors import (
    BackendUnavailableError,
    SchemeError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from oss_fused.kernels.checks import FLOAT_DTYPES, check_device
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

FORMAT = 1


@dataclass(frozen=True)
class BenchmarkRow:
    """One implementation on one problem; latency is None where ``status`` is not "ok"."""

    operation: str
    problem: str
    implementation: str
    status: str
    message: str = ""
    latency_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    relative_std: float | None = None
    stable: bool | None = None
    tflops: float | None = None
    bandwidth_gbps: float | None = None
    bandwidth_utilization: float | None = None
    flops_utilization: float | None = None
    bottleneck: str | None = None
    energy_mj: float | None = None
    gops_per_watt: float | None = None
    peak_memory_bytes: int | None = None
    speedup: float | None = None
    relative_error: float | None = None
    samples_ms: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``operation/problem/implementation``: what identifies the row across result files."""
        return f"{self.operation}/{self.problem}/{self.implementation}"


class BenchmarkSuite(OperatorBenchmarks):
    """Collects rows of several benchmarks and reports them together.

    Args:
        warmup_runs: calls before each measurement.
        benchmark_runs: samples of a round, at least 20; noisy rows get more rounds.
        device: default: the GPU where there is one.
        dtype: of activations and weights.
        compile_baseline: also measure ``torch.compile`` of the eager formula.
        ceilings: roofs; default: measured at the first benchmark.
        graphs: on a GPU, time replays of a CUDA graph over inputs that exceed the L2, as a served
            model runs; False times call by call, for functions that cannot be captured.
        energy: measure millijoules and GOPS/W by NVML, half a second a row; a GPU only.
        backends: further backends of the kernel registry to measure beside the library's functions,
            where they run; default on a GPU: "cuda" and "tilelang".

    Raises:
        SchemeError: a run count.
        BackendUnavailableError: ``energy``, or ``device="cuda"``, without a GPU.
        UnsupportedDeviceError: no such device.
        UnsupportedDtypeError: ``dtype`` is not floating.
    """

    def __init__(
        self,
        warmup_runs: int = 10,
        benchmark_runs: int = 100,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        compile_baseline: bool | None = None,
        ceilings: Ceilings | None = None,
        graphs: bool = True,
        energy: bool = False,
        backends: Sequence[str] | None = None,
    ) -> None:
        """Keep the settings; nothing is measured yet."""
        if warmup_runs < 0:
            raise SchemeError(f"warmup_runs={warmup_runs}: expected at least 0")
        if benchmark_runs < MIN_SAMPLES:
            raise SchemeError(f"benchmark_runs={benchmark_runs}: expected at least {MIN_SAMPLES}")
        if energy and not torch.cuda.is_available():
            raise BackendUnavailableError("energy=True: needs an NVIDIA GPU, whose NVML counts it")
        self.warmup_runs = warmup_runs
        self.benchmark_runs = benchmark_runs
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = check_device(device if device is not None else default)
        if dtype not in FLOAT_DTYPES:
            raise UnsupportedDtypeError(f"dtype={dtype}: expected bfloat16, float16 or float32")
        self.dtype = dtype
        on_gpu = self.device.type == "cuda"
        self.compile_baseline = on_gpu if compile_baseline is None else compile_baseline
        self._ceilings = ceilings
        self.graphs = graphs
        self.energy = energy
        further = ("cuda", "tilelang") if on_gpu else ()
        self.backends = tuple(further if backends is None else backends)
        self.rows: list[BenchmarkRow] = []
        self.points: list[RooflinePoint] = []

    @property
    def ceilings(self) -> Ceilings:
        """The roofs, measured on first use."""
        if self._ceilings is None:
            dtypes = (self.dtype, torch.float8_e4m3fn)
            self._ceilings = measure_ceilings(self.device, dtypes)
        return self._ceilings

    def benchmark_rmsnorm_rope(
        self,
        batch_sizes: Sequence[int] = (1,),
        seq_lens: Sequence[int] = (128, 1024, 8192),
        hidden_dims: Sequence[int] = (2048, 4096, 8192),
        head_dim: int = 64,
    ) -> list[BenchmarkRow]:
        """``fused_rmsnorm_rope`` against the eager formula and, on a GPU, its torch.compile."""
        problems = [
            RMSNormRoPEInput(b, s, h, head_dim, self.dtype)
            for b, s, h in itertools.product(batch_sizes, seq_lens, hidden_dims)
        ]
        return self._benchmark("rmsnorm_rope", problems)

    def benchmark_gated_mlp(
        self,
        batch_sizes: Sequence[int] = (1, 16, 64),
        seq_lens: Sequence[int] = (1,),
        hidden_dims: Sequence[int] = (2048, 4096),
        intermediate_dims: Sequence[int] = (5632, 11264, 22528),
        activations: Sequence[str] = ("silu",),
    ) -> list[BenchmarkRow]:
        """``fused_gated_mlp`` against two cuBLAS products and the activation."""
        sizes = itertools.product(
            batch_sizes, seq_lens, hidden_dims, intermediate_dims, activations
        )
        problems = [GatedMLPInput(*values, dtype=self.dtype) for values in sizes]
        return self._benchmark("gated_mlp", problems)

    def benchmark_fp8_gemm(
        self, sizes: Sequence[tuple[int, int, int]] = ((4096, 4096, 4096),)
    ) -> list[BenchmarkRow]:
        """``fp8_gemm`` of floating operands against cuBLAS; backend "cuda" is cuBLASLt in FP8.

        Args:
            sizes: (M, N, K). Every FP8 row quantises both operands inside the timed call; for the
                products alone see scripts/bench_kernels.py.
        """
        problems = [FP8GEMMInput(m, n, k, out_dtype=self.dtype) for m, n, k in sizes]
        return self._benchmark("fp8_gemm", problems)

    def _benchmark(self, operation: str, problems: Sequence[Problem]) -> list[BenchmarkRow]:
        return self.benchmark(operation, problems, implementations(operation, self.backends))

    def benchmark(
        self,
        operation: str,
        problems: Sequence[Problem],
        implementations: Mapping[str, Implementation],
    ) -> list[BenchmarkRow]:
        """Verify and time each implementation; the first one is what speed-ups refer to.

        Args:
            operation: label of the rows.
            problems: what to run on.
            implementations: name to function of the keyword arguments of ``problem.make``.

        Raises:
            ShapeMismatchError: a problem without work, which takes no time of its own.
        """
        for problem in problems:
            if problem.flops < 1:
                raise ShapeMismatchError(f"{problem}: expected sizes of at least 1")
        added = []
        for problem in problems:
            base: BenchmarkRow | None = None
            outputs: dict[Problem, torch.Tensor] = {}
            candidates = dict(implementations)
            if self.compile_baseline:
                first, function = next(iter(implementations.items()))
                # dynamo gives up, silently, on a function that it compiled for eight shapes
                torch.compiler.reset()
                candidates[f"{first} compiled"] = torch.compile(function, dynamic=False)
            for name, function in candidates.items():
                row = self._row(operation, problem, name, function, outputs)
                base = row if base is None and row.latency_ms else base
                if base and base.latency_ms and row.latency_ms and row.problem == base.problem:
                    row = replace(row, speedup=base.latency_ms / row.latency_ms)
                added.append(row)
        self.rows += added
        return added

    def _row(
        self,
        operation: str,
        problem: Problem,
        name: str,
        function: Implementation,
        outputs: dict[Problem, torch.Tensor],
    ) -> BenchmarkRow:
        asked = describe(problem)
        row = BenchmarkRow(operation, asked, name, "ok")
        with torch.inference_mode():
            verdict = verify(function, shrunk(problem), self.device)
            if not verdict.passed:
                message = f"{verdict.case}: {verdict.result.reason}"
                return replace(row, status="wrong", message=message)
            try:
                measure = functools.partial(self._measure, function, outputs)
                problem, reason, (samples, timing, memory) = with_memory(measure, problem, halved)
                energy, note = self._energy(function, problem)
            except Exception as error:
                return replace(row, status="failed", message=f"{type(error).__name__}: {error}")
        row = replace(row, problem=describe(problem))
        if reason:
            return replace(row, status="wrong", message=f"{row.problem}: {reason}")
        if row.problem != asked:
            note = f"out of memory at {asked}; {note}".rstrip("; ")
        fp8 = isinstance(problem, FP8GEMMInput) and name != "pytorch"
        dtype = "float8_e4m3fn" if fp8 else str(self.dtype).removeprefix("torch.")
        point = analyse(
            row.name, timing.p50, problem.flops, problem.num_bytes, dtype, self.ceilings
        )
        self.points.append(point)
        peak = self.ceilings.tflops.get(dtype)
        return replace(
            row,
            message=note,
            latency_ms=timing.p50,
            p90_ms=timing.p90,
            p99_ms=timing.p99,
            relative_std=timing.relative_std,
            stable=timing.stable,
            tflops=point.tflops,
            bandwidth_gbps=point.bandwidth_gbps,
            bandwidth_utilization=point.bandwidth_gbps / self.ceilings.bandwidth_gbps,
            flops_utilization=point.tflops / peak if peak else None,
            bottleneck=point.bottleneck.value,
            energy_mj=energy,
            gops_per_watt=gops_per_watt(problem.flops, energy) if energy else None,
            peak_memory_bytes=memory,
            relative_error=verdict.relative_error,
            samples_ms=samples,
        )

    def _measure(
        self, function: Implementation, outputs: dict[Problem, torch.Tensor], problem: Problem
    ) -> tuple[Problem, str, tuple[list[float], Any, int | None]]:
        """The problem, what is wrong with its output, and ``_time``."""
        output = function(**problem.make(self.device))
        reason = difference(output, outputs.setdefault(problem, output), problem)
        del output
        return problem, reason, self._time(function, problem)

    def _time(
        self, function: Implementation, problem: Problem
    ) -> tuple[list[float], Any, int | None]:
        """Samples in ms, what they come to, and the peak memory of a call in bytes."""
        sets = 1 if self.device.type != "cuda" else copies_for(problem.num_bytes)
        arguments = problem.make(self.device)
        calls = [functools.partial(function, **arguments)]
        for _ in range(sets - 1):
            # strides and all: the transpose of a row-major weight stays one
            copies = {
                n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()
            }
            calls.append(functools.partial(function, **copies))
        warm_up(calls[0], self.warmup_runs, self.device)
        sampler: Callable[[int], list[float]] = functools.partial(
            time_calls, calls[0], device=self.device
        )
        if self.device.type == "cuda" and self.graphs:
            sampler = functools.partial(self._replays, calls)
        samples, timing = collect(sampler, self.benchmark_runs, max_rounds=3)
        return samples, timing, peak_memory_bytes(calls[0], self.device)

    def _replays(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        try:
            return time_replays(calls, repeats, self.device)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}; a function that no CUDA graph can capture is timed call by call with "
                "BenchmarkSuite(graphs=False)"
            ) from error

    def _energy(self, function: Implementation, problem: Problem) -> tuple[float | None, str]:
        if not self.energy:
            return None, ""
        arguments = problem.make(self.device)
        try:
            return energy_per_call_mj(lambda: function(**arguments), self.device), ""
        except BackendUnavailableError as error:
            # a counter that cannot be read takes no time away
            return None, str(error)

    def generate_report(self) -> str:
        """The rows as text for people, grouped by operation."""
        return self._report(draw=False).text()

    def _report(self, draw: bool = True) -> Report:
        from oss_fused.bench.suite_report import make_report

        return make_report(self.rows, self.ceilings, draw)

    def results(self) -> dict[str, Any]:
        """Rows, ceilings and the environment's fingerprint, JSON-ready."""
        return {
            "format": FORMAT,
            "environment": fingerprint(),
            "ceilings": self.ceilings.to_dict(),
            "settings": {
                "warmup_runs": self.warmup_runs,
                "benchmark_runs": self.benchmark_runs,
                "device": str(self.device),
                "dtype": str(self.dtype).removeprefix("torch."),
                "graphs": self.graphs,
            },
            "rows": [asdict(row) for row in self.rows],
        }

    def save_report(self, path: str | Path) -> Path:
        """Write the report; the suffix decides: .json, .md, .html or .txt.

        A Markdown report puts its charts beside it, as ``<name>-<chart>.png``.

        Raises:
            SchemeError: another suffix.
        """
        path = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.results(), indent=1) + "\n",
            ".md": lambda: self._report().markdown(path.parent, f"{path.stem}-"),
            ".html": lambda: self._report().html(),
            ".txt": self.generate_report,
        }
        if path.suffix not in writers:
            raise SchemeError(f"path={str(path)!r}: expected a suffix of {', '.join(writers)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = writers[path.suffix]()
        path.write_text(text)
        return path


def describe(problem: Problem) -> str:
    """Short text of a problem's sizes, e.g. ``1x128x2048x64``, with the activation if any."""
    if isinstance(problem, OperatorProblem):
        return problem.label()
    sizes = "x".join(str(size) for size in problem.shape)
    return f"{sizes} {problem.activation}" if isinstance(problem, GatedMLPInput) else sizes
