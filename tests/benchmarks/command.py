# SPDX-License-Identifier: MIT
"""What the benchmark modules share: sizes for this machine, and the printed report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from oss_fused import BenchmarkSuite


def run(
    name: str,
    benchmark: Callable[..., Any],
    sizes: dict[str, Any],
    small: dict[str, Any],
    argv: list[str] | None = None,
) -> int:
    """Run ``benchmark(suite, **sizes)`` and print its report; small sizes without a GPU."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small sizes; always on a CPU")
    parser.add_argument("--output", help="report to write: .json, .md, .html or .txt")
    args = parser.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    suite = BenchmarkSuite(10, 100 if on_gpu else 20, device=args.device)
    benchmark(suite, **(sizes if on_gpu and not args.small else small))
    print(suite.generate_report())
    if args.output:
        suite.save_report(args.output)
    return 0 if all(row.status == "ok" for row in suite.rows) else 1
