# SPDX-License-Identifier: MIT
"""One report on performance, accuracy, trend and a model, with a summary that leads it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.model_report import Analysed, add_model
from harness.regression_report import trend_chart
from oss_fused.analysis.graph import ComputationGraphAnalyzer
from oss_fused.bench.report import Report
from oss_fused.bench.roofline import Ceilings
from oss_fused.bench.suite import BenchmarkRow
from oss_fused.bench.suite_report import add_operations, winners

OURS = "oss_fused"
# another implementation's time over ours from which on tuning is recommended
_SLOWER = 0.95


@dataclass(frozen=True)
class Findings:
    """What a report draws on; each part may be missing.

    ``suite`` is a result file of BenchmarkSuite, ``accuracy`` one of scripts/evaluate.py, ``runs``
    a history of scripts/ci_check.py, ``communication`` bytes as ``analyze_communication_overhead``
    returns them, empty where the model's attention ``heads`` do not divide among the ranks.
    """

    suite: Mapping[str, Any] = field(default_factory=dict)
    accuracy: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[dict[str, Any]] = ()
    parts: Sequence[Analysed] = ()
    communication: Mapping[str, float] = field(default_factory=dict)
    heads: int = 0

    @property
    def rows(self) -> list[BenchmarkRow]:
        """Rows of the suite."""
        return [BenchmarkRow(**row) for row in self.suite.get("rows", ())]


def make_report(
    title: str, findings: Findings, analyzer: ComputationGraphAnalyzer, draw: bool = True
) -> Report:
    """The comprehensive report: summary, model, performance, accuracy, trend, advice, appendix."""
    report = Report(title)
    rows = findings.rows
    report.heading("Executive summary")
    report.items(summary(findings))
    if findings.parts:
        add_model(report, analyzer, findings.parts, draw)
    _communication(report, findings, analyzer)
    report.heading("Performance")
    if rows:
        add_operations(report, rows, Ceilings(**findings.suite["ceilings"]), draw, level=3)
    report.heading("Accuracy")
    report.table(("kernel", "problem", "largest relative error"), _errors(rows))
    report.table(("text", "model", "perplexity / bf16", "KL divergence"), _texts(findings.accuracy))
    if len(findings.runs) > 1 and draw:
        report.heading("Trend")
        report.charts({"trend": trend_chart(findings.runs)})
    report.heading("Recommendations")
    report.items(recommendations(findings))
    report.heading("Appendix")
    report.table(("setting", "value"), _environment(findings))
    return report


def kernel_summary(rows: Sequence[BenchmarkRow]) -> Report:
    """Performance beside accuracy, a line per kernel and problem."""
    report = Report("Kernels: performance and accuracy")
    header = (
        *("kernel", "problem", "ms", "GFLOP/s", "over the fastest other", "over eager PyTorch"),
        *("of bandwidth", "relative error"),
    )
    report.table(
        header,
        [
            (
                row.operation,
                row.problem,
                _number(row.latency_ms),
                _number(None if row.tflops is None else 1e3 * row.tflops),
                _beside_others(rows, row),
                _number(row.speedup, ".2f"),
                _number(row.bandwidth_utilization, ".0%"),
                _number(row.relative_error, ".2e"),
            )
            for row in _ours(rows)
        ],
    )
    return report


def summary(findings: Findings) -> list[str]:
    """The lines that lead the report."""
    rows = _ours(findings.rows)
    timed = [row for row in rows if row.tflops]
    lines = []
    if timed:
        best = max(timed, key=lambda row: row.tflops or 0.0)
        gflops = 1e3 * (best.tflops or 0.0)
        lines.append(f"best kernel: `{best.operation}` at {best.problem}, {gflops:.0f} GFLOP/s")
    over = [other[1] for row in rows if (other := _fastest_other(findings.rows, row))]
    eager = [row.speedup for row in rows if row.speedup]
    for name, ratios in (("the fastest other implementation", over), ("eager PyTorch", eager)):
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"mean speed-up over {name}: {mean:.2f}x over {len(ratios)} problems")
    shares = [row.bandwidth_utilization for row in rows if row.bandwidth_utilization]
    if shares:
        lines.append(f"memory efficiency: {max(shares):.0%} of copy bandwidth at best")
    errors = [row for row in rows if row.relative_error is not None]
    if errors:
        worst = max(errors, key=lambda row: row.relative_error or 0.0)
        lines.append(f"largest relative error: {worst.relative_error:.2e} (`{worst.operation}`)")
    retention = fp8_retention(findings.accuracy)
    if retention is not None:
        lines.append(f"FP8 retention: {retention:.2%} of bf16's quality (1 / perplexity factor)")
    noisy = [row for row in rows if row.stable is False]
    if rows:
        names = ", ".join(f"`{row.operation}` {row.problem}" for row in noisy)
        lines.append(f"unstable times: {names or 'none'}")
    wrong = [row for row in rows if row.status != "ok"]
    lines += [f"**{row.status}**: `{row.operation}` {row.problem}" for row in wrong]
    for line in recommendations(findings)[:2]:
        lines.append(f"recommended: {line}")
    return lines


def fp8_retention(accuracy: Mapping[str, Any], candidate: str = "w8a8") -> float | None:
    """The smallest bf16 perplexity over FP8 perplexity among the texts; None without any."""
    factors = [
        one["perplexity_factor"]
        for text in accuracy.get("texts", ())
        for one in text["candidates"]
        if one["name"] == candidate
    ]
    return 1 / max(factors) if factors else None


def recommendations(findings: Findings) -> list[str]:
    """What to do, the largest saving first."""
    lines = []
    for part in findings.parts:
        whole = sum(one.seconds_before for one in part.advice)
        for one in part.advice[:3]:
            if whole and one.seconds_saved > 0.05 * whole:
                lines.append(
                    f"{part.phase.name}: `{one.kernel}` for {len(one.nodes)} nodes, up to "
                    f"{1e3 * one.seconds_saved:.3f} ms of {1e3 * whole:.3f} ({one.effect})"
                )
    for row in _ours(findings.rows):
        if row.stable is False:
            lines.append(f"measure `{row.operation}` {row.problem} again: its times are noisy")
        other = _fastest_other(findings.rows, row)
        if other and other[1] < _SLOWER:
            lines.append(f"tune `{row.operation}` at {row.problem}: slower than {other[0]}")
    return lines


def _communication(report: Report, findings: Findings, analyzer: ComputationGraphAnalyzer) -> None:
    ranks = analyzer.world_size
    if not findings.parts or ranks < 2:
        return
    report.heading(f"Communication among {ranks} ranks")
    if not findings.communication:
        heads = findings.heads
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        report.paragraph(
            f"--world-size {ranks}: the model's {heads} attention heads do not divide among "
            f"{ranks} ranks, so nothing is estimated; expected one of {fitting}."
        )
        return
    report.table(
        ("prefill, way", "MB that a rank sends"),
        [(name.replace("_", " "), f"{n / 1e6:.2f}") for name, n in findings.communication.items()],
    )
    rows = []
    for part in findings.parts:
        steps = analyzer.optimize_communication_schedule(part.graph)
        saved = 1e6 * sum(step["estimated_savings"] for step in steps)
        behind = 1e6 * sum(step["next_overlap"] for step in steps)
        rows.append((part.phase.name, str(len(steps)), f"{saved:.1f}", f"{behind:.1f}"))
    report.paragraph(
        f"All-reduces at {analyzer.link_gbps:.0f} GB/s: what can hide behind the product before "
        "them, sent in pieces, and behind later nodes that do not wait for the sum."
    )
    header = ("phase", "all-reduces", "can hide, us", "of it behind later nodes, us")
    report.table(header, rows)


def _ours(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    return [row for row in rows if row.implementation == OURS]


def _fastest_other(rows: Sequence[BenchmarkRow], ours: BenchmarkRow) -> tuple[str, float] | None:
    """Name of the fastest other implementation of a problem, and its time over ``ours``."""
    others = [row for row in rows if row.implementation != OURS]
    fastest = winners(others).get((ours.operation, ours.problem))
    if fastest is None or not fastest.latency_ms or not ours.latency_ms:
        return None
    return fastest.implementation, fastest.latency_ms / ours.latency_ms


def _beside_others(rows: Sequence[BenchmarkRow], ours: BenchmarkRow) -> str:
    other = _fastest_other(rows, ours)
    return f"{other[1]:.2f} ({other[0]})" if other else "-"


def _errors(rows: Sequence[BenchmarkRow]) -> list[tuple[str, ...]]:
    return [
        (row.operation, row.problem, _number(row.relative_error, ".2e"))
        for row in _ours(rows)
        if row.relative_error is not None
    ]


def _texts(accuracy: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            text["text"],
            one["name"],
            f"{one['perplexity_factor']:.4f}",
            _number(one.get("kl_divergence")),
        )
        for text in accuracy.get("texts", ())
        for one in text["candidates"]
    ]


def _environment(findings: Findings) -> list[tuple[str, str]]:
    lines = []
    for source, document in (("kernels", findings.suite), ("accuracy", findings.accuracy)):
        environment = document.get("environment", {})
        for name in ("timestamp", "commit", "gpus", "cpu", "platform", "versions"):
            if environment.get(name):
                lines.append((f"{source}: {name}", _text(environment[name])))
    return lines


def _text(value: Any) -> str:
    """A value of an environment: GPUs by their names, versions one after the other."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items() if version)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(each.get("name", each)) for each in value)
    return str(value)


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
