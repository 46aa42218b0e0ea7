#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Count hardware events of a program's kernels with Nsight Compute, and name their bottlenecks.

    python scripts/count_hardware.py --kernel '_gemm.*' --output counters.json -- python program.py

Registers per thread, occupancy, L2 hits, DRAM bandwidth, and classes: uncoalesced access,
registers, L2, bank conflicts, arithmetic pipeline. Without ncu, or where it may not count, it says
so. Exit codes: 0 counted, 1 nothing could be counted, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.arguments import output_file

from oss_fused.bench.counters import REMEDIES, count
from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.errors import BackendUnavailableError
from oss_fused.files import write_json

_SHOWN = {
    "registers_per_thread": "registers",
    "occupancy": "occupancy %",
    "l2_hit_rate": "L2 hits %",
    "dram_throughput": "DRAM %",
}


def main(argv: list[str] | None = None) -> int:
    """Count, write and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", default="", help="regular expression of kernel names")
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="program and arguments")
    args = parser.parse_args(argv)
    try:
        launches = count(args.command, args.kernel)
    except BackendUnavailableError as error:
        print(f"count_hardware: {error}", file=sys.stderr)
        return 1
    rows = []
    for one in launches:
        found = one.bottlenecks()
        cells = [f"{one.values[name]:g}" if name in one.values else "-" for name in _SHOWN]
        classes = ", ".join(kind.value for kind in found) or "none of the classes"
        rows.append([one.kernel, *cells, classes])
    print(text_table(("kernel", *_SHOWN.values(), "held up by"), rows))
    for kind in dict.fromkeys(kind for one in launches for kind in one.bottlenecks()):
        print(f"{kind.value}: {REMEDIES[kind]}")
    if args.output:
        listed = [
            {
                "kernel": one.kernel,
                "counters": one.values,
                "bottlenecks": [kind.value for kind in one.bottlenecks()],
            }
            for one in launches
        ]
        document = {"kind": "oss_fused.counters", "environment": fingerprint()}
        write_json(args.output, {**document, "launches": listed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
