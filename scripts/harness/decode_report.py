# SPDX-License-Identifier: MIT
"""Report of a decode measurement (the JSON that scripts/bench_decode.py writes)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.arithmetic import describe_arithmetic
from harness.decode_profile import GROUPS
from oss_fused.bench import charts
from oss_fused.bench.report import Report
from oss_fused.environment import describe

_COLOURS = {
    "norms": "#8a8f98",
    "projections": "#0072b2",
    "attention": "#009e73",
    "router": "#e69f00",
    "experts": "#d55e00",
    "mlp": "#d55e00",
    "head": "#cc79a7",
    "other": "#c7c7c7",
}
_READING = (
    "Microseconds and, in brackets, kernels per step; one profile per arm, context {context}. The "
    "limit is the time that the bytes of a step take at the measured copy bandwidth "
    "({bandwidth}); in square brackets: the share of it that an arm reaches. Idle is time without "
    "any kernel; part of it is the profiler's own."
)


def render(results: Mapping[str, Any], folder: Path) -> None:
    """Write report.md with its charts, and report.html, into ``folder``."""
    make_report(results).write(folder)


def make_report(results: Mapping[str, Any], draw: bool = True) -> Report:
    """The report; arms are shown in the order of their speed, the candidate last.

    Args:
        results: "environment", "settings", "arms", "cells" (of decode_figures.condense) and
            "profiles" (of decode_profile.condense, with "limits": group -> microseconds).
        draw: with charts.
    """
    settings, cells = results["settings"], results["cells"]
    candidate = settings["candidate"]
    names = [name for name in results["arms"] if name != candidate]
    names.sort(key=lambda name: sum(cell["arms"][name]["ms"] for cell in cells))
    arms = [*names, candidate]
    report = Report(f"Decode steps and prefill of {settings['model']}")
    report.paragraph(f"{describe(results['environment'])}.")
    report.paragraph(_method(results))
    if "stopped" in results:
        why = results["stopped"].splitlines()[0]
        report.paragraph(f"**Stopped early: {why}.** Later loads and rounds are missing.")
    report.heading("Time per decode step")
    steps = [cell for cell in cells if cell["steps"]]
    if draw and steps:
        report.charts(_time_charts(steps, arms))
    _steps(report, steps, arms, candidate)
    report.heading("Prefill")
    _prefill(report, results, arms)
    if results["profiles"]:
        _profiles(report, results, arms, draw)
    if results.get("host"):
        _host(report, results["host"], arms)
    report.heading("Arms")
    for name in arms:
        arm = results["arms"][name]
        command = shlex.join([*_variables(arm), arm["model"], *arm["flags"]])
        report.items([f"{name}: `{command}`; {_arithmetic(results, name)}"])
    for name, why in results.get("failed", {}).items():
        report.paragraph(f"**{name}** did not run: {why.splitlines()[0]}")
    report.paragraph(
        f"Engine flags of {arms[0]}: `{shlex.join(results['arms'][arms[0]]['all_flags'])}`"
    )
    return report


def _method(results: Mapping[str, Any]) -> str:
    measured, settings = results["measurements"], results["settings"]
    figures = [
        (f"{name}, batch {cell['batch']}, context {cell['context']}", arm)
        for cell in results["cells"]
        for name, arm in cell["arms"].items()
    ]
    left_out = sum(arm["left_out"] for _, arm in figures)
    unsteady = [name for name, arm in figures if not arm["steady"]]
    text = (
        "One process per arm; all engines are up at once and are measured in turn, each load in up "
        f"to {1 + max(row['round'] for row in measured)} rounds. Milliseconds are medians over "
        "rounds, in brackets the lowest and highest round."
    )
    if settings["baselines"]:
        text += (
            f" Speed-up: the time of the faster of {', '.join(settings['baselines'])} over that of "
            f"{settings['candidate']}."
        )
    jump = "a step took more than twice the median, or less than half"
    if left_out:
        text += (
            f" {left_out} of {len(measured)} measurements are left out: in each {jump}, or steps "
            "took less time than their kernels, because the process that stamps the tokens stood "
            "still."
        )
    if unsteady:
        text += f" In every round of these {jump}, and they count: {'; '.join(unsteady)}."
    return text


def _variables(arm: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in arm["environment"]]


def _arithmetic(results: Mapping[str, Any], name: str) -> str:
    arm, config = results["arms"][name], results["settings"]["config"]
    mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    return describe_arithmetic(arm["flags"], mxfp4)


def _steps(
    report: Report, cells: Sequence[Mapping[str, Any]], arms: Sequence[str], candidate: str
) -> None:
    rows = [
        [
            f"{cell['batch']} x {cell['context']}",
            *(_spread(cell["arms"][arm]) for arm in arms),
            _speedup(cell),
            f"{cell['batch'] / cell['arms'][candidate]['ms'] * 1e3:.0f}",
        ]
        for cell in cells
    ]
    header = ["batch x context", *(f"{arm}, ms" for arm in arms), "speed-up"]
    report.table([*header, f"{candidate}, tokens/s"], rows)


def _prefill(report: Report, results: Mapping[str, Any], arms: Sequence[str]) -> None:
    """One row per arm, so that FP8 and bf16 arithmetic are easy to compare."""
    rows = []
    for cell in results["cells"]:
        if cell["steps"]:
            continue
        tokens = cell["batch"] * cell["context"]
        for arm in arms:
            speedup = _speedup(cell) if arm == results["settings"]["candidate"] else ""
            times = (_spread(cell["arms"][arm]), speedup)
            rows.append([str(tokens), arm, *times, _arithmetic(results, arm)])
    report.table(["tokens", "arm", "ms", "speed-up", "arithmetic"], rows)


def _spread(figures: Mapping[str, float]) -> str:
    return f"{figures['ms']:.2f} ({figures['min']:.2f}-{figures['max']:.2f})"


def _speedup(cell: Mapping[str, Any]) -> str:
    if "speedup" not in cell:
        return ""
    return f"{cell['speedup']:.2f} ({cell['speedup_min']:.2f}-{cell['speedup_max']:.2f})"


def _time_charts(cells: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, bytes]:
    drawn = {}
    for context in dict.fromkeys(cell["context"] for cell in cells):
        chosen = [cell for cell in cells if cell["context"] == context]
        batches = [str(cell["batch"]) for cell in chosen]
        series: dict[str, list[float | None]] = {
            arm: [cell["arms"][arm]["ms"] for cell in chosen] for arm in arms
        }
        title = f"time per decode step, context {context}"
        drawn[f"time per step context {context}"] = charts.groups(
            batches, series, "ms per step; lower is better", title, "batch"
        )
    return drawn


def _profiles(report: Report, results: Mapping[str, Any], arms: Sequence[str], draw: bool) -> None:
    profiles, bandwidth = results["profiles"], results["bandwidth"]
    report.heading("Where the time goes")
    speed = f"{bandwidth / 1e12:.2f} TB/s" if bandwidth else "not measured"
    report.paragraph(_READING.format(context=profiles[0]["context"], bandwidth=speed))
    loads = dict.fromkeys((p["batch"], p["context"], p["steps"] > 0) for p in profiles)
    if draw:
        report.charts(
            {
                f"step batch {batch}": _step_chart(_of(profiles, (batch, context, True)), arms)
                for batch, context, decode in loads
                if decode
            }
        )
    for load in loads:
        batch, context, decode = load
        report.heading(f"Decode, batch {batch}" if decode else f"Prefill, {batch} x {context}", 3)
        _profile_table(report, _of(profiles, load), arms)


def _host(report: Report, rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> None:
    report.heading("Host time of a step")
    report.paragraph(
        "Milliseconds in the methods of vLLM's model runner, which launch and do not wait for the "
        "device, unless its queue is full; mean over the steps. With drafts a step gives several "
        "tokens."
    )
    parts = list(dict.fromkeys(part for row in rows for part in row["host_ms"]))
    table = [
        [
            f"{row['batch']} x {row['context']}",
            row["arm"],
            f"{row['ms']:.3f}",
            f"{row['tokens']:.2f}",
            *(f"{row['host_ms'][part]:.3f}" if part in row["host_ms"] else "" for part in parts),
        ]
        for row in sorted(rows, key=lambda row: (row["batch"], arms.index(row["arm"])))
    ]
    report.table(["batch x context", "arm", "step, ms", "tokens of a sequence", *parts], table)


def _of(
    profiles: Sequence[Mapping[str, Any]], load: tuple[int, int, bool]
) -> dict[str, Mapping[str, Any]]:
    """Arm -> its profile of a load."""
    return {p["arm"]: p for p in profiles if (p["batch"], p["context"], p["steps"] > 0) == load}


def _profile_table(
    report: Report, chosen: Mapping[str, Mapping[str, Any]], arms: Sequence[str]
) -> None:
    limits = next(iter(chosen.values()))["limits"]
    rows = []
    for group in GROUPS:
        if any(group in p["groups"] for p in chosen.values()):
            limit = limits.get(group, 0.0)
            entries = [chosen[arm]["groups"].get(group) for arm in arms]
            cells = [_entry(entry, limit) if entry else "" for entry in entries]
            rows.append([group, f"{limit:.0f}" if limit else "", *cells])
    total = sum(limits.values())
    busy, idle = ["busy", f"{total:.0f}" if total else ""], ["idle", ""]
    for arm in arms:
        p = chosen[arm]
        busy.append(_entry({"kernels": p["kernels_per_step"], "us": p["busy_us"]}, total))
        idle.append(f"{p['span_us'] - p['busy_us']:.0f}")
    report.table(["us per step", "limit", *arms], [*rows, busy, idle])


def _entry(entry: Mapping[str, float], limit: float) -> str:
    share = f" [{limit / entry['us']:.0%}]" if limit and entry["us"] else ""
    return f"{entry['us']:.0f} ({entry['kernels']:.0f}){share}"


def _step_chart(chosen: Mapping[str, Mapping[str, Any]], arms: Sequence[str]) -> bytes:
    first = next(iter(chosen.values()))
    parts = {
        group: [
            *(chosen[arm]["groups"].get(group, {"us": 0.0})["us"] for arm in arms),
            first["limits"].get(group, 0.0),
        ]
        for group in GROUPS
    }
    title = f"kernels of a decode step, batch {first['batch']}"
    return charts.stacked_bars([*arms, "limit"], parts, "us per step", title, _COLOURS)
