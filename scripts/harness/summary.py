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

# figures that get a ratio against the baseline, and whether more of them is better
BETTER = {
    "output_throughput": "more",
    "p50_ttft_ms": "less",
    "p50_tpot_ms": "less",
    "p50_itl_ms": "less",
}
# largest ratio between the median times to first token of one load on a warm server
STEADY = 1.3


def split(
    measurements: Sequence[Mapping[str, Any]], arms: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Measurements of loads that all arms had in the same round and repeat, and the others."""
    names = ("round", "repeat", "concurrency", "input_len", "output_len")
    keys = [tuple(row[name] for name in names) for row in measurements]
    paired = [row for key, row in zip(keys, measurements) if keys.count(key) == arms]
    return paired, [row for key, row in zip(keys, measurements) if keys.count(key) != arms]


def condense(
    measurements: Sequence[Mapping[str, Any]],
    arms: Sequence[str],
    baselines: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One dict per load that all arms had, in the order measured.

    Ratios are taken between arms of the same round and repeat, which saw the same prompts. Each
    figure is compared with the baseline that is best in it.

    Args:
        measurements: as compare.run returns them.
        arms: names.
        baselines: those to compare with; default: the first arm.

    Returns:
        Per load: "concurrency", "input_len", "output_len", "num_prompts", "baselines" (figure ->
        the best baseline's name) and "arms": name -> {"figures": medians, "steady": whether the
        runs' times to first token agree, and none is far above the last warm-up's, "ratios":
        figure -> {"median", "min", "max", "values"}, above 1 where the arm is better; none for
        baselines}.
    """
    baselines = list(baselines) or [arms[0]]
    loads: dict[tuple[int, int, int, int], dict[str, dict[tuple[int, int], Any]]] = {}
    warm: dict[tuple[Any, ...], list[float]] = {}
    for row in split(measurements, len(arms))[0]:
        key = (row["concurrency"], row["input_len"], row["output_len"], row["num_prompts"])
        runs = loads.setdefault(key, {}).setdefault(row["arm"], {})
        runs[row["round"], row["repeat"]] = row["figures"]
        # results of older runs lack it
        warm.setdefault((key, row["arm"]), []).extend(filter(None, [row.get("warm_up_ttft_ms")]))
    cells = []
    for key, by_arm in loads.items():
        names = ("concurrency", "input_len", "output_len", "num_prompts")
        medians = {name: _medians(list(by_arm[name].values())) for name in arms}
        best = {figure: _best(figure, baselines, medians) for figure in BETTER}
        cell: dict[str, Any] = {**dict(zip(names, key)), "baselines": best, "arms": {}}
        for name in arms:
            first = [run["p50_ttft_ms"] for run in by_arm[name].values()]
            ratios = {}
            for figure, baseline in best.items() if name not in baselines else ():
                ratio = _ratio(figure, by_arm[name], by_arm[baseline])
                if ratio:
                    ratios[figure] = ratio
            steady = max(first) <= STEADY * min(first + warm[key, name])
            cell["arms"][name] = {"figures": medians[name], "steady": steady, "ratios": ratios}
        cells.append(cell)
    return cells


def is_steady(cell: Mapping[str, Any], name: str) -> bool:
    """Whether an arm and every baseline that is best in some figure are steady.

    An unsteady baseline may be the best one once it is warm, so no ratio to another is known.
    """
    return all(cell["arms"][arm]["steady"] for arm in {name, *cell["baselines"].values()})


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def _best(figure: str, baselines: Sequence[str], medians: Mapping[str, Mapping[str, float]]) -> str:
    choose = max if BETTER[figure] == "more" else min
    return choose(baselines, key=lambda name: medians[name].get(figure, 0.0))


def _ratio(
    figure: str,
    runs: Mapping[tuple[int, int], Mapping[str, float]],
    baseline: Mapping[tuple[int, int], Mapping[str, float]],
) -> dict[str, Any]:
    """How many times better than the baseline's run of the same round; {} where neither says."""
    values = []
    for at, run in runs.items():
        if at in baseline and run.get(figure) and baseline[at].get(figure):
            ratio = run[figure] / baseline[at][figure]
            values.append(ratio if BETTER[figure] == "more" else 1 / ratio)
    if not values:
        return {}
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "values": values}


def named_ratios(
    cells: Sequence[Mapping[str, Any]],
    candidate: str,
    prefix: str,
    key: str = "ratio_c",
    rate: str | None = None,
) -> dict[str, float]:
    """Ratios under flat names: ``<prefix>.tpot_<key><concurrency>``, ``ttft_...``, and throughput.

    Loads of other lengths than the first get ``_<input>x<output>`` appended. Where the runs of the
    candidate or of a best baseline are not steady, only the time per output token has a ratio.
    ``<prefix>.ttft_ratio_min`` is the lowest ratio of the first token among the named ones.

    Args:
        cells: as ``condense`` returns them.
        candidate: the arm.
        prefix: such as ``main_job.gpt_oss_20b``.
        key: what stands before the concurrency.
        rate: the same for the candidate's output tokens per second; None leaves them out.
    """
    first = (cells[0]["input_len"], cells[0]["output_len"])
    named = {}
    for cell in cells:
        lengths = (cell["input_len"], cell["output_len"])
        suffix = "" if lengths == first else f"_{lengths[0]}x{lengths[1]}"
        arm = cell["arms"][candidate]
        figures = {"tpot_": "p50_tpot_ms", "ttft_": "p50_ttft_ms", "": "output_throughput"}
        for kind, figure in figures.items():
            steady = is_steady(cell, candidate) or figure == "p50_tpot_ms"
            if figure in arm["ratios"] and steady:
                ratio = round(arm["ratios"][figure]["median"], 4)
                named[f"{prefix}.{kind}{key}{cell['concurrency']}{suffix}"] = ratio
        if rate:
            name = f"{prefix}.{rate}{cell['concurrency']}{suffix}"
            named[name] = round(arm["figures"]["output_throughput"], 1)
    first_tokens = [ratio for name, ratio in named.items() if name.startswith(f"{prefix}.ttft_")]
    if first_tokens:
        named[f"{prefix}.ttft_ratio_min"] = min(first_tokens)
    return named


def host_overhead(cells: Sequence[Mapping[str, Any]], arm: str, kernel_ms: float | None) -> float:
    """Time per output token of one request over the kernels' own time per step.

    Args:
        cells: as ``condense`` returns them; the first load of one request counts.
        arm: its name.
        kernel_ms: of the kernels of a decode step at batch 1.

    Raises:
        ValueError: no load has one request, or ``kernel_ms`` is None.
    """
    single = [cell for cell in cells if cell["concurrency"] == 1]
    if not single or kernel_ms is None:
        missing = "a load of one request" if kernel_ms is not None else "that name in --summary"
        raise ValueError(f"--kernel-ms: expected {missing}, found none")
    return round(single[0]["arms"][arm]["figures"]["p50_tpot_ms"] / kernel_ms, 4)


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
