# SPDX-License-Identifier: MIT
"""Report of a calibration run: HTML in one file, Markdown with charts, trend file, thresholds.

Its input is calibration.json (quant.record) and, where the result was evaluated, the JSON of
scripts/evaluate.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.arguments import content_of, output_file
from harness.calibration_charts import draw, worst
from harness.quality_report import add_quality
from harness.regression import HISTORY_RUNS, largest, read_object, runs_of
from oss_fused.bench.report import Report
from oss_fused.files import write_json
from oss_fused.quant.record import CalibrationRecord, LinearRecord

FOLDER = "report"
# what figures_of finds, and what a threshold may be put on
FIGURES = (
    *("weight_error_max", "output_error_max", "error_p99_max", "clip_ratio_max", "kl_max"),
    *("cumulative_error", "perplexity_factor_max", "size_ratio"),
)
_WORST = 10
_TREND = "oss_fused.calibration_trend"
_HEADER = (
    *("linear", "scheme", "weight error", "output error", "error p50", "error p90", "error p99"),
    *("clipped", "KL, nats", "bytes before", "bytes after"),
)
_LAYER_HEADER = ("layer", "cumulative error", "k_scale", "v_scale", "KV cache", "tokens per expert")


def figures_of(
    record: CalibrationRecord, quality: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The run in a few numbers: what the trend file keeps and thresholds are put on.

    A figure that was not measured is left out. Errors are relative, clip ratios shares.
    """
    linears = record.linears
    found: dict[str, list[float | None]] = {
        "weight_error_max": [x.weight_error for x in linears],
        "output_error_max": [x.output_error for x in linears],
        "error_p99_max": [x.error.p99 if x.error else None for x in linears],
        "clip_ratio_max": [x.clip_ratio for x in linears],
        "kl_max": [x.kl for x in linears],
        "cumulative_error": [x.cumulative_error for x in record.layers[-1:]],
    }
    if quality:
        arms = [arm for text in quality["texts"] for arm in text["candidates"]]
        found["perplexity_factor_max"] = [arm["perplexity_factor"] for arm in arms]
    figures = {"size_ratio": record.output_bytes / record.source_bytes}
    for name, values in found.items():
        known = [value for value in values if value is not None]
        if known:
            figures[name] = largest(known)
    return figures


def failures(figures: Mapping[str, float], thresholds: Mapping[str, float]) -> list[str]:
    """A line for each figure that is above its threshold, or was not measured."""
    lines = []
    for name, limit in thresholds.items():
        value = figures.get(name)
        if value is None:
            lines.append(f"{name}: was not measured; its threshold is {limit:.4g}")
        elif not value <= limit:
            lines.append(f"{name}: {value:.4g} is above the threshold {limit:.4g}")
    return lines


def load_thresholds(path: Path) -> dict[str, float]:
    """Read a file of thresholds, ``{"output_error_max": 0.05, ...}``.

    Raises:
        ValueError: it is something else, or limits what is no figure; names argument and file.
    """
    with content_of("--thresholds", path, "a JSON file of {figure: limit}"):
        limits = {name: float(limit) for name, limit in json.loads(path.read_text()).items()}
    for name in limits:
        if name not in FIGURES:
            raise ValueError(
                f"--thresholds={str(path)!r}: no figure {name!r}; expected some of "
                f"{', '.join(FIGURES)}"
            )
    return limits


