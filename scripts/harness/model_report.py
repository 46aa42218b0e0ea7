# SPDX-License-Identifier: MIT
"""The part of a report that is about a model: where its time goes, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.model_graph import Phase
from oss_fused.analysis.advice import KernelAdvice, advise
from oss_fused.analysis.graph import ComputationGraphAnalyzer, Graph
from oss_fused.analysis.trace import GraphNode
from oss_fused.bench import charts
from oss_fused.bench.report import Report

# groups below this share of a phase are drawn as one
_SMALL_SHARE = 0.02
_OTHER = "other"


@dataclass(frozen=True)
class Analysed:
    """A phase, its graph, and what the kernels would save."""

    phase: Phase
    graph: Graph
    advice: list[KernelAdvice]

    @classmethod
    def of(cls, analyzer: ComputationGraphAnalyzer, phase: Phase, graph: Graph) -> Analysed:
        """Ask for advice."""
        return cls(phase, graph, advise(analyzer, graph))


@dataclass(frozen=True)
class Group:
    """Nodes of one type: how many, what they do, and their time at the roofs in seconds."""

    name: str
    nodes: int
    flops: int
    memory: int
    seconds: float


def group_name(node: GraphNode) -> str:
    """Products by their own name (q_proj, experts), other nodes by their class."""
    own = node.name.rpartition(".")[2]
    return own if node.type.endswith(("Linear", "Experts")) else node.type


def groups(analyzer: ComputationGraphAnalyzer, graph: Graph) -> list[Group]:
    """The graph's nodes by name or class, the most time first."""
    found: dict[str, list[GraphNode]] = {}
    for node in graph.nodes:
        found.setdefault(group_name(node), []).append(node)
    made = [
        Group(
            name,
            len(nodes),
            sum(node.flops for node in nodes),
            sum(node.memory for node in nodes),
            sum(analyzer.seconds(node) for node in nodes),
        )
        for name, nodes in found.items()
    ]
    return sorted(made, key=lambda group: -group.seconds)


def add_model(
    report: Report, analyzer: ComputationGraphAnalyzer, parts: Sequence[Analysed], draw: bool
) -> None:
    """Sections on the phases, bottlenecks, communication and kernels."""
    report.heading("Where the time goes")
    roofs = analyzer.ceilings
    peak = roofs.tflops.get(analyzer.dtype, max(roofs.tflops.values()))
    report.paragraph(
        f"Roofs measured on {roofs.device}: {roofs.bandwidth_gbps / 1e3:.2f} TB/s, {peak:.0f} "
        f"TFLOP/s {analyzer.dtype}; a node below {peak * 1e3 / roofs.bandwidth_gbps:.0f} FLOPs per "
        "byte waits for memory. Times are the larger of FLOPs and bytes at their roof: what an "
        "ideal kernel per node would take, not a measurement. FLOPs are those of the model as "
        "written: its attention computes what masks then drop."
    )
    by_phase = {part.phase.name: groups(analyzer, part.graph) for part in parts}
    if draw:
        report.charts(
            {
                "share of time": _shares(by_phase),
                "FLOPs per byte": _intensities(by_phase),
            }
        )
    for part in parts:
        _phase(report, analyzer, part, by_phase[part.phase.name])
    report.heading("Kernels that would help")
    report.paragraph(
        "Before: products at their ideal, anything else operator by operator as the model is "
        "written. After: our kernel at the same roofs. The saving is the most there is to gain."
    )
    for part in parts:
        report.heading(part.phase.name, 3)
        if draw:
            report.charts({f"kernels {part.phase.name}": _savings(part)})
        report.table(
            ("kernel", "nodes", "for example", "before ms", "saved ms", "saved MB", "how"),
            [
                (
                    f"`{one.kernel}`",
                    str(len(one.nodes)),
                    f"`{one.nodes[0].name or 'model'}`",
                    f"{1e3 * one.seconds_before:.3f}",
                    f"{1e3 * one.seconds_saved:.3f}",
                    f"{one.bytes_saved / 1e6:.1f}",
                    one.effect,
                )
                for one in part.advice
            ],
        )


