# SPDX-License-Identifier: MIT
"""``python -m tests.benchmarks.bench_gated_mlp``: the function over batches and widths."""

from __future__ import annotations

import sys

from oss_fused import BenchmarkSuite
from tests.benchmarks.command import run

SIZES = {"batch_sizes": (1, 16, 64), "hidden_dims": (4096,)}
SMALL = {"batch_sizes": (2,), "hidden_dims": (64,), "intermediate_dims": (96,)}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return run("bench_gated_mlp", BenchmarkSuite.benchmark_gated_mlp, SIZES, SMALL, argv)


if __name__ == "__main__":
    sys.exit(main())
