# SPDX-License-Identifier: MIT
"""Figures of a decode measurement: the rounds of each load condensed, speed-ups, their names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.decode import Cell


def steady(row: dict[str, Any]) -> bool:
    """Whether no sample of a measurement is beyond twice, or below half, its median.

    Where the process that stamps the tokens stood still for a moment, tokens queued up and were
    then stamped faster than they were made.
    """
    median = statistics.median(row["ms"])
    return all(median / 2 <= value <= 2 * median for value in row["ms"])


# share of the kernels' time in a profile, which slows them a little, that a step takes at least
_LEAST = 0.9


def _possible(row: dict[str, Any], profiles: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step of a measurement took about as long as its kernels in the arm's profile."""
    kernels = [
        profile["busy_us"] / 1e3
        for profile in profiles
        if row["steps"] and profile["steps"] and profile["context"] <= row["context"]
        if (profile["arm"], profile["batch"]) == (row["arm"], row["batch"])
    ]
    return statistics.median(row["ms"]) >= _LEAST * max(kernels, default=0.0)


def condense(
    measurements: Sequence[dict[str, Any]],
    candidate: str,
    baselines: Sequence[str],
    profiles: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """One dict per cell, in the order measured.

    Measurements that are not ``steady`` are left out, and those whose steps are shorter than their
    kernels, unless a cell has no other of the arm.

    Args:
        measurements: as ``run`` returns them.
        candidate: the arm that is compared.
        baselines: arms of which the faster one counts, cell by cell; none: nothing is compared.
        profiles: of the arms, condensed.

    Returns:
        Per cell: "batch", "context", "steps", "arms": name -> {"ms": median over rounds of the
        rounds' medians, "min", "max" (of those medians), "p10", "p90" (of all samples),
        "distinct", "left_out" (measurements), "steady"}; with baselines also "baseline" (its
        name), "speedup" and its lowest and highest over the rounds that count for both arms.
    """
    cells: dict[Cell, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in measurements:
        arms = cells.setdefault(Cell(row["batch"], row["context"], row["steps"]), {})
        arms.setdefault(row["arm"], {})[row["round"]] = row
    condensed = []
    for cell, measured in cells.items():
        arms = {
            name: {
                number: row
                for number, row in rounds.items()
                if steady(row) and _possible(row, profiles)
            }
            or rounds
            for name, rounds in measured.items()
        }
        figures = {
            name: _figures(list(rounds.values())) | {"left_out": len(measured[name]) - len(rounds)}
            for name, rounds in arms.items()
        }
        condensed.append({**asdict(cell), "arms": figures})
        if not baselines:
            continue
        best = min(baselines, key=lambda name: figures[name]["ms"])
        ratios = [
            statistics.median(arms[best][number]["ms"]) / statistics.median(row["ms"])
            for number, row in arms[candidate].items()
            if number in arms[best]
        ] or [figures[best]["ms"] / figures[candidate]["ms"]]
        condensed[-1] |= {
            "baseline": best,
            "speedup": figures[best]["ms"] / figures[candidate]["ms"],
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
        }
    return condensed


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    medians = [statistics.median(row["ms"]) for row in rows]
    samples = sorted(value for row in rows for value in row["ms"])
    figures = {
        "ms": statistics.median(medians),
        "min": min(medians),
        "max": max(medians),
        "p10": samples[int(0.1 * (len(samples) - 1))],
        "p90": samples[int(0.9 * (len(samples) - 1))],
        "steady": all(map(steady, rows)),
    }
    if "distinct" in rows[0]:
        figures["distinct"] = min(row["distinct"] for row in rows)
    return figures


def named_speedups(cells: Sequence[dict[str, Any]], model: str) -> dict[str, float]:
    """``decode.<model>.speedup_b<batch>`` (the lowest of its contexts), ``prefill.<model>...``."""
    named: dict[str, float] = {}
    for cell in cells:
        if "speedup" not in cell:
            continue
        if cell["steps"]:
            name = f"decode.{model}.speedup_b{cell['batch']}"
        else:
            name = f"prefill.{model}.speedup_{cell['batch'] * cell['context']}"
        named[name] = min(named.get(name, float("inf")), round(cell["speedup"], 4))
    return named
