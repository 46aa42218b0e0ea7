# SPDX-License-Identifier: MIT
"""Plots of a calibration record, as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oss_fused.quant.record import CalibrationRecord, LinearRecord

_COLOURS = ("#1f77b4", "#d9772b", "#2ca02c", "#9467bd", "#8a8f98", "#c44e52", "#17a2b8", "#b58900")
_PERCENT = 100.0


def plots(record: CalibrationRecord, runs: Sequence[Mapping[str, Any]] = ()) -> dict[str, bytes]:
    """Every plot that the record has figures for: name -> PNG.

    Args:
        record: of the run.
        runs: of the trend file, oldest first; drawn from two on.
    """
    drawn: dict[str, bytes] = {}
    if any(linear.error for linear in record.linears):
        drawn["error by linear"] = _errors(record)
    if any(layer.cumulative_error is not None for layer in record.layers):
        drawn["error through the layers"] = _propagation(record)
    if any(_error_of(linear) is not None for linear in record.linears):
        drawn["errors of all linears"] = _distribution(record)
    if any(linear.weight_histogram for linear in record.linears):
        drawn["weights of the worst linears"] = _weights(worst(record, 6))
    if any(layer.expert_tokens for layer in record.layers):
        drawn["tokens of each expert"] = _experts(record)
    if len(runs) > 1:
        drawn["trend"] = _trend(runs)
    return drawn


def worst(record: CalibrationRecord, count: int) -> list[LinearRecord]:
    """The quantised linears with the largest error: of the output where known, else the weight."""
    known = [linear for linear in record.linears if _error_of(linear) is not None]
    return sorted(known, key=lambda linear: -(_error_of(linear) or 0.0))[:count]


def _error_of(linear: LinearRecord) -> float | None:
    return linear.weight_error if linear.output_error is None else linear.output_error


def _kind(linear: LinearRecord) -> str:
    return linear.name.rpartition(".")[2]


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.flatten()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # without a name and a date the same record gives the same bytes
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _errors(record: CalibrationRecord) -> bytes:
    """Bars from p50 to p99 of each linear, a mark at p90, coloured by kind."""
    figure, (axis,) = _figure(11, 3.8)
    measured = [linear for linear in record.linears if linear.error]
    kinds = list(dict.fromkeys(map(_kind, measured)))
    for number, kind in enumerate(kinds):
        colour = _COLOURS[number % len(_COLOURS)]
        mine = [(i, x.error) for i, x in enumerate(measured) if _kind(x) == kind and x.error]
        at = [i for i, _ in mine]
        low, mark, high = (
            [_PERCENT * getattr(error, name) for _, error in mine] for name in ("p50", "p90", "p99")
        )
        axis.vlines(at, low, high, color=colour, lw=2, label=kind)
        axis.plot(at, mark, ".", color=colour, ms=6)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("linear, in model order")
    axis.set_ylabel("error of a token's output, %")
    axis.set_title("p50 to p99 over tokens, a dot at p90", fontsize=10)
    axis.legend(frameon=False, fontsize=8, ncols=len(kinds), loc="upper left")
    return _png(figure)


def _propagation(record: CalibrationRecord) -> bytes:
    figure, (axis,) = _figure(7, 3.2)
    known = [x for x in record.layers if x.cumulative_error is not None]
    values = [_PERCENT * (x.cumulative_error or 0.0) for x in known]
    axis.plot([x.layer for x in known], values, marker=".", color=_COLOURS[0])
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("decoder layer")
    axis.set_ylabel("hidden states, %")
    axis.set_title("what all quantised layers so far add up to", fontsize=10)
    return _png(figure)


def _distribution(record: CalibrationRecord) -> bytes:
    figure, (axis,) = _figure(7, 3.2)
    errors = [_PERCENT * e for x in record.linears if (e := _error_of(x)) is not None]
    counts, edges = np.histogram(errors, bins=min(30, max(5, len(errors) // 3)))
    _with_cdf(axis, edges, counts, _COLOURS[0])
    axis.set_xlabel("relative error of a linear, %")
    axis.set_ylabel("linears")
    return _png(figure)


def _weights(linears: Sequence[LinearRecord]) -> bytes:
    shown = [linear for linear in linears if linear.weight_histogram]
    columns = min(3, len(shown))
    rows = -(-len(shown) // max(columns, 1))
    figure, axes = _figure(11, 2.6 * rows, rows, columns)
    for axis, linear in zip(axes, shown):
        histogram = linear.weight_histogram
        assert histogram is not None
        edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
        _with_cdf(axis, edges, np.array(histogram.counts), _COLOURS[4], log=True)
        axis.xaxis.get_major_locator().set_params(nbins=5)
        axis.set_title(linear.name.removeprefix("model."), fontsize=8)
    for axis in axes[len(shown) :]:
        axis.axis("off")
    return _png(figure)


def _with_cdf(axis: Any, edges: Any, counts: Any, colour: str, log: bool = False) -> None:
    """A histogram, and on a second axis the share of values up to each place."""
    axis.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colour, alpha=0.7, log=log)
    second = axis.twinx()
    second.spines[["top"]].set_visible(False)
    share = np.concatenate([[0], np.cumsum(counts)]) / max(1, counts.sum())
    second.plot(edges, _PERCENT * share, color=_COLOURS[1], lw=1.5)
    second.set_ylim(0, 103)
    second.set_ylabel("up to here, %", color=_COLOURS[1], fontsize=8)
    second.tick_params(labelsize=7)
    axis.tick_params(labelsize=7)


def _experts(record: CalibrationRecord) -> bytes:
    known = [x for x in record.layers if x.expert_tokens]
    table = np.array([x.expert_tokens for x in known], dtype=float)
    table = _PERCENT * table / np.maximum(table.sum(1, keepdims=True), 1)
    figure, (axis,) = _figure(7, 0.8 + 0.35 * len(known))
    image = axis.imshow(table, aspect="auto", cmap="Blues", vmin=0)
    axis.set_yticks(range(len(known)), [str(x.layer) for x in known])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis, label="% of routed tokens")
    return _png(figure)


def _trend(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Each figure over the runs, relative to the first run that has it."""
    figure, (axis,) = _figure(9, 3.6)
    names = list(dict.fromkeys(name for run in runs for name in run["figures"]))
    drawn = 0
    for name in names:
        seen = [(i, v) for i, run in enumerate(runs) if (v := run["figures"].get(name))]
        if len(seen) < 2:
            continue
        values = [value / seen[0][1] for _, value in seen]
        colour, mark = _COLOURS[drawn % len(_COLOURS)], "os^"[drawn // len(_COLOURS)]
        axis.plot([i for i, _ in seen], values, mark, ls="-", ms=4, color=colour, label=name)
        drawn += 1
    axis.axhline(1.0, color="grey", lw=0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(f"run (last {len(runs)})")
    axis.set_ylabel("relative to the first")
    if drawn:
        axis.legend(frameon=False, fontsize=7, ncols=2)
    return _png(figure)
