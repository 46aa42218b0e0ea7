# SPDX-License-Identifier: MIT
"""Report of a comparison (the JSON that scripts/compare.py writes)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.folder import atomic_folder
from harness.quality_report import add_quality
from harness.streaming import KINDS
from harness.summary import is_steady, split
from oss_fused.bench import charts
from oss_fused.bench.report import Report
from oss_fused.environment import describe, portable
from oss_fused.files import write_json

_TPOT, _TTFT, _RATE = "p50_tpot_ms", "p50_ttft_ms", "output_throughput"
_UNSTEADY = (
    "Not steady: the median time to first token differs by more than 30 % between runs of the same "
    "load, or is so far above the last warm-up's. Kernels may have been compiled while requests "
    "waited. Such a time, and the throughput of the same load, say nothing about a warm server. "
    "Where a baseline is not steady, another may be the best one for that alone."
)
FILES = ("results.json", "report.md", "report.html", "server-logs.txt")
_BUSY = "Each engine process shared a core with a busy loop. "
_PANELS = {
    "time per output token": (_TPOT, "ms, median; lower is better", False),
    "time to first token": (_TTFT, "ms, median; lower is better", True),
    "throughput": (_RATE, "output tokens/s; higher is better", True),
}
CHARTS = tuple(f"{name.replace(' ', '-')}.png" for name in _PANELS)


def write_folder(results: Mapping[str, Any], output: Path, logs: Path) -> None:
    """Write results.json, report.md, report.html, charts and server-logs.txt: all or none.

    Paths in the results are shortened to names; the logs keep them.

    Args:
        results: the comparison, "cells" included (see summary.condense).
        output: folder to create.
        logs: folder whose ``*.log`` are joined into server-logs.txt.

    Raises:
        CheckpointError: ``output`` exists, or writing failed.
    """
    results = portable(dict(results))
    with atomic_folder(output) as folder:
        write_json(folder / "results.json", results)
        render(results, folder)
        with (folder / "server-logs.txt").open("w") as everything:
            for log in sorted(logs.glob("*.log")):
                everything.write(f"==== {log.name}\n{log.read_text(errors='replace')}\n")


def render(results: Mapping[str, Any], folder: Path) -> None:
    """Write report.md with its charts, and report.html, into ``folder``."""
    make_report(results).write(folder)


def make_report(results: Mapping[str, Any], draw: bool = True) -> Report:
    """The report.

    Args:
        results: the comparison, "cells" included (see summary.condense).
        draw: with charts, where all arms had a load.
    """
    baselines, candidates = _sides(results)
    names = [" and ".join(side) for side in (candidates, baselines) if side]
    report = Report(" compared with ".join(names))
    report.paragraph(f"{describe(results['environment'])}.")
    _verdict(report, results)
    if "stopped" in results:
        _failure(report, results)
    report.heading("Time per output token and time to first token")
    if draw and results["cells"]:
        report.charts(_charts(results))
    _latency(report, results)
    report.heading("Memory and start-up")
    _memory(report, results)
    report.heading("Throughput")
    _throughput(report, results)
    _streamed(report, results)
    if results.get("quality"):
        report.heading("Quality")
        add_quality(report, results["quality"])
    report.heading("Answers")
    _answers(report, results)
    report.heading("How it was measured")
    _method(report, results)
    return report


def _sides(results: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    names = list(results["arms"])
    baselines = [name for name in results.get("baselines", names[:1]) if name in names]
    return baselines, [name for name in names if name not in baselines]


def _load(cell: Mapping[str, Any]) -> str:
    return f"{cell['concurrency']} x {cell['input_len']}:{cell['output_len']}"


def _spread(ratio: Mapping[str, float] | None) -> str:
    if not ratio:
        return ""
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _told(cell: Mapping[str, Any], name: str, figure: str) -> str:
    """The ratio of a figure that compilations would distort; "not steady" if an arm was not."""
    ratio = cell["arms"][name]["ratios"].get(figure)
    return _spread(ratio) if is_steady(cell, name) or not ratio else "not steady"


def _ordered(cell: Mapping[str, Any], baselines: Sequence[str]) -> list[tuple[str, Any]]:
    """Arms of a load: baselines, the fastest first, then the others."""
    arms = cell["arms"].items()
    known = [item for item in arms if item[0] in baselines]
    known.sort(key=lambda item: item[1]["figures"][_TPOT])
    return known + [item for item in arms if item[0] not in baselines]


def _verdict(report: Report, results: Mapping[str, Any]) -> None:
    """Ratios of both times; a load where an arm is not steady has no ratio of the first token."""
    baselines, candidates = _sides(results)
    if not candidates:
        report.paragraph("One arm: nothing to compare with.")
        return
    if not results["cells"]:
        report.paragraph("No load was measured with all arms: there is nothing to compare.")
        return
    lines = []
    for name in candidates:
        for label, figure in (("time per output token", _TPOT), ("time to first token", _TTFT)):
            parts = []
            for cell in results["cells"]:
                # an answer of one token has no time per output token
                ratio = cell["arms"][name]["ratios"].get(figure)
                told = figure == _TPOT or is_steady(cell, name)
                median = f"**{ratio['median']:.2f}x**" if ratio else "no ratio"
                parts.append(f"{median if told or not ratio else 'not steady'} for {_load(cell)}")
            lines.append(f"{name}, {label}: {', '.join(parts)}")
    best = f"the fastest of {', '.join(baselines)}" if baselines[1:] else baselines[0]
    report.paragraph(
        f"Ratio: the time of {best} over the arm's; above 1 the arm is faster. "
        "A load is written as concurrent requests x tokens in:out."
    )
    report.items(lines)


def _failure(report: Report, results: Mapping[str, Any]) -> None:
    """What ended the comparison before its time, and what only some of the arms measured."""
    cause = " ".join(str(results.get("failure") or "").splitlines()[:1])
    report.paragraph(f"**Stopped early: {results['stopped']}{f': {cause}' if cause else ''}.**")
    _, single = split(results["measurements"], results.get("planned_arms", len(results["arms"])))
    if not single:
        return
    report.paragraph("Measured before that, but not with all arms:")
    rows = [
        [
            _load(row),
            row["arm"],
            str(row["round"] + 1),
            *(f"{row['figures'][figure]:.1f}" for figure in (_TPOT, _TTFT, _RATE)),
        ]
        for row in single
    ]
    header = ["load", "arm", "round", "TPOT p50, ms", "TTFT p50, ms", "output tokens/s"]
    report.table(header, rows)


def _latency(report: Report, results: Mapping[str, Any]) -> None:
    baselines, _ = _sides(results)
    rows, tails = [], []
    for cell in results["cells"]:
        for name, arm in _ordered(cell, baselines):
            figures, ratios = arm["figures"], arm["ratios"]
            first = f"{figures[_TTFT]:.1f}" + ("" if arm["steady"] else " not steady")
            times = (f"{figures[_TPOT]:.2f}", _spread(ratios.get(_TPOT)))
            rows.append([_load(cell), name, *times, first, _told(cell, name, _TTFT)])
            tail = [
                " / ".join(f"{figures[f'p{p}_{metric}_ms']:.1f}" for p in (50, 95, 99))
                for metric in ("tpot", "ttft", "itl")
            ]
            tails.append([_load(cell), name, *tail])
    ratio = "ratio (lowest to highest)"
    report.table(["load", "arm", "TPOT, ms", ratio, "TTFT, ms", f"TTFT {ratio}"], rows)
    report.paragraph("TPOT: time per output token; TTFT: time to first token; medians.")
    if not all(arm["steady"] for cell in results["cells"] for arm in cell["arms"].values()):
        report.paragraph(_UNSTEADY)
    report.table(["load", "arm", "TPOT p50 / p95 / p99, ms", "TTFT, ms", "ITL, ms"], tails)
    arithmetic = [
        f"{name}: {arm['arithmetic']}"
        for name, arm in results["arms"].items()
        if "arithmetic" in arm
    ]
    if arithmetic:
        report.paragraph("Arithmetic:")
        report.items(arithmetic)


def _throughput(report: Report, results: Mapping[str, Any]) -> None:
    rows = []
    for cell in results["cells"]:
        for name, arm in _ordered(cell, _sides(results)[0]):
            figures = arm["figures"]
            rows.append(
                [
                    _load(cell),
                    name,
                    f"{figures[_RATE]:.1f}",
                    f"{figures['total_token_throughput']:.1f}",
                    f"{figures['request_throughput']:.2f}",
                    _told(cell, name, _RATE),
                ]
            )
    header = ["load", "arm", "output tokens/s", "all tokens/s", "requests/s"]
    report.table([*header, "ratio (lowest to highest)"], rows)


def _streamed(report: Report, results: Mapping[str, Any]) -> None:
    measured = results.get("streaming", {})
    if not measured:
        return
    report.heading("Streamed and whole answers")
    requests = results["settings"]["streamed"]
    rows = [
        [name, *(f"{each['tokens_per_s'][kind]:.0f}" for kind in KINDS), f"{each['ratio']:.3f}"]
        for name, each in measured.items()
    ]
    report.table(["arm", *(f"{kind}, tokens/s" for kind in KINDS), "ratio"], rows)
    report.paragraph(f"{requests} requests of 128:512 at once, token ids in; medians.")


def _memory(report: Report, results: Mapping[str, Any]) -> None:
    def figure(value: float | None, form: str = "{:.2f}") -> str:
        return "" if value is None else form.format(value)

    rows = []
    for name, arm in results["arms"].items():
        memory = arm["memory"]
        size = memory.get("checkpoint_bytes")
        kv_gib = memory.get("kv_cache_gib", memory.get("kv_cache_reserved_gib"))
        rows.append(
            [
                name,
                figure(size / 2**30 if size else None),
                figure(memory.get("weights_gib")),
                figure(kv_gib),
                figure(memory.get("kv_cache_tokens"), "{:,.0f}"),
                ", ".join(f"{seconds:.0f}" for seconds in arm["startup_seconds"]),
            ]
        )
    # vLLM reports no weight memory on a CPU: the column is then left out
    header = ["arm", "checkpoint GiB", "weights in memory GiB", "KV cache GiB", "KV cache tokens"]
    report.table([*header, "start-up s"], rows)


def _answers(report: Report, results: Mapping[str, Any]) -> None:
    """A row per question, the arms' answers side by side."""
    asked: dict[str, dict[str, str]] = {}
    notes = []
    for name, arm in results["arms"].items():
        chats = arm.get("chat", [])
        # earlier comparisons asked one question
        for chat in [chats] if isinstance(chats, dict) else chats:
            answer = " ".join(chat["answer"].split())[:200].replace("`", "'").replace("|", "/")
            asked.setdefault(chat["question"], {})[name] = f"`{answer}` ({chat['endpoint']})"
            if "chat_error" in chat:
                notes.append(f"{name}: chat was refused: {chat['chat_error'][:200]}")
    header = ["question", *results["arms"]]
    rows = [
        [question, *(answers.get(name, "was not asked") for name in header[1:])]
        for question, answers in asked.items()
    ]
    if rows:
        report.paragraph("The first 200 characters. Random weights answer with random words.")
    report.table(header, rows)
    report.items(notes)


