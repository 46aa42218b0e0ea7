#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compare predicted and measured orders of memory access patterns on this machine.

    python scripts/measure_layouts.py --output docs/results/cpu/layout_order.json \\
        --summary docs/results/h200/summary.json

Writes every pattern with its prediction and its times, and every pair that differs in time. The
figure is the share of those pairs whose order was predicted. A minute on a CPU, 700 MB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness import layout_order
from harness.arguments import Help, output_file, summary_file
from harness.summary import merge_summary

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.kernels.checks import check_device


def main(argv: list[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--summary", type=summary_file, help="summary.json to merge the figure into"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--count", type=int, default=2**22, help="accesses of a pattern")
    parser.add_argument("--repeats", type=int, default=20, help="timed reads of a pattern")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = layout_order.measure(check_device(args.device), args.count, args.repeats)
        pairs = layout_order.orders(rows)
        share = layout_order.agreement(pairs)
    except (OssFusedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)
    figures = {"analysis.layout_order_agreement": round(share, 4)}
    environment = {"kind": "oss_fused.layout_order", "environment": fingerprint()}
    write_json(args.output, {**environment, "rows": rows, "pairs": pairs, "figures": figures})
    if args.summary:
        merge_summary(args.summary, figures, args.output)
    header = ("family", "pattern", "type", "line use", "predicted traffic", "ns per access")
    cells = [
        (
            row["family"],
            row["pattern"],
            row["predicted"]["pattern_type"],
            f"{row['predicted']['cache_utilization']:.0%}",
            f"{row['predicted']['traffic']:.2f}",
            f"{row['ns_per_access']:.2f}",
        )
        for row in rows
    ]
    print(text_table(header, cells))
    for pair in pairs:
        if not pair["agrees"]:
            names = " and ".join(pair["pair"])
            print(f"{pair['family']}, {names}: slower is {pair['slower']}, not predicted")
    print(f"orders predicted: {share:.1%} of {len(pairs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
