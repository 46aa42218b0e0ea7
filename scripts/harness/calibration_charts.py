# SPDX-License-Identifier: MIT
"""Charts of a calibration record, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oss_fused.bench import charts
from oss_fused.bench.charts import COLOURS
from oss_fused.quant.record import CalibrationRecord, LinearRecord

_PERCENT = 100.0
_GREY = "#8a8f98"
_WORST = 4


def draw(record: CalibrationRecord, runs: Sequence[Mapping[str, Any]] = ()) -> dict[str, bytes]:
    """Every chart that the record has figures for: name -> PNG.

    Args:
        record: of the run.
        runs: of the trend file, oldest first; drawn from two on.
    """
    drawn: dict[str, bytes] = {}
    if any(linear.error for linear in record.linears):
        drawn["output error per linear"] = _errors(record)
    known = [x for x in record.layers if x.cumulative_error is not None]
    if known:
        points = [(x.layer, _PERCENT * (x.cumulative_error or 0.0)) for x in known]
        drawn["cumulative error"] = charts.lines(
            {"": points},
            "decoder layer",
            "relative error of the hidden states, %",
            "cumulative error of all quantised layers",
        )
    if any(_error_of(linear) is not None for linear in record.linears):
        drawn["distribution of errors"] = _distribution(record)
    for linear in worst(record, _WORST):
        if linear.weight_histogram:
            drawn[f"weights of {linear.name.removeprefix('model.')}"] = _weights(linear)
    if any(layer.expert_tokens for layer in record.layers):
        drawn["tokens per expert"] = _experts(record)
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


def _errors(record: CalibrationRecord) -> bytes:
    """Bars from p50 to p99 of each linear, a mark at p90, a colour and a marker per kind."""
    figure, axis = charts.panel(10, 3.8)
    measured = [linear for linear in record.linears if linear.error]
    for number, kind in enumerate(dict.fromkeys(map(_kind, measured))):
        colour = COLOURS[number % len(COLOURS)]
        marker = charts.MARKERS[number % len(charts.MARKERS)]
        own = [(i, x.error) for i, x in enumerate(measured) if _kind(x) == kind and x.error]
        at = [i for i, _ in own]
        low, mark, high = (
            [_PERCENT * getattr(error, name) for _, error in own] for name in ("p50", "p90", "p99")
        )
        axis.vlines(at, low, high, color=colour, lw=1.5)
        axis.plot(at, mark, marker, color=colour, ms=4, label=kind)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="linear, in model order", ylabel="relative error of a token's output, %")
    axis.set_title("p50 to p99 over tokens, marker at p90", fontsize=10)
    charts.legend_beside(axis)
    return charts.png(figure)


def _distribution(record: CalibrationRecord) -> bytes:
    errors = [_PERCENT * e for x in record.linears if (e := _error_of(x)) is not None]
    counts, edges = np.histogram(errors, bins=min(30, max(5, len(errors) // 3)))
    of = "output" if any(x.output_error is not None for x in record.linears) else "weight"
    return _histogram(edges, counts, f"relative {of} error of a linear, %", "linears")


def _weights(linear: LinearRecord) -> bytes:
    histogram = linear.weight_histogram
    assert histogram is not None
    edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
    name = linear.name.removeprefix("model.")
    return _histogram(edges, np.array(histogram.counts), f"weight of {name}", "weights", log=True)


def _histogram(edges: Any, counts: Any, xlabel: str, ylabel: str, log: bool = False) -> bytes:
    """Counts, and on a second axis their cumulative share."""
    figure, axis = charts.panel()
    axis.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_GREY, alpha=0.7, log=log)
    axis.xaxis.get_major_locator().set_params(nbins=6)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    second = axis.twinx()
    second.spines[["top"]].set_visible(False)
    share = np.concatenate([[0], np.cumsum(counts)]) / max(1, counts.sum())
    second.plot(edges, _PERCENT * share, color=COLOURS[0], lw=1.5)
    second.set_ylim(0, 103)
    second.set_ylabel("cumulative share, %", color=COLOURS[0])
    return charts.png(figure)


def _experts(record: CalibrationRecord) -> bytes:
    known = [x for x in record.layers if x.expert_tokens]
    table = np.array([x.expert_tokens for x in known], dtype=float)
    table = _PERCENT * table / np.maximum(table.sum(1, keepdims=True), 1)
    figure, axis = charts.panel(7, 0.8 + 0.35 * len(known))
    image = axis.imshow(table, aspect="auto", cmap="Blues", vmin=0)
    axis.set_yticks(range(len(known)), [str(x.layer) for x in known])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="expert", ylabel="decoder layer")
    figure.colorbar(image, ax=axis, label="share of routed tokens, %")
    return charts.png(figure)


def _trend(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Each figure over the runs, relative to the first run that has it."""
    series = {}
    for name in dict.fromkeys(name for run in runs for name in run["figures"]):
        seen = [(i, v) for i, run in enumerate(runs) if (v := run["figures"].get(name))]
        if len(seen) > 1:
            series[name] = [(i, value / seen[0][1]) for i, value in seen]
    return charts.lines(series, f"run (last {len(runs)})", "relative to the first run", level=1.0)