def _phase(
    report: Report, analyzer: ComputationGraphAnalyzer, part: Analysed, made: Sequence[Group]
) -> None:
    phase, graph = part.phase, part.graph
    report.heading(phase.name, 3)
    behind = f" behind {phase.context}" if phase.context else ""
    total = sum(group.seconds for group in made)
    report.paragraph(
        f"{phase.batch} x {phase.tokens} tokens{behind}: {len(graph.nodes)} nodes, "
        f"{graph.flops / 1e12:.3f} TFLOP, {graph.memory / 1e9:.3f} GB, {1e3 * total:.3f} ms at the "
        "roofs."
    )
    report.table(
        ("nodes of", "count", "GFLOP", "MB", "FLOPs per byte", "ms", "share"),
        [
            (
                group.name,
                str(group.nodes),
                f"{group.flops / 1e9:.2f}",
                f"{group.memory / 1e6:.1f}",
                f"{group.flops / max(group.memory, 1):.1f}",
                f"{1e3 * group.seconds:.3f}",
                f"{group.seconds / total:.1%}",
            )
            for group in made
        ],
    )
    analyzer.graph = graph
    found = analyzer.identify_bottlenecks()
    names = {
        "compute_bound": "highest FLOPs per byte, compute-bound",
        "memory_bound": "lowest FLOPs per byte, memory-bound",
        "large_memory": "over 100 MB",
    }
    report.items(
        [
            f"{names[kind]}: {_listed(nodes)}" if nodes else f"{names[kind]}: none"
            for kind, nodes in found.items()
        ]
    )


def _listed(nodes: Sequence[GraphNode]) -> str:
    shown = ", ".join(f"`{node.name or 'model'}` ({node.intensity:.3g})" for node in nodes[:5])
    return shown + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")


def _shares(by_phase: dict[str, list[Group]]) -> bytes:
    totals = {name: sum(g.seconds for g in made) for name, made in by_phase.items()}
    share = {
        name: {g.name: g.seconds / totals[name] for g in made} for name, made in by_phase.items()
    }
    known = dict.fromkeys(g.name for made in by_phase.values() for g in made)
    large = [n for n in known if any(part.get(n, 0.0) >= _SMALL_SHARE for part in share.values())]
    # the palette's greys are for what is left
    large = large[: len(charts.COLOURS) - 2]
    parts = {n: [100 * share[phase].get(n, 0.0) for phase in share] for n in large}
    parts[_OTHER] = [
        100 * sum(v for n, v in share[phase].items() if n not in large) for phase in share
    ]
    colours = dict(zip(parts, charts.COLOURS)) | {_OTHER: "#8a8f98"}
    title = "share of the time at the roofs"
    return charts.stacked_bars(list(by_phase), parts, "share, %", title, colours)


def _intensities(by_phase: dict[str, list[Group]]) -> bytes:
    totals = {name: sum(g.seconds for g in made) for name, made in by_phase.items()}
    names = list(
        dict.fromkeys(
            g.name
            for phase, made in by_phase.items()
            for g in made
            if g.flops and g.seconds >= _SMALL_SHARE / 2 * totals[phase]
        )
    )
    series: dict[str, list[float | None]] = {}
    for phase, made in by_phase.items():
        found = {g.name: g.flops / g.memory for g in made if g.flops and g.memory}
        series[phase] = [found.get(name) for name in names]
    return charts.groups(names, series, "FLOPs per byte", "what a node does per byte", log=True)


def _savings(part: Analysed) -> bytes:
    names = [one.kernel for one in part.advice]
    series: dict[str, list[float | None]] = {
        "as it is": [1e3 * one.seconds_before for one in part.advice],
        "with the kernel": [
            1e3 * (one.seconds_before - one.seconds_saved) or None for one in part.advice
        ],
    }
    return charts.groups(names, series, "ms at the roofs", f"{part.phase.name}: replaced nodes")
