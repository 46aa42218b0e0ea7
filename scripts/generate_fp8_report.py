#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write the report on FP8 attention: errors of every form, choice of group, trend, advice.

    python scripts/eval_attention_accuracy.py --fp8 --trend reports/attention_trend.json
    python scripts/generate_fp8_report.py reports/attention_accuracy.json \\
        --trend reports/attention_trend.json --output reports

Writes fp8_report.md with its chart, and fp8_report.html. Exit codes: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import attention_regression
from harness.arguments import Help, content_of, output_folder

from oss_fused.bench.report import Report

_COLUMNS = (
    *("mean_abs", "p50_abs", "p90_abs", "p99_abs", "max_abs"),
    *("clip_ratio", "kl_vs_laplace_like"),
)


def make_report(results: dict[str, Any]) -> Report:
    """The report of an evaluation.

    Raises:
        KeyError: ``results`` is no evaluation.
    """
    report = Report("FP8 attention")
    report.paragraph("Differences from the same formula in float32.")
    rows = [
        (name, *(f"{curve[column]:.3g}" for column in _COLUMNS))
        for name, curve in results["curves"].items()
    ]
    report.table(("form", *_COLUMNS), rows)
    group = results.get("per_group")
    if group:
        report.heading("Group size")
        report.paragraph(
            f"{group['group_size']}: the smallest that clips at most {group['target_clip']:.2%}, "
            "else the largest candidate."
        )
        tried = group["candidates"].items()
        cells = [(size, f"{one['clip_ratio']:.3%}") for size, one in tried]
        report.table(("group size", "clipped"), cells)
    return report


def main(argv: list[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("accuracy", type=Path, help="JSON file of eval_attention_accuracy.py")
    parser.add_argument("--trend", type=Path, help="its trend")
    parser.add_argument("--thresholds", type=Path, help="its limits")
    parser.add_argument("--output", type=output_folder, default=Path("reports"), help="folder")
    args = parser.parse_args(argv)
    if args.thresholds and not args.thresholds.is_file():
        parser.error(f"--thresholds {args.thresholds}: no such file")
    try:
        with content_of("ACCURACY", args.accuracy, "a result of eval_attention_accuracy.py --fp8"):
            report = make_report(json.loads(args.accuracy.read_text()))
        limits = attention_regression.load_limits(args.thresholds, {})
        if args.trend:
            with content_of("--trend", args.trend, "a trend of eval_attention_accuracy.py"):
                runs = attention_regression.load_trend(args.trend)
                if runs:
                    attention_regression.add_trend(report, runs, limits)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    report.write(args.output, "fp8_report", "fp8_report-")
    print(f"written to {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