def trend_file(text: str) -> Path:
    """A trend file to add a run to, as argparse's ``type``; it need not exist.

    Raises:
        ArgumentTypeError: it holds something else, or cannot be written.
    """
    path = output_file(text)
    try:
        load_trend(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def load_trend(path: Path) -> list[dict[str, Any]]:
    """The runs of a trend file, oldest first; none where there is no file.

    Raises:
        ValueError: the file is something else; names it.
    """
    if not path.exists():
        return []
    runs = runs_of(read_object(path), "kind", _TREND, "figures")
    if runs is None:
        raise ValueError(
            f"{path}: is no trend file; expected kind {_TREND} and runs with figures, or a new name"
        )
    return runs


def append_trend(
    path: Path, record: CalibrationRecord, figures: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Add a run to the trend file and return the last ones, oldest first.

    Raises:
        ValueError: the file is something else; names it.
    """
    run = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": record.model,
        "scheme": record.scheme,
        "rounding": record.rounding,
        "figures": dict(figures),
    }
    runs = [*load_trend(path), run][-HISTORY_RUNS:]
    write_json(path, {"kind": _TREND, "runs": runs})
    return runs


def write_report(
    folder: Path,
    record: CalibrationRecord,
    quality: Mapping[str, Any] | None = None,
    runs: Sequence[Mapping[str, Any]] = (),
    thresholds: Mapping[str, float] | None = None,
) -> Path:
    """Write report.html, report.md and its charts; without matplotlib there are no charts.

    Args:
        folder: to write to; earlier reports there are replaced.
        record: of the run.
        quality: JSON of scripts/evaluate.py.
        runs: of the trend file.
        thresholds: on figures of ``figures_of``; what is above one is said at the top.

    Returns:
        Path of report.html.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _make_report(record, quality, runs, thresholds or {}).write(folder)
    return folder / "report.html"


def _make_report(
    record: CalibrationRecord,
    quality: Mapping[str, Any] | None,
    runs: Sequence[Mapping[str, Any]],
    thresholds: Mapping[str, float],
) -> Report:
    report = Report(f"Calibration of {record.model}")
    report.paragraph(_lead(record))
    figures = figures_of(record, quality)
    for line in failures(figures, thresholds):
        report.paragraph(f"**{line}**")
    report.heading("Figures")
    report.table(("figure", "value"), [(name, f"{value:.4g}") for name, value in figures.items()])
    if quality:
        report.heading("Perplexity")
        add_quality(report, quality)
    if importlib.util.find_spec("matplotlib"):
        report.heading("Charts")
        report.charts(draw(record, runs))
    report.heading("Mixes compared")
    header = ("16-bit inputs", "bf16 weights", "estimated factor", "")
    report.table(
        header,
        [
            (
                _percent(mix.inputs_share),
                _percent(mix.weights_share),
                f"{mix.factor:.4f}",
                "written" if mix.chosen else "",
            )
            for mix in record.mixes
        ],
    )
    report.heading("Decoder layers")
    report.table(_LAYER_HEADER, _layer_rows(record))
    report.heading("Worst linears")
    report.table(_HEADER, [_cells(linear) for linear in worst(record, _WORST)])
    report.heading("All linears")
    rows = [_cells(linear) for linear in record.linears]
    report.table(_HEADER, rows, f"{len(rows)} in model order")
    return report


def _lead(record: CalibrationRecord) -> str:
    kept = sum(linear.scheme == "BF16" for linear in record.linears)
    data = (
        f"{record.samples} samples, {record.tokens} tokens"
        if record.samples
        else "no calibration data"
    )
    before, after = record.source_bytes / 1e6, record.output_bytes / 1e6
    parts = [
        f"{record.scheme}, rounding {record.rounding}, format {record.format}, {data}",
        f"{len(record.linears) - kept} of {len(record.linears)} linears in FP8",
        f"{before:.2f} MB before, {after:.2f} MB after ({after / before:.1%})",
    ]
    if record.experts:
        parts.insert(2, f"experts stored as {record.experts}")
    return "; ".join(parts) + "."


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _cells(linear: LinearRecord) -> list[str]:
    error = linear.error
    spread = [error.p50, error.p90, error.p99] if error else [None] * 3
    return [
        linear.name,
        linear.scheme,
        _percent(linear.weight_error),
        _percent(linear.output_error),
        *map(_percent, spread),
        _percent(linear.clip_ratio),
        "" if linear.kl is None else f"{linear.kl:.2g}",
        f"{linear.bytes_before:,}",
        f"{linear.bytes_after:,}",
    ]


def _layer_rows(record: CalibrationRecord) -> list[list[str]]:
    rows = []
    for layer in record.layers:
        tokens = layer.expert_tokens
        scales = ("" if s is None else f"{s:.4g}" for s in (layer.k_scale, layer.v_scale))
        routed = f"{min(tokens)} to {max(tokens)}" if tokens else ""
        cache = layer.kv_cache or ""
        rows.append([str(layer.layer), _percent(layer.cumulative_error), *scales, cache, routed])
    return rows
