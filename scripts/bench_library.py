#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure the library's figures and write them with their environment.

RMSNorm+RoPE against copy bandwidth, eager PyTorch and torch.compile; the steps of
docs/matmul-in-steps.md against cuBLAS; the tuner's gain; the overhead of the Python door; part
"suite" adds the gated MLP and the FP8 GEMM, every backend side by side, with energy.
Writes FOLDER/library.json, the suite's reports FOLDER/library-suite.{json,md,html}, and merges the
figures into FOLDER/summary.json.

    python scripts/bench_library.py --output docs/results/h200 --chapter docs/matmul-in-steps.md
    TRITON_INTERPRET=1 python scripts/bench_library.py --device cpu --rehearse --output /tmp/out

Exit codes: 0 ok, 1 a kernel was wrong or failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from oss_fused.bench.suite import BenchmarkSuite
from oss_fused.errors import OssFusedError
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.figures import (
    chapter_table,
    door_overhead,
    matmul_steps,
    norm_figures,
    tuning_gain,
    write_chapter,
    write_figures,
)

# target -> figure under library.tuning, sizes; matmul is the tutorial's
TUNED: dict[str, tuple[str, tuple[int, ...]]] = {
    "matmul": ("gain", (4096, 4096, 4096)),
    "gated_mlp": ("gated_mlp_gain", (64, 4096, 11264)),
    "rmsnorm_rope": ("rmsnorm_rope_gain", (1, 8192, 4096, 64)),
}
PARTS = ("norm", "suite", "matmul", "tuning", "door")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--targets", nargs="+", choices=TUNED, default=list(TUNED))
    parser.add_argument("--chapter", type=Path, help="page whose measured table to rewrite")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: proves the way only")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device: no GPU here; --device cpu --rehearse needs none")
    if args.rehearse and "tuning" in args.parts and not args.device.startswith("cuda"):
        # hundreds of configs under the interpreter take hours
        args.parts.remove("tuning")
    return args


def measure_suite(suite: BenchmarkSuite, parts: list[str], rehearse: bool) -> dict[str, float]:
    """The parts "norm" and "suite": rows go to ``suite``, the named figures come back."""
    found = {}
    if "norm" in parts:
        hidden = (64, 128) if rehearse else (2048, 4096, 8192)
        found = norm_figures(suite, 8 if rehearse else 8192, hidden)
    if "suite" in parts and rehearse:
        suite.benchmark_gated_mlp((1,), (4,), (64,), (96,))
        suite.benchmark_fp8_gemm([(8, 64, 64)])
    elif "suite" in parts:
        # cuBLAS is the rival here, and compiling around it takes longer than all measurements
        suite.compile_baseline, suite.energy = False, suite.device.type == "cuda"
        suite.benchmark_gated_mlp((64,), (1,), (4096,), (11264,))
        suite.benchmark_fp8_gemm([(4096, 4096, 4096)])
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    args = parse(argv)
    device = torch.device(args.device)
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    tuned: dict[str, int] | None = None
    size, rounds = (8, 1) if args.rehearse else (4096, 5)
    suite = BenchmarkSuite(5, 30, device=device)
    try:
        figures |= measure_suite(suite, args.parts, args.rehearse)
        if "tuning" in args.parts:
            cache = TuningCache(args.output / "tuning_cache.json")
            detail["tuning"] = {}
            for target in args.targets:
                figure, sizes = TUNED[target]
                gain, found_by = tuning_gain(device, target, sizes, cache)
                figures[f"library.tuning.{figure}"] = gain
                detail["tuning"][target] = found_by
            tuned = detail["tuning"].get("matmul", {}).get("config")
        if "matmul" in args.parts:
            # after the tuner: v3 is the tuned step
            found, detail["matmul_ms"] = matmul_steps(device, size, rounds, tuned)
            figures |= found
            if args.chapter:
                write_chapter(
                    args.chapter, chapter_table(detail["matmul_ms"], size, suite.ceilings.device)
                )
        if "door" in args.parts:
            figures |= door_overhead(device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OssFusedError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        # what was measured before a failure is worth keeping
        if figures:
            write_figures(args.output, figures, detail)
        for suffix in (".json", ".md", ".html") if suite.rows else ():
            suite.save_report(args.output / f"library-suite{suffix}")
    for name, value in figures.items():
        print(f"{name}: {value:.4g}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
