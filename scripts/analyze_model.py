#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Say where a model's time goes and which kernels would help; write the comprehensive report.

    python scripts/analyze_model.py smollm2-135m
    python scripts/analyze_model.py gpt-oss:20b --world-size 2
    python scripts/analyze_model.py FOLDER_WITH_CONFIG_JSON --tokens 8192 --batch 32

Weights are not needed: the model runs on meta tensors. Roofs, kernel times, accuracy and history
come from result files; by default those of docs/results. Writes, into --output,
comprehensive_report_<time>.md and .html with their charts, summary.md, and model_graph.json.
Exit codes: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.arguments import Help, content_of, output_folder
from harness.comprehensive_report import Findings, kernel_summary, make_report
from harness.model_graph import NAMED, Phase, load_config, meta_model, phase_graph
from harness.model_report import Analysed, groups
from harness.regression import load_history, read_object

from oss_fused.analysis.graph import ComputationGraphAnalyzer
from oss_fused.bench.roofline import Ceilings
from oss_fused.environment import fingerprint
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"folder with config.json, or: {', '.join(NAMED)}")
    add(
        "--tokens",
        type=int,
        default=2048,
        help="of the prompt, and of the context of decode (%(default)s)",
    )
    add("--batch", type=int, default=8, help="sequences of a decode step (%(default)s)")
    add(
        "--world-size",
        type=int,
        default=2,
        help="ranks, for the communication; the report says which fit the model (%(default)s)",
    )
    suite, accuracy = RESULTS / "h200/library-suite.json", RESULTS / "cpu/smollm2_accuracy.json"
    add("--suite", type=Path, default=suite, help="JSON of bench_library.py: roofs, kernel times")
    add("--accuracy", type=Path, default=accuracy, help="JSON of measure_smollm2.py")
    add("--history", type=Path, default=RESULTS / "h200/history.json", help="JSON of earlier runs")
    add("--output", type=output_folder, default=Path("reports"), help="folder (default: reports)")
    args = parser.parse_args(argv)
    for name in ("tokens", "batch", "world_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    return args


def analyse(args: argparse.Namespace) -> tuple[Findings, ComputationGraphAnalyzer]:
    """Run the model's prefill and decode on meta tensors, and gather the result files."""
    with content_of("--suite", args.suite, "a suite of bench_library.py"):
        suite = read_object(args.suite)
        ceilings = Ceilings(**suite["ceilings"])
        if not min(ceilings.bandwidth_gbps, min(ceilings.tflops.values())) > 0:
            raise ValueError("a roof is not above 0")
        analyzer = ComputationGraphAnalyzer(ceilings, "bfloat16", world_size=args.world_size)
        kernel_summary(Findings(suite).rows)
        make_report("", Findings(suite), analyzer, draw=False)  # fails on another shape
    with content_of("--accuracy", args.accuracy, "a result file of measure_smollm2.py"):
        accuracy = read_object(args.accuracy)
        make_report("", Findings(accuracy=accuracy), analyzer, draw=False)
    with content_of("--history", args.history, "a history of ci_check.py"):
        history = load_history(args.history)
    phases = (
        Phase("prefill", 1, args.tokens, 0),
        Phase("decode", args.batch, 1, args.tokens),
    )
    with content_of("MODEL", args.model, "a config.json of a language model in transformers"):
        config = load_config(args.model)
        model = meta_model(config)
        parts = [Analysed.of(analyzer, one, phase_graph(analyzer, model, one)) for one in phases]
        sizes = {
            "seq_len": args.tokens,
            "hidden_dim": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_layers": config.num_hidden_layers,
        }
        # a model whose heads do not divide is not split this way
        splits = sizes["num_heads"] % args.world_size == 0
        communication = analyzer.analyze_communication_overhead(sizes) if splits else {}
    return Findings(suite, accuracy, history, parts, communication, sizes["num_heads"]), analyzer


def main(argv: list[str] | None = None) -> int:
    """Analyse and write; returns the exit code."""
    args = parse(argv)
    try:
        findings, analyzer = analyse(args)
    except (OssFusedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    name = f"comprehensive_report_{time.strftime('%Y%m%d_%H%M%S')}"
    report = make_report(f"Analysis of {args.model}", findings, analyzer)
    report.write(args.output, name, f"{name}-")
    (args.output / "summary.md").write_text(kernel_summary(findings.rows).markdown())
    graph = {
        part.phase.name: {
            "phase": asdict(part.phase),
            "flops": part.graph.flops,
            "memory": part.graph.memory,
            "groups": [asdict(group) for group in groups(analyzer, part.graph)],
            "kernels": [
                {**asdict(one), "nodes": [node.name for node in one.nodes]} for one in part.advice
            ],
        }
        for part in findings.parts
    }
    document = {"kind": "oss_fused.model_graph", "environment": fingerprint(), "model": args.model}
    write_json(args.output / "model_graph.json", {**document, **graph})
    print(make_report(f"Analysis of {args.model}", findings, analyzer, draw=False).text())
    print(f"written to {args.output / name}.md", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
