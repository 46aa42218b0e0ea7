#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure the accuracy of attention, and hold its FP8 form to limits.

Writes curves "baseline", "window" and "dropout" and, with --fp8, "fp8_per_channel" and "fp8_group":
differences from the same formula in float32. The group size is the smallest candidate that clips
at most --clip-target. Scales are learnt on four batches and judged on a fifth.

    python scripts/eval_attention_accuracy.py --B 1 --H 4 --N 256 --D 64 --fp8 --plot
    python scripts/eval_attention_accuracy.py --fp8 --trend reports/attention_trend.json \
        --thresholds reports/attention_limits.json --write-adaptive-thresholds

Exit codes: 0 ok, 1 a limit is exceeded, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import attention_accuracy, attention_regression
from harness.arguments import output_file, share, summary_file
from harness.summary import merge_summary

from oss_fused.environment import fingerprint
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.kernels.checks import check_device

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--B", type=_size, default=1, help="sequences (default: 1)")
    add("--H", type=_size, default=4, help="heads (default: 4)")
    add("--N", type=_size, default=256, help="tokens of a sequence (default: 256)")
    add("--D", type=_size, default=64, help="values of a head (default: 64)")
    add("--window-left", type=_size, default=64, help='of curve "window" (default: 64)')
    add("--dropout", type=float, default=0.1, help='of curve "dropout" (default: 0.1)')
    add("--dtype", choices=DTYPES, default="bfloat16", help="of q, k and v (default: bfloat16)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="default: cuda if there is one, else cpu")
    add("--fp8", action="store_true", help="V in FP8, per channel and per group")
    add("--clip-target", type=share, default=0.01, help="share that may clip (default: 0.01)")
    candidates = [4, 8, 16, 32, 64]
    add("--group-candidates", type=_sizes, default=candidates, help="such as 4,8 (default: to 64)")
    add("--plot", action="store_true", help="histograms as PNG beside the JSON")
    output = Path("reports/attention_accuracy.json")
    add(
        "--output",
        type=output_file,
        default=output,
        help="JSON file to write (default: %(default)s)",
    )
    control = parser.add_argument_group("regression control, with --fp8")
    control.add_argument("--fp8-p99-threshold", type=float, help="default 3e-2")
    control.add_argument("--fp8-clip-threshold", type=float, help="default 0.03")
    control.add_argument("--thresholds", type=Path, help="JSON file that overrides the defaults")
    control.add_argument(
        "--summary", type=summary_file, help="summary.json that takes the p99 difference"
    )
    control.add_argument("--trend", type=output_file, help="JSON file that keeps the last 100 runs")
    control.add_argument("--markdown", type=output_file, help="report to write; needs --trend")
    control.add_argument(
        "--write-adaptive-thresholds",
        action="store_true",
        help="write mean + 3 std of the trend to --thresholds where that is lower",
    )
    args = parser.parse_args(argv)
    if (args.trend or args.thresholds or args.summary) and not args.fp8:
        parser.error("--trend, --thresholds, --summary: need --fp8")
    if args.markdown and not args.trend:
        parser.error("--markdown: needs --trend")
    made = args.write_adaptive_thresholds
    if args.thresholds and not made and not args.thresholds.is_file():
        parser.error(
            f"--thresholds {args.thresholds}: no such file; --write-adaptive-thresholds makes it"
        )
    if made and not (args.trend and args.thresholds):
        parser.error("--write-adaptive-thresholds: needs --trend and --thresholds")
    return args


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def control(args: argparse.Namespace, results: dict[str, Any]) -> int:
    """Hold the FP8 curves to their limits; returns the exit code."""
    flags = {
        "attention_fp8_p99_abs": args.fp8_p99_threshold,
        "attention_fp8_clip_ratio": args.fp8_clip_threshold,
    }
    limits = attention_regression.load_limits(args.thresholds, flags)
    run = attention_regression.figures(results)
    failed = attention_regression.failures(run, limits)
    if args.summary:
        merge_summary(args.summary, {"operators.flash.fp8_p99_abs": run["p99"]}, args.output)
    if args.trend:
        runs = attention_regression.append_trend(args.trend, run)
        if args.markdown:
            args.markdown.parent.mkdir(parents=True, exist_ok=True)
            args.markdown.write_text(attention_regression.report(runs, limits))
        if args.write_adaptive_thresholds and not failed:
            lower = attention_regression.write_adaptive(args.thresholds, runs)
            for name, value in lower.items():
                print(f"{name}: limit lowered to {value:.4g}", file=sys.stderr)
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Evaluate; returns the exit code."""
    args = parse(argv)
    problem = attention_accuracy.Problem(
        args.B, args.H, args.N, args.D, args.window_left, args.dropout, DTYPES[args.dtype]
    )
    try:
        device = check_device(args.device)
        results = attention_accuracy.evaluate(
            problem, device, args.fp8, args.clip_target, args.group_candidates
        )
        settings = {"B": args.B, "H": args.H, "N": args.N, "D": args.D, "dtype": args.dtype}
        settings |= {"window_left": args.window_left, "dropout": args.dropout}
        write_json(
            args.output,
            {
                "kind": "oss_fused.attention_accuracy",
                "environment": fingerprint(),
                "settings": settings,
                **results,
            },
        )
        if args.plot:
            png = attention_accuracy.plot(results["curves"])
            args.output.with_suffix(".png").write_bytes(png)
        code = control(args, results) if args.fp8 else 0
    except (OssFusedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, curve in results["curves"].items():
        line = f"{name:<16} mean {curve['mean_abs']:.2e}  p99 {curve['p99_abs']:.2e}"
        print(f"{line}  max {curve['max_abs']:.2e}  clipped {curve['clip_ratio']:.2%}")
    print(f"written to {args.output}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
