# SPDX-License-Identifier: MIT
"""Reports of a benchmark suite: text, Markdown, and one self-contained HTML page with plots."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oss_fused.bench.roofline import Ceilings, RooflinePoint

if TYPE_CHECKING:
    from oss_fused.bench.suite import BenchmarkRow

_HEADERS = (
    "problem",
    "implementation",
    "p50 ms",
    "p99 ms",
    "rel std",
    "GB/s",
    "bandwidth",
    "TFLOP/s",
    "GOPS/W",
    "speed-up",
    "limited by",
)


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def _cells(row: BenchmarkRow) -> list[str]:
    if row.status != "ok":
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
        _number(row.gops_per_watt),
        _number(row.speedup, ".2f") + "x",
        row.bottleneck or "-",
    ]


def winners(rows: Sequence[BenchmarkRow]) -> dict[tuple[str, str], str]:
    """(operation, problem) -> fastest implementation among the verified ones."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows:
        key = (row.operation, row.problem)
        if row.latency_ms is not None and (key not in best or row.latency_ms < best[key][0]):
            best[key] = (row.latency_ms, row.implementation)
    return {key: name for key, (_, name) in best.items()}


def _by_operation(rows: Sequence[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    groups: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        groups.setdefault(row.operation, []).append(row)
    return groups


def _roofs(ceilings: Ceilings) -> str:
    flops = ", ".join(f"{name} {value:.4g} TFLOP/s" for name, value in ceilings.tflops.items())
    return f"{ceilings.device}: measured copy {ceilings.bandwidth_gbps:.4g} GB/s, products {flops}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as the full lines of ``table`` need; a failure's message may run on."""
    full = [line for line in table if len(line) == len(table[0])]
    widths = [max(len(line[i]) for line in full) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in table]


def text_report(rows: Sequence[BenchmarkRow], ceilings: Ceilings) -> str:
    """Aligned columns, one block an operation; the fastest of each problem carries a star."""
    best = winners(rows)
    lines = [_roofs(ceilings), "", *_aligned(scoreboard(rows))]
    for operation, group in _by_operation(rows).items():
        table = [list(_HEADERS)]
        for row in group:
            cells = _cells(row)
            if best.get((row.operation, row.problem)) == row.implementation:
                cells[1] += " *"
            table.append(cells)
        lines += ["", operation, *_aligned(table)]
    return "\n".join(lines) + "\n"


def scoreboard(rows: Sequence[BenchmarkRow]) -> list[list[str]]:
    """Who wins where: a header, then per problem each implementation's speed-up over the first.

    The fastest carries a star; "wrong" and "failed" stand where there is no time.
    """
    best = winners(rows)
    names = list(dict.fromkeys(row.implementation for row in rows))
    table = [["operation", "problem", *names]]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        text = row.status if row.speedup is None else f"{row.speedup:.2f}x"
        won = best.get((row.operation, row.problem)) == row.implementation
        cells = lines.setdefault((row.operation, row.problem), {})
        cells[row.implementation] = text + (" *" if won else "")
    return table + [
        [*key, *(cells.get(name, "") for name in names)] for key, cells in lines.items()
    ]


def plots(
    rows: Sequence[BenchmarkRow], ceilings: Ceilings, points: Sequence[RooflinePoint]
) -> dict[str, bytes]:
    """Every plot of a report as PNG by name: "roofline", then an operation's latencies."""
    drawn = {"roofline": roofline_plot(points, ceilings)} if points else {}
    for operation, group in _by_operation(rows).items():
        if any(row.latency_ms for row in group):
            drawn[operation] = latency_plot(group)
    return drawn


def markdown_report(
    rows: Sequence[BenchmarkRow], ceilings: Ceilings, images: Mapping[str, str] | None = None
) -> str:
    """The same as Markdown tables; the fastest of each problem in bold.

    Args:
        rows: what was measured.
        ceilings: roofs of the device.
        images: name of ``plots`` -> path of its file, shown where the report has its place.
    """
    best = winners(rows)
    images = images or {}
    header, *scores = scoreboard(rows)
    lines = ["# Benchmark", "", _roofs(ceilings), "", "| " + " | ".join(header) + " |"]
    lines += ["|" + "---|" * len(header), *("| " + " | ".join(line) + " |" for line in scores)]
    if "roofline" in images:
        lines += ["", f"![roofline]({images['roofline']})"]
    for operation, group in _by_operation(rows).items():
        lines += ["", f"## {operation}"]
        if operation in images:
            lines += ["", f"![latency of {operation}]({images[operation]})"]
        lines += ["", "| " + " | ".join(_HEADERS) + " |"]
        lines.append("|" + "---|" * len(_HEADERS))
        for row in group:
            cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in _cells(row)]
            cells += [""] * (len(_HEADERS) - len(cells))
            if best.get((row.operation, row.problem)) == row.implementation:
                cells[1] = f"**{cells[1]}**"
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def html_report(
    rows: Sequence[BenchmarkRow], ceilings: Ceilings, points: Sequence[RooflinePoint]
) -> str:
    """One page without outside files: who wins where, roofline, latencies, tables, remedies."""
    best = winners(rows)
    drawn = plots(rows, ceilings, points)
    parts = [f"<p>{html.escape(_roofs(ceilings))}</p><table>"]
    for number, line in enumerate(scoreboard(rows)):
        tag = "td" if number else "th"
        parts.append("<tr>" + "".join(_cell(text, tag) for text in line) + "</tr>")
    parts.append("</table>")
    if "roofline" in drawn:
        parts.append(_image(drawn["roofline"], "roofline"))
    for operation, group in _by_operation(rows).items():
        parts.append(f"<h2>{html.escape(operation)}</h2>")
        if operation in drawn:
            parts.append(_image(drawn[operation], f"latency of {operation}"))
        parts.append("<table><tr>" + "".join(f"<th>{h}</th>" for h in _HEADERS) + "</tr>")
        for row in group:
            won = best.get((row.operation, row.problem)) == row.implementation
            style = "bad" if row.status != "ok" else "won" if won else ""
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row))
            parts.append(f'<tr class="{style}">{cells}</tr>')
        parts.append("</table>")
    remedies = {point.bottleneck: point.remedies for point in points}
    for kind, advice in remedies.items():
        items = "".join(f"<li>{html.escape(text)}</li>" for text in advice)
        parts.append(f"<h3>Limited by {kind.value}: what to try</h3><ul>{items}</ul>")
    css = (
        "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}"
        ".won{background:#e6f4e6}.bad{background:#fbe3e3}img{max-width:100%}"
    )
    head = f'<meta charset="utf-8"><title>Benchmark</title><style>{css}</style>'
    body = "\n".join(parts)
    return f"<!doctype html><html><head>{head}</head><body><h1>Benchmark</h1>{body}</body></html>\n"