def _method(report: Report, results: Mapping[str, Any]) -> None:
    settings = results["settings"]
    order = (
        "all servers up at once, every load put on each in turn"
        if settings["together"]
        else "one server at a time, arms alternating"
    )
    report.paragraph(
        f"`vllm bench serve`, random prompts, fixed lengths, greedy; {settings['rounds']} round(s) "
        f"of {settings['repeats']} repeat(s), {order}. "
        + ("Each load warmed the server up before. " if settings.get("warmups") else "")
        + (_BUSY if settings.get("busy_host") else "")
        + "A ratio compares runs of the same round on "
        "the same prompts. All runs, versions and settings are in results.json."
    )
    commands = []
    for name, arm in results["arms"].items():
        variables = [f"{key}={value}" for key, value in arm["environment"].items()]
        command = shlex.join([*variables, "vllm", *arm["command"][arm["command"].index("serve") :]])
        commands.append(f"{name}: `{command}`")
    report.items(commands)
    cores = results["environment"]["cpu_count"]
    busiest = max(run.get("load_average", 0.0) for run in results["measurements"])
    if busiest > 1.5 * cores and not results["environment"]["gpus"]:
        report.paragraph(
            f"**Other programs were running**: load average up to {busiest:.1f} on {cores} cores. "
            "Times are worth little; measure again on an idle machine."
        )


def _charts(results: Mapping[str, Any]) -> dict[str, bytes]:
    """Bars and points per load; none of a first token or throughput that is not steady."""
    cells = results["cells"]
    lengths = {(cell["input_len"], cell["output_len"]) for cell in cells}
    labels, xlabel = [_load(cell) for cell in cells], "concurrent requests x tokens in:out"
    if len(lengths) == 1:
        labels = [str(cell["concurrency"]) for cell in cells]
        xlabel = "concurrent requests, {} tokens in, {} out".format(*lengths.pop())
    baselines, candidates = _sides(results)
    drawn = {}
    for name, (figure, unit, log) in _PANELS.items():
        series: dict[str, list[float | None]] = {
            arm: [
                cell["arms"][arm]["figures"][figure]
                if figure == _TPOT or cell["arms"][arm]["steady"]
                else None
                for cell in cells
            ]
            for arm in (*baselines, *candidates)
        }
        drawn[name] = charts.groups(labels, series, unit, name, xlabel, log=log)
    return drawn
