# SPDX-License-Identifier: MIT
"""``python -m tests.benchmarks.bench_fp8_gemm``: the function over sizes."""

from __future__ import annotations

import sys

from oss_fused import BenchmarkSuite
from tests.benchmarks.command import run

SIZES = {"sizes": ((1024,) * 3, (4096,) * 3, (8192,) * 3)}
SMALL = {"sizes": ((8, 64, 64),)}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return run("bench_fp8_gemm", BenchmarkSuite.benchmark_fp8_gemm, SIZES, SMALL, argv)


if __name__ == "__main__":
    sys.exit(main())
