#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure how far vLLM set-ups are from a plain PyTorch model: KL and top-1 over all logits.

The reference is transformers' model with the checkpoint's weights, MXFP4 dequantised, computed in
bfloat16 and in float32, one layer in memory at a time. Every arm is a vLLM engine that reads the
same random prompts, once as prefill and once a token a step as in decoding. Engines and reference
run side by side on one device.

  evaluate_logits.py --model /tmp/gpt-oss-20b --arm "baseline=VLLM_PLUGINS=" \
      --arm "oss_fp8=--quantization oss_fp8 \
             --additional-config.oss_fused.expert_activations bf16" \
      --output docs/results/h200/decode_gpt_oss_20b/logits.json

Weights may be random (scripts/make_model.py): KL then compares set-ups of one model, and says
nothing about text. Exit codes: 0 measured, 1 an engine failed, 2 bad arguments, 130 stopped by a
signal.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import processes, summary
from harness.arguments import output_file, summary_file
from harness.arms import CPU_ENVIRONMENT, check_model, parse_arm
from harness.decode_limits import load_config

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint, has_gpu, portable
from oss_fused.errors import ServerError
from oss_fused.files import write_json

DTYPES = ("bfloat16", "float32")


def main() -> int:
    """Parse the command line, run everything, write JSON and show the table."""
    parser = make_parser()
    args = parser.parse_args()
    try:
        check_model(args.model)
        # an arm of compare.py, whose model is the common one
        arms = [parse_arm(with_model(text, args.model)) for text in args.arm]
        vocab = int(load_config(args.model)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    for name in ("sequences", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected at least 1")
    names = [arm.name for arm in arms]
    for text in args.summary_name:
        if not args.summary or text.partition("=")[2] not in names:
            parser.error(
                f"--summary-name {text}: expected FIGURE=ARM with one of {', '.join(names)} as "
                f"ARM, and --summary"
            )
    if args.sequences > vocab - 100:
        parser.error(f"--sequences {args.sequences}: expected fewer than the vocabulary's {vocab}")
    environment = fingerprint()
    try:
        with tempfile.TemporaryDirectory(prefix="oss-fused-logits-") as folder:
            figures = run(args, arms, vocab, Path(folder))
    except ServerError as error:
        print(f"evaluate_logits: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, processes.Terminated) as error:
        print(f"evaluate_logits: stopped by {type(error).__name__}", file=sys.stderr)
        return 130
    settings = {name: getattr(args, name) for name in ("model", "sequences", "length", "seed")}
    settings["arms"] = {arm.name: [*map("=".join, arm.environment), *arm.flags] for arm in arms}
    results = {"kind": "oss_fused.logits", "environment": environment, "settings": settings}
    write_json(args.output, portable(results | {"figures": figures}))
    for text in args.summary_name:
        name, _, arm = text.partition("=")
        value = round(figures[arm]["bfloat16"]["decode"]["kl"], 6)
        summary.merge_summary(args.summary, {name: value}, args.output)
    print(show(figures), file=sys.stderr)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder of all arms")
    arm = "NAME=[VAR=VALUE ...] [flags]"
    add("--arm", action="append", required=True, metavar=arm, help="a set-up of vLLM; repeat it")
    add("--output", type=output_file, required=True, help="JSON file to write")
    add("--sequences", type=int, default=16, help="prompts, which decode together (default: 16)")
    add("--length", type=int, default=256, help="tokens of each (default: 256)")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--engine-flags", type=shlex.split, default=[], help="engine flags for all, as one word")
    add("--summary", type=summary_file, help="flat JSON for the KL against bfloat16 in decode")
    add(
        "--summary-name",
        action="append",
        default=[],
        metavar="FIGURE=ARM",
        help="name of an arm's KL; repeat it",
    )
    return parser


def with_model(text: str, model: str) -> str:
    """``NAME=[VAR=VALUE ...] [flags]`` with the model in its place, before the flags."""
    name, _, rest = text.partition("=")
    words = shlex.split(rest)
    # a flag may hold a "=", too
    flags = (i for i, word in enumerate(words) if word.startswith("-") or "=" not in word)
    at = next(flags, len(words))
    return f"{name}={shlex.join([*words[:at], model, *words[at:]])}"


def run(args: argparse.Namespace, arms: list[Any], vocab: int, folder: Path) -> dict[str, Any]:
    """Figures of every arm: reference dtype -> pass -> KL and agreement.

    Raises:
        ServerError: a process failed; the message has the tail of its log.
    """
    generator = np.random.default_rng(args.seed)
    # no token twice at one position: both identify a row
    columns = [generator.permutation(vocab - 100)[: args.sequences] for _ in range(args.length)]
    tokens, reference = folder / "tokens.npy", folder / "reference.npz"
    np.save(tokens, np.stack(columns, 1) + 50)
    count = args.sequences * args.length
    flags = ["--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"]
    flags += ["--max-model-len", str(args.length + 16), "--max-num-seqs", str(args.sequences)]
    flags += ["--max-num-batched-tokens", str(count)]
    if has_gpu():
        flags += ["--gpu-memory-utilization", f"{0.8 / len(arms):.2f}"]
        flags += ["--kv-cache-memory-bytes", "2G"]
    common = dict(os.environ) if has_gpu() else CPU_ENVIRONMENT | dict(os.environ)
    common["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    jobs = [("reference", "logits_reference", {"dtypes": DTYPES, "output": str(reference)}, ())]
    jobs += [
        (
            arm.name,
            "logits_worker",
            {
                "flags": [*flags, *args.engine_flags, *arm.flags],
                "reference": str(reference),
                "output": str(folder / f"{arm.name}.out.json"),
            },
            arm.environment,
        )
        for arm in arms
    ]
    with ExitStack() as stack, processes.signals_as_exceptions():
        running = []
        for name, module, job, environment in jobs:
            path, log_path = folder / f"{name}.json", folder / f"{name}.log"
            path.write_text(json.dumps({"model": args.model, "tokens": str(tokens)} | job))
            command = [sys.executable, "-m", f"harness.{module}", str(path)]
            with log_path.open("wb") as log:
                process = processes.start(command, log, common | dict(environment))
            stack.callback(processes.stop, process)
            running.append((name, process, log_path))
        for name, process, log_path in running:
            if process.wait():
                lines = log_path.read_text(errors="replace").splitlines()[-25:]
                raise ServerError(
                    f"{name}: ended with status {process.returncode}\n    "
                    + "\n    ".join(line[:300] for line in lines)
                )
            print(f"{name}: done", file=sys.stderr, flush=True)
    return {arm.name: json.loads((folder / f"{arm.name}.out.json").read_text()) for arm in arms}


def show(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [
        [arm, dtype, name, f"{f['kl']:.3e}", f"{f['kl_p99']:.3e}", f"{f['top1_agreement']:.4f}"]
        for arm, by_dtype in figures.items()
        for dtype, passes in by_dtype.items()
        for name, f in passes.items()
    ]
    return text_table(["arm", "reference", "pass", "KL", "KL p99", "same top token"], rows)


if __name__ == "__main__":
    sys.exit(main())
