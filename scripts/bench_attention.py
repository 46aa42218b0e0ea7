#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure decode attention against FlashAttention 3 on one NVIDIA GPU: microseconds per layer.

Each case is checked against FlashAttention's output, then both are timed in turn, in CUDA-graph
replays over caches beyond L2. --queries is the number of tokens per sequence: 1, or 1 and the
drafts that a step verifies. --sweep also times every launch worth trying, to find the rule in
kernels/attention/launches.py. The lowest ratio of single tokens is merged into summary.json beside
the output.

    python scripts/bench_attention.py --output docs/results/h200/attention.json
    python scripts/bench_attention.py --queries 4 8 --output docs/results/h200/attention_drafts.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from harness.arguments import Help, output_file, positive

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BATCHES, CONTEXTS = (1, 8, 32, 128), (128, 1024, 4096, 8192, 32768)


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--batches", type=positive, nargs="+", default=list(BATCHES), help="sequences"
    )
    parser.add_argument(
        "--contexts",
        type=positive,
        nargs="+",
        default=list(CONTEXTS),
        help="tokens that are cached",
    )
    parser.add_argument(
        "--queries", type=positive, nargs="+", default=[1], help="tokens per sequence"
    )
    parser.add_argument("--shapes", nargs="+", help="names to measure (default: all)")
    parser.add_argument("--sweep", action="store_true", help="time other launches as well")
    args = parser.parse_args()

    import torch
    from harness.attention_cases import MAX_POSITIONS, SHAPES, Case, make_pool

    names = [shape.name for shape in SHAPES]
    unknown = [name for name in args.shapes or () if name not in names]
    if unknown:
        parser.error(f"--shapes {' '.join(unknown)}: expected some of {' '.join(names)}")
    loads = [
        (shape, context, batch, queries)
        for shape in SHAPES
        if shape.name in (args.shapes or names)
        for context, batch, queries in itertools.product(args.contexts, args.batches, args.queries)
        # beyond its window a layer sees nothing
        if batch * context <= MAX_POSITIONS and context <= (8 * shape.window or context)
    ]
    if not loads:
        parser.error(
            f"--batches, --contexts: expected a product of at most {MAX_POSITIONS}, and contexts "
            "of at most 8 windows of a shape"
        )
    if not torch.cuda.is_available():
        print("bench_attention: needs an NVIDIA GPU", file=sys.stderr)
        return 1

    from harness.summary import merge_summary

    from oss_fused.bench.timing import copy_bandwidth
    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json

    bandwidth = copy_bandwidth()
    largest = max(shape.position_bytes for shape in SHAPES)
    pool = make_pool(torch.device("cuda"), MAX_POSITIONS * largest)
    rows: list[dict[str, Any]] = []
    head = {"kind": "oss_fused.attention", "environment": fingerprint(), "bandwidth": bandwidth}
    for shape, context, batch, queries in loads:
        case = Case(shape, batch, context, pool, queries)
        rows.append(measure(case, bandwidth, args.sweep))
        print(line(rows[-1]), flush=True)
        # a run that is cut keeps what it has
        write_json(args.output, head | {"rows": rows, "figures": figures(rows)})
    merge_summary(args.output.parent / "summary.json", figures(rows), args.output)
    return 0


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The lowest ratio to FlashAttention 3 over rows of one token per sequence; {} without any."""
    ratios = [
        row["flash_us"] / row["native_us"]
        for row in rows
        if row.get("queries", 1) == 1 and "flash_us" in row
    ]
    return {"attention.vs_fa3_min": round(min(ratios), 4)} if ratios else {}


def measure(case: Any, bandwidth: float, sweep: bool) -> dict[str, Any]:
    """Times of one case in microseconds, and the difference of the results."""
    from harness.attention_cases import REPLAYS, candidates, time_case

    from oss_fused.bench.accuracy import measure_error
    from oss_fused.bench.timing import time_graphs
    from oss_fused.kernels.attention import triton as attention_decode

    row: dict[str, Any] = {
        "shape": case.shape.name,
        "batch": case.batch,
        "context": case.context,
        "queries": case.queries,
        "ideal_us": case.ideal_bytes / bandwidth * 1e6,
        "launch": case.launch()._asdict(),
    }
    contestants = {"native": case.native()}
    contestants["native"][0]()
    native = case.out.clone()
    try:
        flash = case.flash()
        flash[0]()
        row["relative_l2"] = measure_error(native, case.out).relative_l2
        contestants["flash"] = flash
    except Exception as failure:
        row["flash_error"] = f"{type(failure).__name__}: {failure}"[:300]
    times = time_graphs(contestants, REPLAYS)
    row |= {f"{name}_us": times[name].median for name in contestants}
    if sweep:
        tried = {}
        for launch in candidates(case):
            chosen = mock.patch.object(
                attention_decode, "launch_for", lambda *_, launch=launch: launch
            )
            # stream.py, which takes the largest batches, has no such launch
            present = mock.patch.object(attention_decode, "_streams", lambda *_: False)
            with chosen, present:
                tried["/".join(map(str, launch))] = round(time_case(case.native()), 2)
        row["sweep"] = dict(sorted(tried.items(), key=lambda item: item[1]))
    return row


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    flash = row.get("flash_us")
    text = f"{row['shape']:<18} b{row['batch']:<4} ctx {row['context']:<6} q{row['queries']}"
    text += f" ideal {row['ideal_us']:7.1f}  native {row['native_us']:7.1f}"
    if flash:
        text += f"  FA3 {flash:7.1f}  ratio {flash / row['native_us']:5.2f}"
        text += f"  differs {row['relative_l2']:.1e}"
    else:
        text += f"  {row.get('flash_error', '')[:90]}"
    if "sweep" in row:
        text += "  best " + ", ".join(f"{k} {v}" for k, v in list(row["sweep"].items())[:4])
    return text


if __name__ == "__main__":
    sys.exit(main())
