# SPDX-License-Identifier: MIT
"""Markdown report and PNG chart of a comparison (the JSON that scripts/compare.py writes)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.folder import atomic_folder
from harness.summary import split
from oss_fused.environment import describe, portable
from oss_fused.files import write_json

_LATENCIES = ("ttft", "tpot", "itl")
_COLOURS = ("#8a8f98", "#1f77b4", "#d9772b", "#2ca02c", "#9467bd")


def write_folder(results: Mapping[str, Any], output: Path, logs: Path) -> None:
    """Write results.json, report.md, chart.png and server-logs.txt: all of them or none.

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
    """Write report.md and, where all arms had a load, chart.png into ``folder``."""
    chart = "chart.png" if results["cells"] else None
    (folder / "report.md").write_text(markdown(results, chart))
    if chart:
        draw_chart(results, folder / chart)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(results: Mapping[str, Any], chart: str | None = "chart.png") -> str:
    """The report.

    Args:
        results: the comparison, "cells" included (see summary.condense).
        chart: file name of the chart, None if there is none.
    """
    arms = list(results["arms"])
    parts = [
        f"# {' and '.join(arms[1:])} compared with {arms[0]}" if arms[1:] else f"# {arms[0]}",
        f"{describe(results['environment'])}.",
        _verdict(results),
    ]
    if "stopped" in results:
        parts.append(_failure(results))
    if chart:
        parts.append(f"![throughput, latency and ratio per load]({chart})")
    parts += ["## Throughput", _throughput(results), "## Latency", _latency(results)]
    parts += ["## Memory and start-up", _memory(results)]
    if results.get("quality"):
        parts += ["## Quality", quality_table(results["quality"])]
    parts += ["## Answers", _answers(results), "## How it was measured", _method(results)]
    return "\n\n".join(parts) + "\n"


def quality_table(quality: Mapping[str, Any]) -> str:
    """Table of the JSON that scripts/evaluate.py writes."""
    rows = []
    for text in quality["texts"]:
        name, base = Path(text["text"]).name, text["baseline"]
        rows.append([name, base["name"], f"{base['perplexity']:.3f}", "1", "", "", ""])
        rows += [
            [
                name,
                arm["name"],
                f"{arm['perplexity']:.3f}",
                f"{arm['perplexity_factor']:.4f}",
                f"{arm['kl_divergence']:.4f}",
                f"{arm['kl_divergence_p99']:.3f}",
                f"{arm['top1_agreement']:.1%}",
            ]
            for arm in text["candidates"]
        ]
    header = ["text", "model", "perplexity", "factor", "KL (nats)", "KL p99", "same top token"]
    tokens = ", ".join(f"{t['tokens']} tokens of {Path(t['text']).name}" for t in quality["texts"])
    task = quality["task"]
    note = (
        f"{tokens}, in windows of {task['window']}; KL of the baseline from the model over the "
        f"{task['top']} likeliest tokens, the others taken as one."
    )
    parts = [table(header, rows), note]
    if quality.get("needles"):
        lengths = list(quality["needles"][0]["by_length"])
        found = [
            [row["name"], *(f"{row['by_length'][length]:.0%}" for length in lengths)]
            for row in quality["needles"]
        ]
        parts.append(table(["pass key found in", *(f"{n} tokens" for n in lengths)], found))
    if quality.get("lm_eval"):
        scores = [
            [row["name"], task, metric, f"{value:.4f}"]
            for row in quality["lm_eval"]
            for task, metrics in row["tasks"].items()
            for metric, value in metrics.items()
        ]
        parts.append(table(["model", "lm-eval task", "metric", "score"], scores))
    return "\n\n".join(parts)


def _load(cell: Mapping[str, Any]) -> str:
    return f"{cell['concurrency']} x {cell['input_len']}:{cell['output_len']}"


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


def _verdict(results: Mapping[str, Any]) -> str:
    baseline, *candidates = results["arms"]
    if not candidates:
        return "One arm: nothing to compare with."
    if not results["cells"]:
        return "No load was measured with all arms: there is nothing to compare."
    lines = []
    for name in candidates:
        ratios = []
        for cell in results["cells"]:
            ratio = cell["arms"][name]["ratios"]["output_throughput"]["median"]
            ratios.append(f"**{ratio:.2f}x** for {_load(cell)}")
        lines.append(f"- {name} against {baseline}, output tokens/s: {', '.join(ratios)}.")
    lines += ["", "A load is written as requests at once x tokens in:out."]
    return "\n".join(lines)


def _failure(results: Mapping[str, Any]) -> str:
    """What ended the comparison before its time, and what only some of the arms measured."""
    cause = " ".join(str(results.get("failure") or "").splitlines()[:1])
    parts = [f"**Stopped early: {results['stopped']}{f': {cause}' if cause else ''}.**"]
    _, single = split(results["measurements"], results.get("planned_arms", len(results["arms"])))
    if single:
        rows = [
            [
                _load(row),
                row["arm"],
                str(row["round"] + 1),
                f"{row['figures']['output_throughput']:.1f}",
                f"{row['figures']['p50_ttft_ms']:.1f}",
                f"{row['figures']['p50_tpot_ms']:.1f}",
            ]
            for row in single
        ]
        header = ["load", "arm", "round", "output tok/s", "TTFT p50, ms", "TPOT p50, ms"]
        parts += ["Measured before that, but not with all arms:", table(header, rows)]
    return "\n\n".join(parts)


