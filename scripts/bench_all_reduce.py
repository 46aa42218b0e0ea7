#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Sums over tensor-parallel ranks: vLLM's all-reduce and this package's, in turn.

Each rank is a process with a GPU of this machine, as under `vllm serve --tensor-parallel-size N`.
The sums of a size follow one another, up to 8 MiB in a CUDA graph. Both contestants run in turn.

  bench_all_reduce.py --output docs/results/h200x2/all_reduce.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.arguments import Help, output_file, positive, summary_file

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.files import write_json

# columns whose figures have no word about them in their names
HIDDEN = 2880


def main() -> int:
    """Measure, write JSON, print a table; returns the exit code."""
    args = _parse()
    import torch
    from harness.all_reduce import measure

    if torch.cuda.device_count() < args.ranks:
        print(
            f"error: --ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs; "
            f"expected one for each rank",
            file=sys.stderr,
        )
        return 2
    try:
        rows = measure(args.ranks, args.tokens, args.hidden)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    named = figures(rows, args.ranks, args.hidden)
    head = {"kind": "oss_fused.bench_all_reduce", "environment": fingerprint()}
    shape = {"ranks": args.ranks, "hidden": args.hidden, "dtype": "bfloat16"}
    write_json(args.output, {**head, **shape, "rows": rows, "figures": named})
    if args.summary:
        from harness.summary import merge_summary

        merge_summary(args.summary, named, args.output)
    header = ("tokens", "bytes", "vllm, us", "oss_fused, us", "ratio", "same bits")
    cells = [[str(value) for value in row.values()] for row in rows]
    print(text_table(header, cells))
    # more than two ranks may add in another order
    return 0 if all(row["same_bits"] for row in rows) or args.ranks > 2 else 1


def figures(rows: Sequence[Mapping[str, Any]], ranks: int, hidden: int) -> dict[str, float]:
    """Ratios by their names in summary.json, which tell other columns than gpt-oss's."""
    prefix = f"all_reduce.ranks{ranks}" + ("" if hidden == HIDDEN else f".h{hidden}")
    return {f"{prefix}.speedup_{row['tokens']}": row["ratio"] for row in rows}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=output_file, required=True, help="JSON file to write")
    add("--summary", type=summary_file, help="summary.json to merge the ratios into")
    add("--ranks", type=positive, default=2, help="processes, each with a GPU")
    add("--hidden", type=positive, default=HIDDEN, help="columns of the tensor")
    tokens = [1, 8, 32, 128, 256, 1024, 8192]
    add("--tokens", type=positive, nargs="+", default=tokens, help="rows of the tensor")
    args = parser.parse_args()
    if args.ranks not in (2, 4, 6, 8):
        parser.error(f"--ranks {args.ranks}: expected 2, 4, 6 or 8")
    if args.hidden % 8:
        parser.error(f"--hidden {args.hidden}: expected a multiple of 8")
    return args


if __name__ == "__main__":
    sys.exit(main())
