#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure the library's figures and write them with their environment.

RMSNorm+RoPE against copy bandwidth, eager PyTorch and torch.compile; the steps of
docs/tutorial/06-matmul.py against cuBLAS; the tuner's gain; the host overhead of a public function;
part "backends" adds the gated MLP and the FP8 GEMM, every backend side by side, with energy.
Writes FOLDER/library.json, the suite's reports FOLDER/library-suite.{json,md,html}, and merges the
figures into FOLDER/summary.json.

    python scripts/bench_library.py --output docs/results/h200
    python scripts/bench_library.py --output docs/results/h200 --render     # reports of saved rows
    TRITON_INTERPRET=1 python scripts/bench_library.py --device cpu --rehearse --output /tmp/out

Exit codes: 0 ok, 1 a result was wrong or a kernel of this package failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness.arguments import Help, output_folder
from harness.tuning_figures import (
    host_overhead,
    matmul_steps,
    norm_figures,
    tuning_gain,
    write_figures,
)

from oss_fused.bench.roofline import Ceilings
from oss_fused.bench.suite import BenchmarkRow, BenchmarkSuite
from oss_fused.bench.suite_report import make_report
from oss_fused.errors import OssFusedError
from oss_fused.tuning.cache import TuningCache

# target -> figure under library.tuning, sizes; matmul is the tutorial's
TUNED: dict[str, tuple[str, tuple[int, ...]]] = {
    "matmul": ("gain", (4096, 4096, 4096)),
    "gated_mlp": ("gated_mlp_gain", (64, 4096, 11264)),
    "rmsnorm_rope": ("rmsnorm_rope_gain", (1, 8192, 4096, 64)),
}
# in order: v3 of the matrix product uses the config that tuning found
PARTS = ("overhead", "norm", "tuning", "matmul", "backends")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--output", type=output_folder, required=True, help="folder of the JSON files"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    parser.add_argument(
        "--targets", nargs="+", choices=TUNED, default=list(TUNED), help="of part tuning"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: redo the suite's reports"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: proves the way only")
    args = parser.parse_args(argv)
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: expected cpu, cuda or cuda:N")
    saved = args.output / "library-suite.json"
    if args.render and not saved.is_file():
        parser.error(f"--render: no file {saved}; expected --output of an earlier run")
    if args.device.startswith("cuda") and not args.render and not torch.cuda.is_available():
        parser.error("--device: no GPU here; --device cpu --rehearse needs none")
    if args.rehearse and "tuning" in args.parts and not args.device.startswith("cuda"):
        # hundreds of configs under the interpreter take hours
        args.parts.remove("tuning")
    # summary-sources.json may name these files for figures that this run does not measure
    whole = set(args.parts) == set(PARTS) and set(args.targets) == set(TUNED)
    if not args.render and not whole:
        for name in ("library.json", "library-suite.json"):
            if (args.output / name).exists():
                parser.error(
                    f"--parts {' '.join(args.parts)}: {args.output / name} holds an earlier run, "
                    f"whose other figures would be lost; expected another --output, or all parts "
                    f"and targets"
                )
    return args


class Run:
    """The parts of one call; each part's results are saved before the next part starts."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Nothing is measured yet."""
        self.args = args
        self.device = torch.device(args.device)
        self.suite = BenchmarkSuite(5, 30, device=self.device)
        self.figures: dict[str, float] = {}
        self.detail: dict[str, Any] = {}
        self.size, self.rounds = (8, 1) if args.rehearse else (4096, 5)

    def overhead(self) -> None:
        """Host time that the public function adds to its kernel."""
        self.figures |= host_overhead(self.device)

    def norm(self) -> None:
        """RMSNorm+RoPE at sequence 8192."""
        hidden, length = ((64, 128), 8) if self.args.rehearse else ((2048, 4096, 8192), 8192)
        self.figures |= norm_figures(self.suite, length, hidden)

    def tuning(self) -> None:
        """Gain of the tuner over the default configs."""
        cache = TuningCache(self.args.output / "tuning_cache.json")
        found = self.detail.setdefault("tuning", {})
        for target in self.args.targets:
            figure, sizes = TUNED[target]
            gain, found[target] = tuning_gain(self.device, target, sizes, cache)
            self.figures[f"library.tuning.{figure}"] = gain

    def matmul(self) -> None:
        """The tutorial's steps; v3 and v4 with what the tuner found."""
        tuned = self.detail.get("tuning", {}).get("matmul", {}).get("config")
        found, times = matmul_steps(self.device, self.size, self.rounds, tuned)
        self.figures |= found
        self.detail["matmul_ms"] = times

    def backends(self) -> None:
        """The gated MLP and the FP8 GEMM on every backend."""
        if self.args.rehearse:
            self.suite.benchmark_gated_mlp((1,), (4,), (64,), (96,))
            self.suite.benchmark_fp8_gemm([(8, 64, 64)])
            return
        # cuBLAS is the baseline here, and compiling around it takes longer than all measurements
        self.suite.compile_baseline = False
        self.suite.energy = self.device.type == "cuda"
        self.suite.benchmark_gated_mlp((64,), (1,), (4096,), (11264,))
        self.suite.benchmark_fp8_gemm([(4096, 4096, 4096)])

    def save(self) -> None:
        """Write the results so far."""
        if self.figures:
            write_figures(self.args.output, self.figures, self.detail)
        for suffix in (".json", ".md", ".html") if self.suite.rows else ():
            self.suite.save_report(self.args.output / f"library-suite{suffix}")


def render(folder: Path) -> None:
    """Write the suite's reports again, from its JSON in ``folder``."""
    saved = json.loads((folder / "library-suite.json").read_text())
    rows = [BenchmarkRow(**row) for row in saved["rows"]]
    report = make_report(rows, Ceilings(**saved["ceilings"]))
    report.write(folder, "library-suite", "library-suite-")


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    args = parse(argv)
    if args.render:
        render(args.output)
        return 0
    run = Run(args)
    for part in PARTS:
        if part not in run.args.parts:
            continue
        try:
            getattr(run, part)()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except (OssFusedError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        run.save()
    for name, value in run.figures.items():
        print(f"{name}: {value:.4g}", file=sys.stderr)
    # another backend may lack what it needs here
    bad = [row for row in run.suite.rows if row.status == "wrong" or not _ran(row)]
    for row in bad:
        print(f"error: {row.name}: {row.status}: {row.message}", file=sys.stderr)
    return 1 if bad else 0


def _ran(row: BenchmarkRow) -> bool:
    return row.status == "ok" or row.implementation != "oss_fused"


if __name__ == "__main__":
    sys.exit(main())
