# SPDX-License-Identifier: MIT
"""Report and trend chart of regression control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.regression import CheckedRow
from oss_fused.bench import charts
from oss_fused.bench.report import Report

_HEADER = ("verdict", "row", "baseline", "now", "change", "note")


def _cells(row: CheckedRow) -> tuple[str, ...]:
    times = ("-" if value is None else f"{value:.4g}" for value in (row.baseline, row.current))
    change = "-" if row.ratio is None else f"{row.ratio - 1:+.1%}"
    return (row.verdict.value.upper(), row.name, *times, change, row.note)


def _worst_first(rows: Sequence[CheckedRow]) -> list[CheckedRow]:
    return sorted(rows, key=lambda row: (not row.verdict.fails, -(row.ratio or 0.0)))


def make_report(rows: Sequence[CheckedRow]) -> Report:
    """Failures first; the count of failures below the title."""
    report = Report("Regression check")
    failed = sum(row.verdict.fails for row in rows)
    report.paragraph(f"{failed} of {len(rows)} rows fail")
    report.table(_HEADER, [_cells(row) for row in _worst_first(rows)])
    return report


def trend_chart(runs: Sequence[dict[str, Any]]) -> bytes:
    """PNG: each row's latency over the runs, relative to its first one."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, run in enumerate(runs):
        for name, ms in run["latency_ms"].items():
            series.setdefault(name, []).append((number, ms))
    relative = {
        name: [(number, ms / points[0][1]) for number, ms in points]
        for name, points in series.items()
        if points[0][1]
    }
    ylabel = "latency relative to the first run shown"
    return charts.lines(relative, f"run (last {len(runs)})", ylabel, level=1.0)
