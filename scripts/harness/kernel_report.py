# SPDX-License-Identifier: MIT
"""Report of a kernel benchmark (the JSON that scripts/bench_kernels.py writes)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.kernels import PEAK_FP8_TFLOPS
from harness.summary import merge_summary
from oss_fused.bench import charts
from oss_fused.bench.report import Report
from oss_fused.environment import describe
from oss_fused.files import write_json

_HEADER = ("shape", "us", "TB/s", "of copy", "TFLOP/s", "of peak", "baselines, us", "speed-up")


def write(results: Mapping[str, Any], folder: Path, summary: Path | None) -> None:
    """Write kernels.json, kernels.md with its roofline and kernels.html to ``folder``.

    The figures are merged into ``summary``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "kernels.json", results)
    make_report(results).write(folder, "kernels", "kernels-")
    if summary is not None:
        merge_summary(summary, results["figures"], folder / "kernels.json")


def make_report(results: Mapping[str, Any]) -> Report:
    """The report: figures, a roofline, then one table per group."""
    bandwidth = results["copy_bandwidth"] / 1e12
    report = Report("Kernels")
    report.paragraph(describe(results["environment"]))
    report.paragraph(
        "CUDA-graph replays, medians, random data, weights rotated beyond L2. Ceilings: copy "
        f"{bandwidth:.2f} TB/s (measured), {PEAK_FP8_TFLOPS:.0f} TFLOP/s dense FP8 (datasheet). "
        "The native kernels use programmatic dependent launch: replays of one kernel overlap at "
        "their ends. Speed-up is over the fastest baseline, which stands first."
    )
    if "interrupted" in results:
        report.paragraph(f"**Interrupted in {results['interrupted']}**: later cases have no row.")
    runs = results.get("runs", [])
    if len(runs) > 1:
        report.paragraph(
            f"Rows of {len(runs)} runs; a later row replaces an earlier: {', '.join(runs)}."
        )
    report.table(("figure", "value"), [(k, f"{v:.3f}") for k, v in results["figures"].items()])
    points = [row for row in results["results"] if row["passed"] and row["flops"]]
    if points:
        places = [
            (row["group"], "", row["flops"] / row["bytes"], row["flops_per_second"] / 1e12)
            for row in points
        ]
        roof = charts.roofline(places, bandwidth * 1e3, {"FP8": PEAK_FP8_TFLOPS})
        report.charts({"roofline": roof})
    for group in dict.fromkeys(row["group"] for row in results["results"]):
        report.heading(group)
        report.table(_HEADER, [_cells(r) for r in results["results"] if r["group"] == group])
    return report


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = row["name"].split(" ", 1)[-1]
    if not row["passed"]:
        failure = row["failure"] if "failure" in row else f"wrong: error {row['error']:.1e}"
        return (shape, failure)
    baselines = sorted(row["baselines_us"].items(), key=lambda item: item[1])
    return (
        shape,
        f"{row['us']:.2f}",
        f"{row['bytes_per_second'] / 1e12:.2f}",
        f"{row['bandwidth_fraction']:.0%}",
        f"{row['flops_per_second'] / 1e12:.0f}" if row["flops"] else "",
        f"{row['peak_fraction']:.0%}" if row["flops"] else "",
        ", ".join(f"{name} {us:.2f}" for name, us in baselines),
        f"{row['speedup']:.2f}",
    )