def _cell(text: str, tag: str) -> str:
    won = ' class="won"' if text.endswith(" *") else ""
    return f"<{tag}{won}>{html.escape(text)}</{tag}>"


def _image(png: bytes, label: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<p><img alt="{html.escape(label)}" src="data:image/png;base64,{data}"></p>'


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def latency_plot(rows: Sequence[BenchmarkRow]) -> bytes:
    """PNG: median latency per problem, one bar an implementation, whisker to p99."""
    problems = list(dict.fromkeys(row.problem for row in rows))
    names = list(dict.fromkeys(row.implementation for row in rows))
    figure, axes = _figure(max(6.0, 0.5 * len(problems) * len(names)), 3.5)
    for index, name in enumerate(names):
        timed = [r for r in rows if r.implementation == name and r.latency_ms is not None]
        at = [problems.index(r.problem) + 0.8 * (index + 0.5) / len(names) - 0.4 for r in timed]
        p50 = [r.latency_ms or 0.0 for r in timed]
        above = [max((r.p99_ms or 0.0) - mid, 0.0) for r, mid in zip(timed, p50, strict=True)]
        axes.bar(at, p50, 0.8 / len(names), yerr=[[0.0] * len(p50), above], label=name)
    axes.set_xticks(range(len(problems)), problems, rotation=20, ha="right")
    axes.set_ylabel("ms (lower is better)")
    axes.set_yscale("log")
    axes.legend()
    return _png(figure)


def roofline_plot(points: Sequence[RooflinePoint], ceilings: Ceilings) -> bytes:
    """PNG: the measured roofs and every point, log-log."""
    figure, axes = _figure(7.0, 4.5)
    low = min(p.intensity for p in points) / 4
    high = max(p.intensity for p in points) * 4
    for name, peak in ceilings.tflops.items():
        ridge = peak * 1e3 / ceilings.bandwidth_gbps
        xs = sorted({low, min(max(ridge, low), high), high})
        ys = [min(peak, x * ceilings.bandwidth_gbps / 1e3) for x in xs]
        axes.plot(xs, ys, label=f"roof {name}")
    for point in points:
        axes.plot([point.intensity], [point.tflops], "o", ms=4)
        axes.annotate(point.name.split("/", 1)[-1], (point.intensity, point.tflops), fontsize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
    return _png(figure)