def _throughput(results: Mapping[str, Any]) -> str:
    rows = []
    for cell in results["cells"]:
        for name, arm in cell["arms"].items():
            figures, ratios = arm["figures"], arm["ratios"]
            ratio = _ratio(ratios["output_throughput"]) if ratios else "1"
            rows.append(
                [
                    _load(cell),
                    name,
                    f"{figures['output_throughput']:.1f}",
                    f"{figures['total_token_throughput']:.1f}",
                    f"{figures['request_throughput']:.2f}",
                    ratio,
                ]
            )
    header = ["load", "arm", "output tok/s", "all tok/s", "requests/s"]
    return table([*header, "ratio (lowest to highest)"], rows)


def _latency(results: Mapping[str, Any]) -> str:
    rows = []
    for cell in results["cells"]:
        for name, arm in cell["arms"].items():
            figures = arm["figures"]
            row = [_load(cell), name]
            for metric in _LATENCIES:
                values = [figures[f"p{p}_{metric}_ms"] for p in (50, 95, 99)]
                row.append(" / ".join(f"{value:.1f}" for value in values))
            ratio = arm["ratios"].get("p50_tpot_ms")
            rows.append([*row, _ratio(ratio) if ratio else "1"])
    header = ["load", "arm", "TTFT", "TPOT", "ITL", "TPOT ratio"]
    return table(header, rows) + "\n\nMilliseconds: p50 / p95 / p99, the median over all runs."


def _memory(results: Mapping[str, Any]) -> str:
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
    header = ["arm", "checkpoint GiB", "weights in memory GiB", "KV cache GiB", "KV cache tokens"]
    header.append("start-up s")
    # vLLM reports no weight memory on a CPU
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return table([header[i] for i in filled], [[row[i] for i in filled] for row in rows])


def _answers(results: Mapping[str, Any]) -> str:
    lines = []
    for name, arm in results["arms"].items():
        if "chat" not in arm:
            lines.append(f"- {name}: was not asked")
            continue
        chat = arm["chat"]
        answer = " ".join(chat["answer"].split())[:200].replace("`", "'")
        lines.append(f"- {name} ({chat['endpoint']}), {chat['question']!r}: `{answer}`")
        if "chat_error" in chat:
            lines.append(f"  - chat was refused: {chat['chat_error'][:200]}")
    return "\n".join(lines)


def _method(results: Mapping[str, Any]) -> str:
    settings = results["settings"]
    order = (
        "all servers up at once, every load put on each in turn"
        if settings["together"]
        else "one server at a time, arms alternating"
    )
    lines = [
        f"`vllm bench serve`, random prompts, fixed lengths, greedy; {settings['rounds']} round(s) "
    ]
    lines[0] += (
        f"of {settings['repeats']} repeat(s), {order}. A ratio compares runs of the same round on "
        "the same prompts. All runs, versions and settings are in results.json.\n"
    )
    for name, arm in results["arms"].items():
        variables = [f"{key}={value}" for key, value in arm["environment"].items()]
        command = shlex.join([*variables, "vllm", *arm["command"][arm["command"].index("serve") :]])
        lines.append(f"- {name}: `{command}`")
    return "\n".join(lines + _warnings(results))


def _warnings(results: Mapping[str, Any]) -> list[str]:
    """What makes the figures doubtful."""
    cores = results["environment"]["cpu_count"]
    busiest = max(run.get("load_average", 0.0) for run in results["measurements"])
    if busiest <= 1.5 * cores or results["environment"]["gpus"]:
        return []
    warning = f"Other programs were running: load average up to {busiest:.1f} on {cores} cores. "
    return [f"\n{warning}Times are worth little; measure again on an idle machine."]


def draw_chart(results: Mapping[str, Any], path: Path) -> None:
    """Draw output tok/s, TTFT, TPOT (bars) and the ratio with its spread, per load, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms, cells = list(results["arms"]), results["cells"]
    labels = [f"{c['concurrency']}\n{c['input_len']}:{c['output_len']}" for c in cells]
    figure, axes = plt.subplots(1, 4, figsize=(max(13.0, 4 + 2.2 * len(cells)), 4.2))
    width = 0.8 / len(arms)
    panels = (
        ("output_throughput", "output tokens/s (higher is better)"),
        ("p50_ttft_ms", "time to first token, ms, p50"),
        ("p50_tpot_ms", "time per output token, ms, p50"),
    )
    for axis, (name, title) in zip(axes, panels):
        for number, arm in enumerate(arms):
            at = [i + (number - (len(arms) - 1) / 2) * width for i in range(len(cells))]
            values = [cell["arms"][arm]["figures"][name] for cell in cells]
            axis.bar(at, values, width, label=arm, color=_COLOURS[number % len(_COLOURS)])
        axis.set_title(title, fontsize=10)
    for number, arm in enumerate(arms[1:], 1):
        ratios = [cell["arms"][arm]["ratios"]["output_throughput"] for cell in cells]
        middle = [ratio["median"] for ratio in ratios]
        below = [ratio["median"] - ratio["min"] for ratio in ratios]
        above = [ratio["max"] - ratio["median"] for ratio in ratios]
        colour = _COLOURS[number % len(_COLOURS)]
        at = [i + (number - len(arms) / 2) * 0.1 for i in range(len(cells))]
        axes[3].errorbar(at, middle, [below, above], fmt="o", capsize=4, color=colour)
    axes[3].axhline(1.0, color=_COLOURS[0], linewidth=1)
    axes[3].set_title(f"output tokens/s over {arms[0]}", fontsize=10)
    for axis in axes:
        axis.set_xticks(range(len(cells)), labels)
        axis.set_xlabel("requests at once, in:out", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[3].set_xlim(-0.5, len(cells) - 0.5)
    axes[0].legend(frameon=False)
    figure.suptitle(describe(results["environment"]), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png", metadata={"Software": "oss_fused"})
    plt.close(figure)
