#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compare the predicted communication volume with bytes that gloo's collectives really send.

    python scripts/measure_communication.py --output docs/results/cpu/communication_bytes.json \\
        --summary docs/results/h200/summary.json

Processes on this machine run all-reduce, all-gather and the sends of a pipeline over TCP; the
kernel's counters of their sockets are read before and after. The figure is the largest relative
error. Reduce-scatter is listed only: gloo runs it as an all-reduce, with twice the ring's bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import collective_bytes
from harness.arguments import Help, output_file, positive, summary_file
from harness.summary import merge_summary

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.files import write_json


def main(argv: list[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--summary", type=summary_file, help="summary.json to merge the figure into"
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="processes")
    sizes = [2**20, 2**24]
    parser.add_argument(
        "--bytes", type=positive, nargs="+", default=sizes, dest="sizes", help="of a message"
    )
    args = parser.parse_args(argv)
    if min(args.ranks) < 2:
        parser.error(f"--ranks {min(args.ranks)}: expected at least 2, as one sends nothing")
    for ranks in args.ranks:
        uneven = [size for size in args.sizes if size % (4 * ranks)]
        if uneven:
            parser.error(f"--bytes {uneven[0]}: expected a multiple of {4 * ranks}, {ranks} ranks'")
    try:
        rows = [r for ranks in args.ranks for r in collective_bytes.measure(ranks, args.sizes)]
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    checked = [row for row in rows if row["collective"] in collective_bytes.COLLECTIVES]
    largest = max(row["relative_error"] for row in checked)
    figures = {"analysis.comm_bytes_error_max": round(largest, 6)}
    environment = {"kind": "oss_fused.communication_bytes", "environment": fingerprint()}
    write_json(args.output, {**environment, "rows": rows, "figures": figures})
    if args.summary:
        merge_summary(args.summary, figures, args.output)
    header = ("collective", "ranks", "bytes", "sent per rank", "predicted", "error")
    cells = [
        (
            row["collective"],
            str(row["ranks"]),
            str(row["bytes"]),
            f"{sum(row['sent_per_rank']) / row['ranks']:.0f}",
            f"{row['predicted_per_rank']:.0f}",
            f"{row['relative_error']:.3%}",
        )
        for row in rows
    ]
    print(text_table(header, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
