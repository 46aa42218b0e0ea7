# SPDX-License-Identifier: MIT
"""The charts of all reports, as PNG. They need matplotlib (extra ``bench``).

A chart has one panel, so that a page can put charts side by side or below each other. Series differ
in colour and in marker, and the legend stands beside the panel, never on the data.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# the palette of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#b8a200"),
    *("#8a8f98", "#7f3c8d"),
)
MARKERS = "os^Dv<>PX*"
# series that have the second colour in every chart, whatever stands beside them
_OURS = ("oss_fp8", "oss_fused")
_PITCH = 0.8  # of a group's bars, in units of the distance between groups


def panel(width: float = 5.2, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes; independent of pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def png(figure: Any) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # without the name of the program
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def legend_beside(axis: Any, handles: Sequence[Any] | None = None) -> None:
    """The legend to the right of the panel."""
    given = {} if handles is None else {"handles": handles}
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    axis.legend(**given, **place, frameon=False, fontsize=8)


def colours(names: Sequence[str]) -> dict[str, str]:
    """Name -> colour of its series."""
    ours = next((name for name in names if name in _OURS), "")
    others = [c for c in COLOURS if not ours or c != COLOURS[1]]
    rest = [name for name in names if name != ours]
    chosen = {name: others[number % len(others)] for number, name in enumerate(rest)}
    return chosen | ({ours: COLOURS[1]} if ours else {})


def groups(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    ylabel: str,
    title: str = "",
    xlabel: str = "",
    tops: Mapping[str, Sequence[float | None]] | None = None,
    log: bool = False,
) -> bytes:
    """Series side by side in groups: bars, or points on a logarithmic axis, which has no zero.

    Args:
        labels: of the groups, along x.
        series: name -> one value per group; None draws nothing.
        ylabel: quantity and unit.
        title: over the panel.
        xlabel: what the groups are.
        tops: name -> upper ends of whiskers, such as p99.
        log: logarithmic.
    """
    figure, axis = panel(max(5.2, 1.8 + 0.3 * len(labels) * max(2, len(series))))
    width = _PITCH / len(series)
    chosen = colours(list(series))
    for index, (name, values) in enumerate(series.items()):
        drawn = [(i, value) for i, value in enumerate(values) if value is not None]
        at = [i + width * (index + 0.5) - _PITCH / 2 for i, _ in drawn]
        heights = [value for _, value in drawn]
        above = [max((tops[name][i] or 0.0) - value, 0.0) for i, value in drawn] if tops else None
        error = [[0.0] * len(heights), above] if above else None
        style = {"label": name, "color": chosen[name], "capsize": 2}
        if log:
            axis.errorbar(at, heights, error, fmt=MARKERS[index % len(MARKERS)], ms=5, **style)
        else:
            axis.bar(at, heights, width, yerr=error, **style)
    rotated = {"rotation": 20, "ha": "right"} if max(map(len, labels)) > 9 else {}
    axis.set_xticks(range(len(labels)), labels, fontsize=8, **rotated)
    axis.set_xlim(-0.5, len(labels) - 0.5)
    axis.set(ylabel=ylabel, xlabel=xlabel, **({"yscale": "log"} if log else {}))
    if log:
        _plain_ticks(axis.yaxis)
    axis.set_title(title, fontsize=10)
    legend_beside(axis)
    return png(figure)


def _plain_ticks(axis: Any) -> None:
    """20, 50, 100 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def stacked_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    ylabel: str,
    title: str,
    colours: Mapping[str, str],
) -> bytes:
    """One bar per name, made of ``parts``: part -> height per name."""
    figure, axis = panel(2.6 + 0.8 * len(names), 4.0)
    base = [0.0] * len(names)
    for part, heights in parts.items():
        if any(heights):
            axis.bar(names, heights, 0.7, bottom=base, label=part, color=colours[part])
            base = [low + height for low, height in zip(base, heights)]
    axis.set_ylabel(ylabel)
    axis.set_title(title, fontsize=10)
    axis.tick_params(axis="x", rotation=30, labelsize=8)
    handles, _ = axis.get_legend_handles_labels()
    legend_beside(axis, handles[::-1])
    return png(figure)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    level: float | None = None,
) -> bytes:
    """Lines through points (x, y), x being whole numbers.

    Args:
        series: name -> points; one series needs no legend.
        xlabel: what x is.
        ylabel: quantity and unit.
        title: over the panel.
        level: a horizontal line to compare with; None starts y at 0.
    """
    figure, axis = panel(7.5 if len(series) > 1 else 5.2)
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[(number // len(COLOURS) + number) % len(MARKERS)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axis.plot(xs, ys, marker=marker, ms=4, color=colour, label=name)
    if level is None:
        axis.set_ylim(bottom=0)
    else:
        axis.axhline(level, color="grey", lw=0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_title(title, fontsize=10)
    if len(series) > 1:
        legend_beside(axis)
    return png(figure)


def roofline(
    points: Iterable[tuple[str, str, float, float]],
    bandwidth_gbps: float,
    peaks: Mapping[str, float],
) -> bytes:
    """Measured TFLOP/s over FLOPs per byte, under the device's roofs; both axes logarithmic.

    Args:
        points: (kernel, problem, FLOPs per byte, TFLOP/s). The kernel decides the colour, the
            problem the marker; an empty problem, or more problems than markers, leave the marker
            to the kernel.
        bandwidth_gbps: memory bandwidth.
        peaks: name of the arithmetic -> its TFLOP/s.

    Returns:
        PNG.
    """
    drawn = list(points)
    kernels = list(dict.fromkeys(kernel for kernel, *_ in drawn))
    problems = list(dict.fromkeys(problem for _, problem, *_ in drawn if problem))
    if len(problems) > len(MARKERS):
        problems = []
    entries = len(kernels) + len(problems) + len(peaks)
    figure, axis = panel(8.6, max(4.2, 1.2 + 0.19 * entries))
    low = min(intensity for *_, intensity, _ in drawn) / 3
    ridges = [peak * 1e3 / bandwidth_gbps for peak in peaks.values()]
    high = max(*(intensity for *_, intensity, _ in drawn), *ridges) * 3
    for style, (name, peak) in zip(("-", "--", ":", "-.") * len(peaks), peaks.items()):
        xs = sorted({low, max(peak * 1e3 / bandwidth_gbps, low), high})
        ys = [min(peak, x * bandwidth_gbps / 1e3) for x in xs]
        label = f"roof: {peak:.0f} TFLOP/s {name}, {bandwidth_gbps / 1e3:.2f} TB/s"
        axis.plot(xs, ys, style, color="#333333", lw=1, label=label)
    chosen = colours(kernels)
    for kernel, problem, intensity, tflops in drawn:
        number = problems.index(problem) if problem in problems else kernels.index(kernel)
        marker = MARKERS[number % len(MARKERS)]
        axis.plot([intensity], [tflops], marker, ms=6, color=chosen[kernel], alpha=0.75, mew=0)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    axis.grid(alpha=0.25)
    legend_beside(axis, [*axis.get_legend_handles_labels()[0], *_keys(axis, kernels, problems)])
    return png(figure)


def _keys(axis: Any, kernels: Sequence[str], problems: Sequence[str]) -> list[Any]:
    """Legend entries: a colour per kernel, then a marker per problem."""
    keys = []
    for number, (kernel, colour) in enumerate((k, colours(kernels)[k]) for k in kernels):
        marker = "s" if problems else MARKERS[number % len(MARKERS)]
        keys += axis.plot([], [], marker, color=colour, label=kernel)
    for number, problem in enumerate(problems):
        marker = MARKERS[number % len(MARKERS)]
        keys += axis.plot([], [], marker, color="#8a8f98", label=problem)
    return keys
