#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Check a machine, and a checkpoint, before serving.

    doctor.py                                        the machine: versions, GPU, operators, tiles
    doctor.py --hooks                                all that the plugin needs of vLLM, in a table
    doctor.py MODEL                                  and a checkpoint: files, shapes, scales, memory
    doctor.py MODEL --quantization oss_fp8 --smoke   and eight tokens from vLLM
    doctor.py MODEL-oss-fp8 --self-check             and the log-probabilities kept in it

Nothing of a checkpoint is executed, and no tensor but its scales is read. Prints a table to
stderr. Exit codes: 0 fit to serve (warnings allowed), 1 a check failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.arguments import output_file

from oss_fused.environment import fingerprint
from oss_fused.files import write_json
from oss_fused.plugin.compat import check_hooks, vllm_package
from oss_fused.plugin.doctor import Options, diagnose, hooks_table, table
from oss_fused.plugin.preflight import FAIL


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="MODEL", help="checkpoint folder")
    add("--quantization", choices=("oss_fp8",), help="as vllm serve will be told")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: what is here")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs (default: 1)")
    add("--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages (default: 1)")
    add("--max-model-len", type=int, default=8192, metavar="N", help="tokens (default: 8192)")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share (default: 0.9)")
    add("--trust-remote-code", action="store_true", help="the checkpoint may name Python code")
    add("--smoke", action="store_true", help="load the model in vLLM and generate eight tokens")
    add(
        "--self-check",
        action="store_true",
        help="and compare log-probabilities with those that calibrate.py kept in the checkpoint",
    )
    add("--hooks", action="store_true", help="print every hook of vLLM and whether it fits")
    add(
        "--json", type=output_file, metavar="FILE", help="write the checks and the environment here"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.model is not None and not args.model.is_dir():
        parser.error(f"MODEL={str(args.model)!r}: no such folder; fetch the model first")
    if args.model is None and (args.smoke or args.self_check):
        flag = "--smoke" if args.smoke else "--self-check"
        parser.error(f"{flag}: loads a model; expected MODEL beside it")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        parser.error(f"--gpu-memory-utilization {args.gpu_memory_utilization}: expected 0 to 1")
    if args.hooks:
        results = check_hooks(vllm_package())
        print(hooks_table(results), file=sys.stderr)
        return 1 if any(result.problem for result in results) else 0
    output = args.json
    del args.json, args.hooks
    checks = []
    for check in diagnose(Options(**vars(args))):
        print(table([check]), file=sys.stderr, flush=True)
        checks.append(check)
    failed = [check.name for check in checks if check.status == FAIL]
    if output:
        facts = {"kind": "oss_fused.doctor", "ok": not failed, "environment": fingerprint()}
        write_json(output, {**facts, "checks": [asdict(check) for check in checks]})
    print(f"not fit: {', '.join(failed)}" if failed else "fit to serve", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
