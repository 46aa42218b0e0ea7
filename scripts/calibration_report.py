#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Report of a calibrated checkpoint: errors of every layer, plots, perplexity, trend, thresholds.

calibrate.py writes one itself, to OUTPUT/report; this adds what is known later:

  calibration_report.py MODEL-oss-fp8 --quality quality.json
  calibration_report.py MODEL-oss-fp8 --trend trend.json --thresholds thresholds.json

A threshold file holds figures of the report with their limits: {"output_error_max": 0.05,
"perplexity_factor_max": 1.01}. Exit codes: 0 written, 1 a figure is above its threshold, 2 bad
input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.arguments import output_folder
from harness.calibration_report import (
    FOLDER,
    append_trend,
    failures,
    figures_of,
    load_thresholds,
    trend_file,
    write_report,
)
from harness.quality_report import load_quality

from oss_fused.errors import OssFusedError
from oss_fused.quant.record import load_record


def main(argv: list[str] | None = None) -> int:
    """Write the report, keep the trend, check the thresholds."""
    args = parse_args(argv)
    try:
        record = load_record(args.folder)
        quality = load_quality(args.quality) if args.quality else None
        thresholds = load_thresholds(args.thresholds) if args.thresholds else {}
        figures = figures_of(record, quality)
        runs = append_trend(args.trend, record, figures) if args.trend else []
        output = args.output or args.folder / FOLDER
        page = write_report(output, record, quality, runs, thresholds)
    except (OssFusedError, ValueError, KeyError, OSError) as error:
        print(f"calibration_report: {error}", file=sys.stderr)
        return 2
    lines = failures(figures, thresholds)
    print("\n".join([*lines, f"wrote {page}"]), file=sys.stderr)
    return 1 if lines else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="calibrated checkpoint, with calibration.json")
    add("--quality", type=Path, metavar="JSON", help="what scripts/evaluate.py wrote of it")
    add("--trend", type=trend_file, metavar="JSON", help="file that keeps the last 100 runs")
    add("--thresholds", type=Path, metavar="JSON", help="limits; exit code 1 above one")
    add("--output", type=output_folder, metavar="DIR", help=f"default: FOLDER/{FOLDER}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
