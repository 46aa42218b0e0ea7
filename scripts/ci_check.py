#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fail when a benchmark row is slower, wrong or missing.

Without --results, small problems of the reference path are measured on this machine: times over
those of plain PyTorch in the same process, and the errors of FP8. With it, a result file of
BenchmarkSuite is checked. The bars are either a threshold file or an earlier result
file. Exit codes: 0 all rows hold, 1 a row fails, 2 bad input.

    python scripts/ci_check.py --thresholds docs/results/cpu/thresholds.json --adapt
    python scripts/ci_check.py --results new.json --baseline old.json --markdown verdict.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness.arguments import output_file
from harness.regression import (
    Thresholds,
    append_history,
    compare_results,
    load_history,
    load_results,
)
from harness.regression_report import make_report, trend_chart


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bars = parser.add_mutually_exclusive_group(required=True)
    bars.add_argument("--thresholds", type=Path, help="JSON file with the bar of each row")
    bars.add_argument("--baseline", type=Path, help="earlier result file to compare with")
    parser.add_argument("--results", type=Path, help="result file to check (default: measure)")
    parser.add_argument("--adapt", action="store_true", help="write better times back as bars")
    parser.add_argument(
        "--history", type=output_file, help="JSON file that keeps the last 100 runs"
    )
    parser.add_argument("--plot", type=output_file, help="PNG of the trend; needs --history")
    parser.add_argument("--markdown", type=output_file, help="write the table as Markdown")
    args = parser.parse_args(argv)
    if args.plot and not args.history:
        parser.error("--plot: needs --history")
    if args.adapt and not args.thresholds:
        parser.error("--adapt: needs --thresholds")
    if args.thresholds and not args.adapt and not args.thresholds.is_file():
        parser.error(f"--thresholds {args.thresholds}: no such file; --adapt makes it")
    return args


def measure() -> dict[str, Any]:
    """Results of small problems on the CPU's reference path: times, and what FP8 loses."""
    from harness import attention_accuracy, paired_times

    from oss_fused.environment import fingerprint

    problem = attention_accuracy.Problem(1, 2, 96, 32, 32, 0.1, torch.bfloat16)
    curves = attention_accuracy.evaluate(problem, torch.device("cpu"), True, 0.01, [8, 16, 32])
    rows = paired_times.measure()
    for name in ("fp8_per_channel", "fp8_group"):
        error = curves["curves"][name]["mean_abs"]
        row = {"operation": "attention", "problem": "1x2x96x32", "implementation": name}
        rows.append({**row, "status": "ok", "error": error})
    return {"format": 1, "environment": fingerprint(), "rows": rows}


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    args = parse(argv)
    try:
        if args.history and args.history.exists():
            load_history(args.history)  # said before the work: whether a run can be added
        results = load_results(args.results) if args.results else measure()
        if args.thresholds:
            thresholds = Thresholds(args.thresholds)
            rows = thresholds.check(results)
        else:
            rows = compare_results(load_results(args.baseline), results)
        runs = append_history(args.history, results) if args.history else []
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = make_report(rows)
    print(report.text(), file=sys.stderr, end="")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(report.markdown())
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_bytes(trend_chart(runs))
    failed = any(row.verdict.fails for row in rows)
    if args.adapt and not failed:
        changed = thresholds.adapt(results)
        thresholds.save()
        print(f"{changed} bars written to {args.thresholds}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
