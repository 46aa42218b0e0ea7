# SPDX-License-Identifier: MIT
"""Markdown and chart of a decode measurement (the JSON that scripts/bench_decode.py writes)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.decode_profile import GROUPS
from harness.report import table
from oss_fused.environment import describe

_COLOURS = {
    "norms": "#8a8f98",
    "projections": "#1f77b4",
    "attention": "#2ca02c",
    "router": "#e6b800",
    "experts": "#d9772b",
    "mlp": "#d9772b",
    "head": "#9467bd",
    "other": "#c7c7c7",
}


def markdown(results: Mapping[str, Any]) -> str:
    """The report.

    Args:
        results: "environment", "settings", "arms", "cells" (of decode_figures.condense) and
            "profiles" (of decode_profile.condense, with "limits": group -> microseconds).
    """
    settings = results["settings"]
    arms, candidate = list(results["arms"]), settings["candidate"]
    measured = results["measurements"]
    rounds = 1 + max(row["round"] for row in measured)
    figures = [
        (f"{name}, batch {cell['batch']}, context {cell['context']}", arm)
        for cell in results["cells"]
        for name, arm in cell["arms"].items()
    ]
    left_out = sum(arm["left_out"] for _, arm in figures)
    unsteady = [name for name, arm in figures if not arm["steady"]]
    method = (
        f"One process an arm, all engines up at once and measured in turn, each load in up to "
        f"{rounds} rounds. Milliseconds are medians over rounds, brackets the lowest and highest "
        f"round. The speed-up is against the faster of {', '.join(settings['baselines'])}."
    )
    if left_out:
        method += (
            f" {left_out} of {len(measured)} measurements are left out: in a window of steps they "
            f"took more than twice their median, or less than half (the process that reads the "
            f"tokens stood still)."
        )
    if unsteady:
        method += f" In no round free of that: {'; '.join(unsteady)}."
    parts = [
        f"# A decode step of {settings['model']}: {candidate} against the baseline",
        f"{describe(results['environment'])}.",
        method,
        _times(results["cells"], arms, candidate),
    ]
    if results["profiles"]:
        reading = (
            f"Microseconds and kernels a step, from one profile an arm (context "
            f"{results['profiles'][0]['context']}). The limit is the time that the bytes a step "
            f"must read take at the measured copy bandwidth ({_bandwidth(results)}); the share "
            f"of it that an arm reaches is in brackets. Idle is time without any kernel, some of "
            f"it the profiler's."
        )
        parts += ["## Where a step goes", reading, "![microseconds a step](profile.png)"]
        parts += _profiles(results["profiles"], arms)
    commands = [
        f"    {name}: {' '.join([*_variables(arm), arm['model'], shlex.join(arm['flags'])])}"
        for name, arm in results["arms"].items()
    ]
    flags = shlex.join(next(iter(results["arms"].values()))["all_flags"])
    parts += [f"**{name}** did not run: {why.splitlines()[0]}" for name, why in _failed(results)]
    parts += ["## Arms", "\n".join(commands), f"Engine flags of the first: `{flags}`"]
    return "\n\n".join(parts) + "\n"


def _failed(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    return list(results.get("failed", {}).items())


def _variables(arm: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in arm["environment"]]


def _bandwidth(results: Mapping[str, Any]) -> str:
    value = results["bandwidth"]
    return f"{value / 1e12:.2f} TB/s" if value else "not measured"


def _times(cells: Sequence[Mapping[str, Any]], arms: Sequence[str], candidate: str) -> str:
    rows = []
    for cell in cells:
        kind = "decode" if cell["steps"] else "prefill"
        row = [kind, str(cell["batch"]), str(cell["context"])]
        for arm in arms:
            figures = cell["arms"][arm]
            row.append(f"{figures['ms']:.2f} ({figures['min']:.2f}-{figures['max']:.2f})")
        tokens = cell["batch"] if cell["steps"] else cell["batch"] * cell["context"]
        row.append(f"{tokens / cell['arms'][candidate]['ms'] * 1e3:.0f}")
        row.append(f"{cell['speedup']:.2f} ({cell['speedup_min']:.2f}-{cell['speedup_max']:.2f})")
        rows.append(row)
    header = ["", "batch", "context", *(f"{arm} ms" for arm in arms)]
    return table([*header, f"{candidate} tok/s", "speed-up"], rows)


def _profiles(profiles: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[str]:
    parts = []
    for key in dict.fromkeys((p["batch"], p["context"], p["steps"] > 0) for p in profiles):
        chosen = {
            p["arm"]: p for p in profiles if (p["batch"], p["context"], p["steps"] > 0) == key
        }
        limits = next(iter(chosen.values()))["limits"]
        rows = []
        for group in GROUPS:
            if not any(group in p["groups"] for p in chosen.values()):
                continue
            limit = limits.get(group, 0.0)
            row = [group, f"{limit:.0f}" if limit else ""]
            for arm in arms:
                entry = chosen[arm]["groups"].get(group)
                row.append(_entry(entry, limit) if entry else "")
            rows.append(row)
        total = sum(limits.values())
        busy = ["busy", f"{total:.0f}" if total else ""]
        idle = ["idle", ""]
        for arm in arms:
            p = chosen[arm]
            whole = {"kernels": p["kernels_per_step"], "us": p["busy_us"]}
            busy.append(_entry(whole, total))
            idle.append(f"{p['span_us'] - p['busy_us']:.0f}")
        name = f"### {'Decode, batch' if key[2] else 'Prefill,'} {key[0]}"
        parts.append(name + ("" if key[2] else f" x {key[1]}"))
        header = ["us a step", "limit", *(f"{arm} (kernels)" for arm in arms)]
        parts.append(table(header, [*rows, busy, idle]))
    return parts


def _entry(entry: Mapping[str, float], limit: float) -> str:
    share = f" [{limit / entry['us']:.0%}]" if limit and entry["us"] else ""
    return f"{entry['us']:.0f} ({entry['kernels']:.0f}){share}"


def draw_chart(results: Mapping[str, Any], path: Path) -> None:
    """Stacked bars: microseconds a decode step by group, an arm a bar, a batch a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    profiles = [p for p in results["profiles"] if p["steps"]]
    batches = list(dict.fromkeys(p["batch"] for p in profiles))
    figure, axes = pyplot.subplots(1, len(batches), figsize=(3.2 * len(batches) + 1.5, 4.2))
    for axis, batch in zip([axes] if len(batches) == 1 else axes, batches):
        chosen = [p for p in profiles if p["batch"] == batch]
        names = [p["arm"] for p in chosen] + ["limit"]
        base = [0.0] * len(names)
        for group in GROUPS:
            heights = [p["groups"].get(group, {"us": 0.0})["us"] for p in chosen]
            heights.append(chosen[0]["limits"].get(group, 0.0))
            if any(heights):
                axis.bar(names, heights, bottom=base, label=group, color=_COLOURS[group])
                base = [low + height for low, height in zip(base, heights)]
        axis.set_title(f"batch {batch}")
        axis.tick_params(axis="x", rotation=30)
    first = axes if len(batches) == 1 else axes[0]
    first.set_ylabel("microseconds a step")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1 - 1.2 / (3.2 * len(batches) + 1.5), 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
