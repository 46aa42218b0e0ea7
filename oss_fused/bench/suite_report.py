# SPDX-License-Identifier: MIT
"""The report of a benchmark suite: who is fastest where, rooflines, latencies, remedies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oss_fused.bench import charts
from oss_fused.bench.report import Report
from oss_fused.bench.roofline import REMEDIES, Bottleneck, Ceilings

if TYPE_CHECKING:
    from oss_fused.bench.suite import BenchmarkRow

_HEADER = (
    "problem",
    "implementation",
    "p50 ms",
    "p99 ms",
    "relative std",
    "GB/s",
    "of copy bandwidth",
    "TFLOP/s",
    "GOPS/W",
    "peak MB",
    "time / fastest",
    "limited by",
)


def winners(rows: Sequence[BenchmarkRow]) -> dict[tuple[str, str], BenchmarkRow]:
    """(operation, problem) -> row of the fastest implementation among the verified ones."""
    best: dict[tuple[str, str], BenchmarkRow] = {}
    for row in rows:
        key = (row.operation, row.problem)
        if row.latency_ms is not None and (
            key not in best or row.latency_ms < (best[key].latency_ms or 0.0)
        ):
            best[key] = row
    return best


def make_report(rows: Sequence[BenchmarkRow], ceilings: Ceilings, draw: bool = True) -> Report:
    """The whole report.

    Args:
        rows: what was measured.
        ceilings: roofs of the device.
        draw: with charts.
    """
    report = Report("Benchmark")
    add_operations(report, rows, ceilings, draw)
    return report


def add_operations(
    report: Report,
    rows: Sequence[BenchmarkRow],
    ceilings: Ceilings,
    draw: bool = True,
    level: int = 2,
) -> None:
    """Roofs, a scoreboard, and per operation a heading, charts and rows; remedies last."""
    flops = ", ".join(f"{name} {value:.4g} TFLOP/s" for name, value in ceilings.tflops.items())
    report.paragraph(
        f"{ceilings.device}: measured copy {ceilings.bandwidth_gbps:.4g} GB/s, products {flops}"
    )
    report.paragraph(
        "Milliseconds, medians. In brackets: times the fastest of the row, which is marked. "
        "Columns are ordered by speed."
    )
    header, *scores = scoreboard(rows)
    report.table(header, scores)
    best = winners(rows)
    for operation in dict.fromkeys(row.operation for row in rows):
        group = [row for row in rows if row.operation == operation]
        report.heading(operation, level)
        if draw:
            report.charts(_charts(operation, group, ceilings))
        fastest = {id(row) for row in best.values()}
        lines = []
        problems = list(dict.fromkeys(row.problem for row in group))
        slowest = float("inf")
        for row in sorted(
            group, key=lambda row: (problems.index(row.problem), row.latency_ms or slowest)
        ):
            cells = _cells(row, best.get((row.operation, row.problem)))
            if id(row) in fastest:
                cells[1] = f"**{cells[1]}**"
            lines.append(cells)
        report.table(_HEADER, lines)
    for kind in dict.fromkeys(row.bottleneck for row in rows if row.bottleneck):
        report.heading(f"Limited by {kind}: what to try", 3)
        report.items(REMEDIES[Bottleneck(kind)])


def scoreboard(rows: Sequence[BenchmarkRow]) -> list[list[str]]:
    """A header, then per problem each implementation's time; "wrong" or "failed" without one."""
    best = winners(rows)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells = lines.setdefault((row.operation, row.problem), {})
        fastest = best.get((row.operation, row.problem))
        if row.latency_ms is None or fastest is None or fastest.latency_ms is None:
            cells[row.implementation] = row.status
            continue
        text = f"{row.latency_ms:.4g} ({row.latency_ms / fastest.latency_ms:.2f}x)"
        cells[row.implementation] = f"**{row.latency_ms:.4g}**" if row is fastest else text
    names = by_speed(rows)
    table = [["operation", "problem", *names]]
    return table + [
        [*key, *(cells.get(name, "") for name in names)] for key, cells in lines.items()
    ]


def by_speed(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Implementations by the median of their time over the fastest's; the fastest first."""
    best = winners(rows)
    ratios: dict[str, list[float]] = {row.implementation: [] for row in rows}
    for row in rows:
        fastest = best.get((row.operation, row.problem))
        if row.latency_ms is not None and fastest is not None and fastest.latency_ms:
            ratios[row.implementation].append(row.latency_ms / fastest.latency_ms)
    return sorted(ratios, key=lambda name: statistics.median(ratios[name] or [float("inf")]))


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def _cells(row: BenchmarkRow, fastest: BenchmarkRow | None) -> list[str]:
    if row.latency_ms is None or fastest is None or fastest.latency_ms is None:
        return [row.problem, row.implementation, f"{row.status.upper()}: {row.message}"]
    return [
        row.problem,
        row.implementation,
        _number(row.latency_ms),
        _number(row.p99_ms),
        _number(row.relative_std, ".1%") + ("" if row.stable else " noisy"),
        _number(row.bandwidth_gbps),
        _number(row.bandwidth_utilization, ".0%"),
        _number(row.tflops),
        "" if row.gops_per_watt is None else _number(row.gops_per_watt),
        "" if row.peak_memory_bytes is None else _number(row.peak_memory_bytes / 1e6),
        f"{row.latency_ms / fastest.latency_ms:.2f}",
        row.bottleneck or "-",
    ]


def _charts(operation: str, rows: Sequence[BenchmarkRow], ceilings: Ceilings) -> dict[str, bytes]:
    timed = {(row.implementation, row.problem): row for row in rows if row.latency_ms is not None}
    if not timed:
        return {}
    problems = list(dict.fromkeys(problem for _, problem in timed))
    names = [name for name in by_speed(rows) if any(name == known for known, _ in timed)]

    def values(field: str) -> dict[str, list[float | None]]:
        return {
            name: [getattr(timed.get((name, problem)), field, None) for problem in problems]
            for name in names
        }

    drawn = {
        f"latency {operation}": charts.groups(
            problems,
            values("latency_ms"),
            "latency, ms",
            "median, whisker to p99; lower is better",
            "problem",
            values("p99_ms"),
            log=True,
        )
    }
    points = [
        (row.implementation, row.problem, row.tflops * 1e3 / row.bandwidth_gbps, row.tflops)
        for row in sorted(timed.values(), key=lambda row: names.index(row.implementation))
        if row.tflops and row.bandwidth_gbps
    ]
    if len(problems) > 1:
        drawn[f"efficiency {operation}"] = _efficiency(rows, names)
    if points:
        drawn[f"roofline {operation}"] = charts.roofline(
            points, ceilings.bandwidth_gbps, ceilings.tflops
        )
    return drawn


def _efficiency(rows: Sequence[BenchmarkRow], names: Sequence[str]) -> bytes:
    """Share of the roof that each implementation reaches, from the smallest problem up."""
    timed = [row for row in rows if row.latency_ms and row.tflops]
    # FLOPs of a problem: the same for all implementations
    work = {row.problem: (row.tflops or 0.0) * (row.latency_ms or 0.0) for row in timed}
    problems = sorted(work, key=lambda problem: work[problem])
    share = {
        (row.implementation, row.problem): 100
        * max(row.bandwidth_utilization or 0.0, row.flops_utilization or 0.0)
        for row in timed
    }
    series = {name: [share.get((name, problem)) for problem in problems] for name in names}
    title = "share of the nearer roof; larger problems to the right"
    return charts.groups(problems, series, "of the roof, %", title, "problem")
