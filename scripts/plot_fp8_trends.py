#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draw the trend that eval_attention_accuracy.py keeps: p99, clip ratio and KL, run by run.

python scripts/plot_fp8_trends.py reports/attention_trend.json --output reports/fp8_trends.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.arguments import output_file
from harness.attention_regression import load_trend, trend_chart


def main(argv: list[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trend", type=Path, help="JSON file of eval_attention_accuracy.py --trend")
    output = Path("reports/fp8_trends.png")
    parser.add_argument("--output", type=output_file, default=output, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        runs = load_trend(args.trend)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(trend_chart(runs))
    print(f"{len(runs)} runs drawn to {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
