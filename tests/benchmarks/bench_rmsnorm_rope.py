# SPDX-License-Identifier: MIT
"""``python -m tests.benchmarks.bench_rmsnorm_rope``: the function over lengths and hidden sizes."""

from __future__ import annotations

import sys

from oss_fused import BenchmarkSuite
from tests.benchmarks.command import run

SIZES = {"seq_lens": (1024, 8192), "hidden_dims": (2048, 4096, 8192)}
SMALL = {"seq_lens": (16,), "hidden_dims": (256,)}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return run("bench_rmsnorm_rope", BenchmarkSuite.benchmark_rmsnorm_rope, SIZES, SMALL, argv)


if __name__ == "__main__":
    sys.exit(main())
