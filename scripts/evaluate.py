#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure what quantisation costs: perplexity, KL divergence and top-1 agreement, through vLLM.

Each model reads the same text in windows; a candidate is compared with the baseline token by token:

  evaluate.py --baseline models/M --candidate models/M-oss-fp8 --text book.txt --output quality.json
  evaluate.py --baseline models/M --candidate "online=models/M --quantization oss_fp8" --text a b

A model is [NAME=][VAR=VALUE ...] FOLDER [engine flags as of `vllm serve`]. Use text that the
calibration has not seen. Where a model fails, the figures of those before it are in a file beside
--output, quality.unfinished.json. Exit codes: 0 measured, 1 a model failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

from harness import evaluate, summary
from harness.arguments import output_file, summary_file
from harness.arms import Arm, check_model, parse_arm
from harness.needle import make_needles
from harness.processes import Terminated
from harness.quality_report import add_quality
from harness.regression import largest

from oss_fused.bench.report import Report
from oss_fused.environment import fingerprint, has_gpu, portable
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json


def main() -> int:
    """Parse the command line, measure, write JSON and show the table."""
    parser = make_parser()
    args = parser.parse_args()
    arms = check(parser, args)
    needles = make_needles(args.needle)
    task = evaluate.Task(
        args.text,
        args.window,
        args.max_tokens,
        args.top_logprobs,
        needles,
        args.lm_eval,
        args.lm_eval_limit,
    )
    scorer = evaluate.Scorer(task, has_gpu(), args.engine_flags, args.cache)
    head = {"kind": "oss_fused.evaluate", "environment": fingerprint()}

    # a file of its own: --output says that all models are measured
    unfinished = args.output.with_name(f"{args.output.stem}.unfinished.json")

    def save(so_far: dict[str, Any]) -> None:
        write_json(unfinished, portable(head | so_far))
        print(f"wrote {unfinished}", file=sys.stderr)

    try:
        results = head | evaluate.evaluate(scorer, arms, save)
        write_json(args.output, portable(results))
        unfinished.unlink(missing_ok=True)
        if args.summary:
            factors = zip(*(factors_of(text) for text in results["texts"]))
            figures = {
                name: round(largest(values), 5) for name, values in zip(args.summary_name, factors)
            }
            summary.merge_summary(args.summary, figures, args.output)
    except (OssFusedError, OSError, ValueError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print(f"evaluate: stopped by {type(error).__name__}", file=sys.stderr)
        return 130
    report = Report("Quality")
    add_quality(report, results)
    print(f"\n{report.text()}\nwrote {args.output}", file=sys.stderr)
    return 0


def factors_of(text: dict[str, Any]) -> list[float]:
    """Perplexity factors of the candidates on one text."""
    return [candidate["perplexity_factor"] for candidate in text["candidates"]]


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--baseline", required=True, metavar="MODEL", help="the unquantised model")
    add("--candidate", required=True, action="append", metavar="MODEL", help="repeat for several")
    add("--text", required=True, nargs="+", type=Path, help="UTF-8 text files")
    add("--output", required=True, type=output_file, help="JSON file to write")
    add("--window", type=int, default=512, help="tokens that see each other (default: 512)")
    add("--max-tokens", type=int, default=4096, help="tokens of each text (default: 4096)")
    add("--top-logprobs", type=int, default=300, help="tokens in the KL sum (default: 300)")
    add(
        "--needle",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="also look for a pass key at five depths of prompts of these lengths (tests FP8 KV)",
    )
    add(
        "--lm-eval",
        type=Path,
        nargs="+",
        default=[],
        metavar="YAML",
        help="also run lm-eval tasks, given as files (needs the package lm-eval)",
    )
    add("--lm-eval-limit", type=int, metavar="N", help="samples of each such task (default: all)")
    add("--engine-flags", type=shlex.split, default=[], help="engine flags for all, as one word")
    add("--cache", type=Path, help="folder that keeps log-probabilities between runs")
    add(
        "--summary", type=summary_file, help="flat JSON to merge the candidates' worst factors into"
    )
    add(
        "--summary-name",
        nargs="+",
        metavar="NAME",
        help="their names there, in order, such as main_job.smollm2.ppl_factor",
    )
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Arm]:
    """The arms; ends with a usage error where arguments make no sense."""
    for name, least in (("window", 2), ("max_tokens", 2), ("top_logprobs", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {getattr(args, name)}: expected at least {least}")
    for length in args.needle:
        if length < 128:
            parser.error(f"--needle {length}: expected at least 128 tokens")
    for path in args.text:
        try:
            empty = not path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--text {path}: cannot be read as UTF-8 text: {error}")
        if empty:
            parser.error(f"--text {path}: is empty; expected text")
    for path in args.lm_eval:
        if not path.is_file():
            parser.error(f"--lm-eval {path}: no such file; expected the YAML file of a task")
    if args.lm_eval and importlib.util.find_spec("lm_eval") is None:
        parser.error("--lm-eval: the package lm-eval is missing; pip install lm-eval")
    if args.summary and not args.summary_name:
        parser.error("--summary: needs --summary-name")
    if args.summary_name and len(args.summary_name) != len(args.candidate):
        parser.error(
            f"--summary-name {' '.join(args.summary_name)}: expected {len(args.candidate)}, one "
            f"for each --candidate"
        )
    arms: list[Arm] = []
    for text in (args.baseline, *args.candidate):
        try:
            arm = parse_model(text, {arm.name for arm in arms})
            check_model(arm.model)
        except ValueError as error:
            parser.error(str(error))
        arms.append(arm)
    return arms


def parse_model(text: str, taken: set[str]) -> Arm:
    """Read ``[NAME=]MODEL [flags]``; without a name the folder's name is taken.

    Raises:
        ValueError: it names no model, or a name that is taken.
    """
    first = text.split(maxsplit=1)[0] if text.strip() else "-"
    if first.startswith("-"):
        raise ValueError(f"model {text!r}: names no model; expected [NAME=]FOLDER [engine flags]")
    name, equals, _ = first.partition("=")
    if not equals or name.isupper() or "/" in name:
        folder = next((word for word in shlex.split(text) if "=" not in word), "model")
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(folder).name)
        twins = sum(other == name or other.startswith(f"{name}-twin") for other in taken)
        text = f"{name}{f'-twin{twins}' if twins else ''}={text}"
    arm = parse_arm(text)
    if arm.name in taken:
        raise ValueError(f"model {text!r}: the name {arm.name} is taken")
    return arm


if __name__ == "__main__":
    sys.exit(main())
