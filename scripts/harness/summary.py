# SPDX-License-Identifier: MIT
"""Condenses a comparison's measurements: medians per load, ratios with spread, named figures."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oss_fused.files import write_json

# figures that get a ratio against the baseline
COMPARED = ("output_throughput", "p50_ttft_ms", "p50_tpot_ms", "p50_itl_ms")


def split(
    measurements: Sequence[Mapping[str, Any]], arms: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Measurements of loads that all arms had in the same round and repeat, and the others."""
    names = ("round", "repeat", "concurrency", "input_len", "output_len")
    keys = [tuple(row[name] for name in names) for row in measurements]
    paired = [row for key, row in zip(keys, measurements) if keys.count(key) == arms]
    return paired, [row for key, row in zip(keys, measurements) if keys.count(key) != arms]


def condense(
    measurements: Sequence[Mapping[str, Any]], arms: Sequence[str]
) -> list[dict[str, Any]]:
    """One dict per load that all arms had, in the order measured.

    Ratios are taken between arms of the same round and repeat, which saw the same prompts.

    Args:
        measurements: as compare.run returns them.
        arms: names; the first is the baseline.

    Returns:
        Per load: "concurrency", "input_len", "output_len", "num_prompts" and "arms": name ->
        {"figures": medians, "ratios": figure -> {"median", "min", "max", "values"}}.
    """
    loads: dict[tuple[int, int, int, int], dict[str, dict[tuple[int, int], Any]]] = {}
    for row in split(measurements, len(arms))[0]:
        key = (row["concurrency"], row["input_len"], row["output_len"], row["num_prompts"])
        runs = loads.setdefault(key, {}).setdefault(row["arm"], {})
        runs[row["round"], row["repeat"]] = row["figures"]
    cells = []
    for key, by_arm in loads.items():
        names = ("concurrency", "input_len", "output_len", "num_prompts")
        cell: dict[str, Any] = {**dict(zip(names, key)), "arms": {}}
        baseline = by_arm[arms[0]]
        for name in arms:
            runs = by_arm[name]
            figures = {
                figure: statistics.median(run[figure] for run in runs.values())
                for figure in next(iter(runs.values()))
            }
            ratios = {}
            for figure in COMPARED if name != arms[0] else ():
                values = [
                    run[figure] / baseline[at][figure]
                    for at, run in runs.items()
                    if at in baseline and baseline[at].get(figure)
                ]
                if values:
                    ratios[figure] = {
                        "median": statistics.median(values),
                        "min": min(values),
                        "max": max(values),
                        "values": values,
                    }
            cell["arms"][name] = {"figures": figures, "ratios": ratios}
        cells.append(cell)
    return cells


def named_ratios(
    cells: Sequence[Mapping[str, Any]], candidate: str, prefix: str, key: str = "ratio_c"
) -> dict[str, float]:
    """Ratios of output tok/s under flat names: ``<prefix>.<key><concurrency>``.

    Loads of other lengths than the first get ``_<input>x<output>`` appended.

    Args:
        cells: as ``condense`` returns them.
        candidate: the arm.
        prefix: such as ``main_job.gpt_oss_20b``.
        key: what stands before the concurrency.
    """
    first = (cells[0]["input_len"], cells[0]["output_len"])
    named = {}
    for cell in cells:
        lengths = (cell["input_len"], cell["output_len"])
        suffix = "" if lengths == first else f"_{lengths[0]}x{lengths[1]}"
        ratio = cell["arms"][candidate]["ratios"]["output_throughput"]
        named[f"{prefix}.{key}{cell['concurrency']}{suffix}"] = round(ratio["median"], 4)
    return named


def merge_summary(path: Path, figures: Mapping[str, float], detail: Path) -> None:
    """Add ``figures`` to the flat JSON object in ``path``, creating it if need be.

    summary-sources.json beside it names the file that each figure comes from.

    Args:
        path: such as docs/results/h200/summary.json.
        figures: name -> number.
        detail: the file with everything about them.

    Raises:
        ValueError: a file holds something else than one JSON object.
    """
    sources = dict.fromkeys(figures, os.path.relpath(detail.resolve(), path.resolve().parent))
    for file, entries in ((path, figures), (path.with_name("summary-sources.json"), sources)):
        known = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(known, dict):
            kind = type(known).__name__
            raise ValueError(f"summary {file}: expected one JSON object, found {kind}")
        write_json(file, dict(sorted({**known, **entries}.items())))
