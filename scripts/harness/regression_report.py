# SPDX-License-Identifier: MIT
"""Tables and the trend plot of regression control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.regression import CheckedRow

_HEADERS = ("verdict", "row", "baseline ms", "now ms", "change", "note")


def _cells(row: CheckedRow) -> tuple[str, ...]:
    times = (
        "-" if value is None else f"{value:.4g}" for value in (row.baseline_ms, row.current_ms)
    )
    change = "-" if row.ratio is None else f"{row.ratio - 1:+.1%}"
    return (row.verdict.value.upper(), row.name, *times, change, row.note)


def _worst_first(rows: Sequence[CheckedRow]) -> list[CheckedRow]:
    return sorted(rows, key=lambda row: (not row.verdict.fails, -(row.ratio or 0.0)))


def text_table(rows: Sequence[CheckedRow]) -> str:
    """Aligned columns, failures first, and a last line that counts them."""
    table = [_HEADERS, *(_cells(row) for row in _worst_first(rows))]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADERS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in table]
    failed = sum(row.verdict.fails for row in rows)
    return "\n".join([*lines, f"{failed} of {len(rows)} rows fail"]) + "\n"


def markdown_table(rows: Sequence[CheckedRow]) -> str:
    """The same as a Markdown page."""
    lines = ["# Regression check", "", "| " + " | ".join(_HEADERS) + " |", "|---" * 6 + "|"]
    for row in _worst_first(rows):
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in _cells(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def trend_plot(runs: Sequence[dict[str, Any]]) -> bytes:
    """PNG: each row's latency over the runs, relative to its first one."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for run in runs for name in run["latency_ms"]))
    for name in names:
        seen = [
            (i, run["latency_ms"][name]) for i, run in enumerate(runs) if name in run["latency_ms"]
        ]
        first = seen[0][1]
        axes.plot([i for i, _ in seen], [ms / first for _, ms in seen], marker=".", label=name)
    axes.axhline(1.0, color="grey", lw=0.5)
    axes.set_xlabel(f"run (last {len(runs)})")
    axes.set_ylabel("latency relative to the first run shown")
    if names:
        axes.legend(fontsize=6)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
