#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure the kernels on one NVIDIA GPU against vLLM's, cuBLASLt's and torch.compile's.

Every result is checked against the reference before it is timed. Writes kernels.json (with the
machine's fingerprint), kernels.md and kernels.html to --output and prints one line per case.

    python scripts/bench_kernels.py --output docs/results/h200 \
        --summary docs/results/h200/summary.json
    python scripts/bench_kernels.py --groups gemm_small --contains "M=1 " --output /tmp/kernels
    python scripts/bench_kernels.py --from-json earlier.json later.json --output docs/results/h200
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from harness.arguments import Help, output_folder, summary_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_folder, help="folder for the files above")
    parser.add_argument(
        "--summary", type=summary_file, help="summary.json to merge the figures into"
    )
    parser.add_argument("--groups", nargs="*", default=[], help="groups to run (default: all)")
    parser.add_argument("--contains", default="", help="only cases whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument(
        "--vllm-library", type=Path, help="path of vLLM's _C_stable_libtorch.abi3.so"
    )
    jobs = min(os.cpu_count() or 1, 12)
    parser.add_argument("--compile-jobs", type=int, default=jobs, help="processes that compile")
    parser.add_argument(
        "--from-json",
        type=Path,
        nargs="+",
        help="render earlier kernels.json again; of several, a later one's rows replace",
    )
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run; 0 if every result was right, 1 if one was wrong, 2 on bad input, 130 interrupted."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    from harness import kernel_report, kernels, vllm_kernels

    from oss_fused.environment import has_gpu
    from oss_fused.errors import OssFusedError

    if arguments.from_json:
        missing = [path for path in arguments.from_json if not path.is_file()]
        if missing or not arguments.output:
            parser.error(
                f"--from-json {' '.join(map(str, missing or arguments.from_json))}: "
                "expected files, and --output"
            )
        try:
            report = kernels.merged([json.loads(path.read_text()) for path in arguments.from_json])
        except (ValueError, LookupError, TypeError) as error:
            files = " ".join(map(str, arguments.from_json))
            parser.error(f"--from-json {files}: expected kernels.json of this script ({error!r})")
        kernel_report.write(report, arguments.output, arguments.summary)
        return 0
    unknown = set(arguments.groups) - set(kernels.groups())
    if unknown:
        parser.error(f"--groups {' '.join(unknown)}: expected some of {' '.join(kernels.groups())}")
    cases = kernels.select(arguments.groups, arguments.contains)
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case matches", file=sys.stderr)
        return 0 if cases else 2
    if not has_gpu():
        parser.error("no NVIDIA GPU here: kernel times need one")
    if arguments.compile_share:
        kernels.compile_share(cases, arguments.compile_share)
        return 0
    if not arguments.output:
        parser.error("--output is needed")
    # weight-only linears are compared with PyTorch's alone
    if any(case.group != "w8a16" for case in cases):
        try:
            vllm_kernels.load(arguments.vllm_library)
        except OssFusedError as error:
            parser.error(str(error))
    if arguments.compile_jobs > 1:
        kernels.compile_in_parallel(
            sys.argv if argv is None else [__file__, *argv], arguments.compile_jobs
        )
    # SIGTERM of a time limit acts like an interrupt: the results so far are kept
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = kernels.run(cases)
    kernel_report.write(report, arguments.output, arguments.summary)
    wrong = [row["name"] for row in report["results"] if not row["passed"]]
    print(json.dumps(report["figures"], indent=2), file=sys.stderr)
    done = f"{len(report['results'])} of {len(cases)} cases"
    print(f"{done}, {len(wrong)} wrong; see {arguments.output}", file=sys.stderr)
    return 130 if "interrupted" in report else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
