#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure softmax, LayerNorm, attention and convolution on one NVIDIA GPU; each is checked first.

Softmax and LayerNorm: bytes per second as a share of a copy's, against PyTorch. Attention: TFLOPS
of forward and backward against PyTorch's and, where vLLM has it, FlashAttention 3. --sweep also
times other tiles of attention. Part "teaching" has the kernels of docs/tutorial. Writes the rows as
JSON after each part, merges the figures into summary.json beside it, and prints a table last.

    python scripts/bench_operators.py --output docs/results/h100/operators.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.arguments import output_file, positive

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PARTS = ("rows", "attention", "convolution", "teaching")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    parser.add_argument("--lengths", type=positive, nargs="+", help="of attention (default: all)")
    parser.add_argument("--sweep", action="store_true", help="time other tiles of attention")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure the parts; returns the exit code."""
    args = parse(argv)

    import torch

    if not torch.cuda.is_available():
        print("bench_operators: needs an NVIDIA GPU", file=sys.stderr)
        return 1

    from harness import convolution_cases
    from harness import operator_cases as cases
    from harness.chapters import MEASURED, chapter
    from harness.summary import merge_summary

    from oss_fused.bench.timing import copy_bandwidth
    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json

    lengths = args.lengths or list(cases.LENGTHS)
    bandwidth = copy_bandwidth()
    head = {"kind": "oss_fused.operators", "environment": fingerprint(), "bandwidth": bandwidth}
    modules = (cases, convolution_cases, chapter("12-epilogue-patterns"))
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}

    def attention() -> Iterator[dict[str, Any]]:
        cases.compile_attention(args.sweep)
        yield from cases.attention_rows(lengths)
        if args.sweep:
            yield from cases.sweep_rows()

    def teaching() -> Iterator[dict[str, Any]]:
        for name in MEASURED:
            yield from chapter(name).gpu_rows(bandwidth)

    measure = {
        "attention": attention,
        "rows": lambda: cases.row_operations(bandwidth),
        "convolution": convolution_cases.convolution_rows,
        "teaching": teaching,
    }
    for part in (part for part in measure if part in args.parts):
        rows += measure[part]()
        figures = {name: value for each in modules for name, value in each.figures(rows).items()}
        # a later part that fails, or is cut, loses nothing
        write_json(args.output, head | {"rows": rows, "figures": figures})
    merge_summary(args.output.parent / "summary.json", figures, args.output)
    print(cases.table(rows))
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
