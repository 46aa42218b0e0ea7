# SPDX-License-Identifier: MIT
"""Runs the kernel cases: check against the reference, time, condense into the named figures."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.kernel_cases import Case, memory_cases
from harness.kernel_gemm_cases import gemm_cases
from harness.kernel_projection_cases import projection_cases
from harness.kernel_weight_only_cases import weight_only_cases
from oss_fused.bench.timing import copy_bandwidth, time_graphs
from oss_fused.environment import fingerprint

# dense FP8 peak of the H100/H200 SXM datasheet
PEAK_FP8_TFLOPS = 1979.0
_NATIVE = "oss_fused"
SMALL_GROUPS = ("norm_quant", "rmsnorm_rope", "rope_kv", "act_mul_quant")


def select(groups: Sequence[str] = (), contains: str = "") -> list[Case]:
    """Cases of ``groups`` (all if empty) whose name contains ``contains``."""
    return [
        case
        for cases in (
            memory_cases(),
            gemm_cases(),
            projection_cases(),
            weight_only_cases(),
        )
        for case in cases
        if (not groups or case.group in groups) and contains in case.name
    ]


def groups() -> list[str]:
    """Names of all groups."""
    return sorted({case.group for case in select()})


def compile_in_parallel(arguments: Sequence[str], jobs: int) -> None:
    """Fill Triton's cache: ``jobs`` processes run each their share of the cases once."""
    processes = [
        subprocess.Popen([sys.executable, *arguments, "--compile-share", f"{index}/{jobs}"])
        for index in range(jobs)
    ]
    for process in processes:
        process.wait()


def compile_share(cases: Sequence[Case], share: str) -> None:
    """Run ``cases[index::total]`` once, share being "index/total"."""
    index, total = (int(part) for part in share.split("/"))
    for case in cases[index::total]:
        prepared = case.prepare()
        prepared.native[0]()
        torch.cuda.synchronize()
        del prepared


def run(cases: Iterable[Case]) -> dict[str, Any]:
    """Check and time every case; a wrong result is reported and not timed.

    An interrupt ends the run and keeps what was measured.

    Returns:
        {"environment", "copy_bandwidth", "results": [...], "figures": name -> number}, JSON-ready;
        "interrupted": name of the case in which an interrupt came.
    """
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    interrupted: dict[str, str] = {}
    for case in cases:
        try:
            results.append(_measure(case, bandwidth))
        except KeyboardInterrupt:
            print(f"interrupted in {case.name}", file=sys.stderr)
            interrupted = {"interrupted": case.name}
            break
        except (RuntimeError, ValueError) as error:
            # go on with the other cases
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
            results.append(
                {
                    "group": case.group,
                    "name": case.name,
                    **case.labels,
                    **case.shape,
                    "passed": False,
                    "failure": failure,
                }
            )
        print(line(results[-1]), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    return {
        "environment": fingerprint(),
        "copy_bandwidth": bandwidth,
        "results": results,
        "figures": figures(results),
        **interrupted,
    }


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report: a case measured again replaces its earlier row, new cases follow.

    The environment and the copy bandwidth are the last report's; "runs" lists the time of each.
    """
    rows = {row["name"]: row for report in reports for row in report["results"]}
    runs = [run for report in reports for run in report.get("runs", [_time(report)])]
    results = list(rows.values())
    last = {name: value for name, value in reports[-1].items() if name != "interrupted"}
    return {**last, "results": results, "figures": figures(results), "runs": runs}


def _time(report: dict[str, Any]) -> str:
    return str(report["environment"]["timestamp"])


def _measure(case: Case, bandwidth: float) -> dict[str, Any]:
    prepared = case.prepare()
    error = prepared.error()
    row: dict[str, Any] = {
        "group": case.group,
        "name": case.name,
        **case.labels,
        **case.shape,
        "error": error,
        "tolerance": prepared.tolerance,
        "passed": error <= prepared.tolerance,
    }
    if not row["passed"]:
        return row
    for calls in prepared.baselines.values():
        calls[0]()
    times = time_graphs({_NATIVE: prepared.native, **prepared.baselines})
    native = times.pop(_NATIVE)
    row |= {"us": native.median, "us_p95": native.p95}
    row["baselines_us"] = {name: timing.median for name, timing in times.items()}
    seconds = row["us"] * 1e-6
    row |= {
        "bytes_per_second": case.nbytes / seconds,
        "flops_per_second": case.flops / seconds,
        "bandwidth_fraction": case.nbytes / seconds / bandwidth,
        "peak_fraction": case.flops / seconds / (PEAK_FP8_TFLOPS * 1e12),
        "speedup": min(row["baselines_us"].values()) / row["us"],
        "bytes": case.nbytes,
        "flops": case.flops,
    }
    return row


def line(row: dict[str, Any]) -> str:
    """One result for the terminal."""
    if "failure" in row:
        return f"{row['name']:58} FAILED: {row['failure']}"
    if not row["passed"]:
        return f"{row['name']:58} WRONG: error {row['error']:.2e} > {row['tolerance']:.0e}"
    others = " ".join(f"{name} {us:.2f}" for name, us in row["baselines_us"].items())
    return (
        f"{row['name']:58} {row['us']:9.2f} us {row['bytes_per_second'] / 1e12:5.2f} TB/s "
        f"{row['bandwidth_fraction']:5.0%} {row['flops_per_second'] / 1e12:7.1f} TFLOPS | {others} "
        f"| {row['speedup']:.2f}x"
    )


def figures(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The named figures of summary.json that ``results`` allow."""
    passed = [row for row in results if row["passed"]]

    def rows(*names: str) -> list[dict[str, Any]]:
        return [row for row in passed if row["group"] in names]

    def over(baseline: str, *names: str) -> list[float]:
        return [row["baselines_us"][baseline] / row["us"] for row in rows(*names)]

    small = [
        row["us"] / row["baselines_us"]["vllm"] for row in rows(*SMALL_GROUPS) if row["rows"] <= 64
    ]
    gemm_small, gemm_large = over("cutlass", "gemm_small"), over("cublaslt", "gemm_large")
    values = {
        "norm_quant.bandwidth_min": _least(
            [r["bandwidth_fraction"] for r in rows("norm_quant") if r["rows"] >= 2048]
        ),
        "rmsnorm_rope.bandwidth_min": _least(
            [r["bandwidth_fraction"] for r in rows("rmsnorm_rope") if r["rows"] >= 4096]
        ),
        "rope_kv.bandwidth": _least(
            [r["bandwidth_fraction"] for r in rows("rope_kv") if r["rows"] == 8192]
        ),
        "small_rows.time_ratio_max": max(small, default=None),
        "fused_qkv.time_ratio_max": max(
            (r["us"] / r["baselines_us"]["vllm_bf16"] for r in rows("fused_qkv")), default=None
        ),
        "gemm_small.speedup_geomean": _geomean(gemm_small),
        "gemm_small.speedup_min": _least(gemm_small),
        "gemm_large.speedup_geomean": _geomean(gemm_large),
        "gemm_large.speedup_min": _least(gemm_large),
        "gemm_8192.tflops": _least(
            [r["flops_per_second"] / 1e12 for r in rows("gemm_large") if r["M"] == r["K"] == 8192]
        ),
        "gated_mlp.speedup_min": _least([r["speedup"] for r in rows("gated_mlp")]),
        "w8a16.speedup_b1": _least([r["speedup"] for r in rows("w8a16") if r["M"] == 1]),
        "w8a16.speedup_min": _least([r["speedup"] for r in rows("w8a16")]),
    }
    return {f"kernels.{name}": value for name, value in values.items() if value is not None}


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
