# SPDX-License-Identifier: MIT
"""Markdown table and roofline plot of a kernel benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.kernels import PEAK_FP8_TFLOPS
from harness.report import table
from harness.summary import merge_summary
from oss_fused.environment import describe
from oss_fused.files import write_json

_HEADER = ("shape", "us", "TB/s", "of copy", "TFLOPS", "of peak", "baselines (us)", "speed-up")


def write(report: Mapping[str, Any], folder: Path, summary: Path | None) -> None:
    """Write kernels.json, .md and .png to ``folder``; merge the figures into ``summary``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "kernels.json", report)
    (folder / "kernels.md").write_text(markdown(report))
    draw_roofline(report, folder / "kernels.png")
    if summary is not None:
        merge_summary(summary, report["figures"], folder / "kernels.json")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown: figures, then one table per group."""
    bandwidth = report["copy_bandwidth"] / 1e12
    method = (
        f"CUDA-graph replays, medians, random data, weights rotated beyond L2. Ceilings: copy "
        f"{bandwidth:.2f} TB/s (measured), {PEAK_FP8_TFLOPS:.0f} TFLOPS dense FP8 (datasheet). "
        "Our kernels use programmatic dependent launch, so that replays of one kernel overlap at "
        "their ends. Speed-up is over the fastest baseline.\n"
    )
    runs = report.get("runs", [])
    if len(runs) > 1:
        method += (
            f"\nRows of {len(runs)} runs, the later in place of the earlier: {', '.join(runs)}.\n"
        )
    parts = [
        "# Kernels\n",
        f"{describe(report['environment'])}\n",
        method,
        table(("figure", "value"), [(k, f"{v:.3f}") for k, v in report["figures"].items()]),
    ]
    groups = dict.fromkeys(row["group"] for row in report["results"])
    for group in groups:
        rows = [_cells(row) for row in report["results"] if row["group"] == group]
        parts.append(f"\n## {group}\n\n{table(_HEADER, rows)}")
    return "\n".join(parts) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = row["name"].split(" ", 1)[-1]
    if not row["passed"]:
        failure = row["failure"] if "failure" in row else f"wrong: error {row['error']:.1e}"
        return (shape, failure, *[""] * (len(_HEADER) - 2))
    return (
        shape,
        f"{row['us']:.2f}",
        f"{row['bytes_per_second'] / 1e12:.2f}",
        f"{row['bandwidth_fraction']:.0%}",
        f"{row['flops_per_second'] / 1e12:.0f}" if row["flops"] else "",
        f"{row['peak_fraction']:.0%}" if row["flops"] else "",
        ", ".join(f"{name} {us:.2f}" for name, us in row["baselines_us"].items()),
        f"{row['speedup']:.2f}",
    )


def draw_roofline(report: Mapping[str, Any], path: Path) -> None:
    """Measured FLOP/s over FLOPs per byte, against the two ceilings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    bandwidth = report["copy_bandwidth"]
    intensities = [1.0, PEAK_FP8_TFLOPS * 1e12 / bandwidth, 2e4]
    axes.plot(
        intensities,
        [min(x * bandwidth, PEAK_FP8_TFLOPS * 1e12) / 1e12 for x in intensities],
        color="black",
        label=f"{bandwidth / 1e12:.2f} TB/s, {PEAK_FP8_TFLOPS:.0f} TFLOPS",
    )
    points = [row for row in report["results"] if row["passed"] and row["flops"]]
    for group in dict.fromkeys(row["group"] for row in points):
        rows = [row for row in points if row["group"] == group]
        axes.scatter(
            [row["flops"] / row["bytes"] for row in rows],
            [row["flops_per_second"] / 1e12 for row in rows],
            s=18,
            label=group,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOPS")
    axes.set_title("FP8 kernels against the roofline")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
