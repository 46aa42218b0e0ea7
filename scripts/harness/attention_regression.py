# SPDX-License-Identifier: MIT
"""Regression control of FP8 attention: limits, a trend of runs, limits that follow it, a report."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.regression import is_number, largest
from oss_fused.bench import charts
from oss_fused.bench.report import Report
from oss_fused.files import write_json

DEFAULTS = {"attention_fp8_p99_abs": 3e-2, "attention_fp8_clip_ratio": 0.03}
TREND_RUNS = 100
_FIGURES = {"p99", "clip", "kl", "group_size"}
# runs that a limit of the trend needs, and room above their mean where they are all alike
_ADAPTIVE_RUNS, _LEAST_ROOM = 5, 1.05
# a clip ratio below this share of its limit wastes range
_WASTED = 0.01
_LAST = 5


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """What a run is judged by: the worse of the two FP8 curves, and the group size chosen."""
    pair = [results["curves"][name] for name in ("fp8_per_channel", "fp8_group")]
    return {
        "p99": largest(curve["p99_abs"] for curve in pair),
        "clip": largest(curve["clip_ratio"] for curve in pair),
        "kl": largest(curve["kl_vs_laplace_like"] for curve in pair),
        "group_size": results["per_group"]["group_size"],
    }


def load_limits(path: Path | None, flags: Mapping[str, float | None]) -> dict[str, float]:
    """Defaults, overridden by the JSON file where it exists, and by flags that were given.

    Raises:
        ValueError: the file is not an object of known names and numbers; names it.
    """
    limits = dict(DEFAULTS)
    if path is not None and path.exists():
        found = _read(path)
        if not isinstance(found, dict) or not found.keys() <= DEFAULTS.keys():
            raise ValueError(f"{path}: expected an object with names of {', '.join(DEFAULTS)}")
        if not all(isinstance(value, int | float) for value in found.values()):
            raise ValueError(f"{path}: expected numbers")
        limits.update(found)
    limits.update({name: value for name, value in flags.items() if value is not None})
    return limits


def load_trend(path: Path) -> list[dict[str, float]]:
    """The runs in the file, oldest first.

    Raises:
        ValueError: the file is no list of runs; names it.
    """
    runs = _read(path)
    if not isinstance(runs, list) or not all(
        isinstance(one, dict) and all(is_number(one.get(name)) for name in _FIGURES) for one in runs
    ):
        raise ValueError(
            f"{path}: expected a list of runs with finite numbers as {', '.join(sorted(_FIGURES))}"
        )
    return runs


def append_trend(path: Path, run: Mapping[str, float]) -> list[dict[str, float]]:
    """Add a run to the file; returns the last TREND_RUNS, oldest first.

    A run with a figure that is no finite number is returned, but not kept: no mean would have one.

    Raises:
        ValueError: the file is no list of runs; names it.
    """
    runs = load_trend(path) if path.exists() else []
    runs = [*runs, dict(run)][-TREND_RUNS:]
    kept = runs if all(map(is_number, run.values())) else runs[:-1]
    write_json(path, kept)
    return runs


def adaptive_limits(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean + 3 standard deviations of the trend; empty while there are few runs."""
    if len(runs) < _ADAPTIVE_RUNS:
        return {}
    found = {}
    for name, key in (("attention_fp8_p99_abs", "p99"), ("attention_fp8_clip_ratio", "clip")):
        values = [run[key] for run in runs]
        mean = statistics.fmean(values)
        found[name] = max(mean + 3 * statistics.stdev(values), _LEAST_ROOM * mean)
    return found


def write_adaptive(path: Path, runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Write limits of the trend where they are lower than the file's; returns those.

    Limits that flags give for one run are no part of the file.
    """
    limits = load_limits(path, {})
    lower = {
        name: value for name, value in adaptive_limits(runs).items() if 0 < value < limits[name]
    }
    if lower:
        write_json(path, {**limits, **lower})
    return lower


def failures(run: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """A sentence for each limit that the run exceeds."""
    pairs = (("attention_fp8_p99_abs", run["p99"]), ("attention_fp8_clip_ratio", run["clip"]))
    return [
        f"{name}: {value:.3g} exceeds the limit of {limits[name]:.3g}"
        for name, value in pairs
        # NaN is no pass
        if not value <= limits[name]
    ]


def advice(runs: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> list[str]:
    """What to do about the last run."""
    run, before = runs[-1], runs[:-1]
    found = []
    if not run["p99"] <= limits["attention_fp8_p99_abs"]:
        found.append("The 99th percentile is above its limit: try smaller groups or E4M3.")
    elif before and run["p99"] < min(one["p99"] for one in before):
        found.append("The 99th percentile is a new low: let --write-adaptive-thresholds keep it.")
    limit = limits["attention_fp8_clip_ratio"]
    if not run["clip"] <= limit:
        found.append("Too many values are clipped: raise the margin or take larger groups.")
    elif run["clip"] < _WASTED * limit:
        found.append("Almost nothing is clipped: a smaller margin would use more of the format.")
    return found or ["Nothing to do."]


def report(runs: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> str:
    """Markdown: limits, means and quantiles of the trend, its last runs, advice."""
    made = Report("FP8 attention")
    add_trend(made, runs, limits, draw=False)
    return made.markdown()


def add_trend(
    made: Report,
    runs: Sequence[Mapping[str, float]],
    limits: Mapping[str, float],
    draw: bool = True,
) -> None:
    """Sections on the trend and what to do about its last run."""
    made.table(("limit", "value"), [(name, f"{value:.4g}") for name, value in limits.items()])
    made.heading(f"Trend of {len(runs)} runs")
    if draw and len(runs) > 1:
        made.charts({"trend": trend_chart(runs)})
    rows = []
    for key in ("p99", "clip", "kl"):
        values = sorted(run[key] for run in runs)
        p50, p90 = (values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.9))
        cells = (statistics.fmean(values), p50, p90, runs[-1][key])
        rows.append((key, *(f"{value:.4g}" for value in cells)))
    made.table(("figure", "mean", "p50", "p90", "last"), rows)
    made.heading("Last runs")
    names = ("p99", "clip", "kl", "group_size")
    last = [tuple(f"{run[name]:.4g}" for name in names) for run in runs[-_LAST:]]
    made.table(("p99", "clip ratio", "KL", "group size"), last)
    made.heading("Advice")
    made.items(advice(runs, limits))


def trend_chart(runs: Sequence[Mapping[str, float]]) -> bytes:
    """PNG: p99, clip ratio and KL over the runs, relative to the first of each that is not 0."""
    series = {}
    for key, label in (("p99", "99th percentile"), ("clip", "clip ratio"), ("kl", "KL")):
        first = next((run[key] for run in runs if run[key]), None)
        if first:
            series[label] = [(float(i), run[key] / first) for i, run in enumerate(runs)]
    return charts.lines(series, f"run (last {len(runs)})", "relative to the first run", level=1.0)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from error
