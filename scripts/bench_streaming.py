#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tokens per second of streamed answers beside those of whole ones, from one server.

    bench_streaming.py models/SmolLM2-135M-Instruct --serve-flags="--quantization oss_fp8" \\
        --output results/streaming.json

Starts `vllm serve` on the loopback interface. All requests come at once, with random prompts. Runs
alternate: whole, streamed, streamed, whole. The client counts the tokens that the server reports,
and ends with an error where an answer is short. Exit codes: 0 measured, 1 the server failed or an
answer was short, 2 bad arguments, 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from harness import streaming
from harness.arguments import duration, output_file, positive, summary_file
from harness.arms import check_model
from harness.compare_options import argument
from harness.grid import parse_lengths
from harness.processes import Terminated, signals_as_exceptions
from harness.summary import merge_summary

from oss_fused.environment import fingerprint
from oss_fused.errors import ServerError
from oss_fused.files import write_json


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint folder")
    add("--requests", type=positive, default=200, metavar="N", help="at once (default: 200)")
    add(
        "--lengths",
        type=argument(parse_lengths),
        default="128:512",
        metavar="IN:OUT",
        help="tokens in and out of a request (default: 128:512)",
    )
    add("--repeats", type=positive, default=3, metavar="N", help="pairs of runs (default: 3)")
    add("--serve-flags", type=shlex.split, default=[], metavar="FLAGS", help="as one word")
    add("--startup-timeout", type=duration, default=900.0, help="seconds to healthy (default: 900)")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--after", type=positive, metavar="PID", help="measure when this process has ended")
    add("--output", type=output_file, required=True, metavar="FILE", help="JSON of every run")
    add("--summary", type=summary_file, metavar="FILE", help="flat JSON to merge the figures into")
    add("--summary-prefix", metavar="NAME", default="served", help="of them (default: served)")
    return parser


def main() -> int:
    """Parse the command line, measure, write the results."""
    parser = make_parser()
    args = vars(parser.parse_args())
    output, summary, prefix = (args.pop(name) for name in ("output", "summary", "summary_prefix"))
    lengths = args.pop("lengths")
    if lengths.concurrency:
        parser.error("--lengths: expected IN:OUT; all --requests come at once")
    plan = streaming.Plan(inputs=lengths.inputs, outputs=lengths.outputs, **args)
    try:
        check_model(plan.model)
        vocabulary = streaming.vocabulary_of(plan.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="oss-fused-streaming-") as scratch:
        try:
            with signals_as_exceptions():
                result = streaming.run(plan, vocabulary, Path(scratch))
        except ServerError as error:
            print(f"bench_streaming: {error}", file=sys.stderr)
            return 1
        except (KeyboardInterrupt, Terminated) as error:
            print(f"bench_streaming: stopped by {type(error).__name__}", file=sys.stderr)
            return 130
    write_json(output, {"kind": "oss_fused.streaming", "environment": fingerprint(), **result})
    if summary:
        name = f"{prefix}.streamed_ratio_c{plan.requests}"
        merge_summary(summary, {name: result["ratio"]}, output)
    whole, streamed = (result["tokens_per_s"][kind] for kind in streaming.KINDS)
    print(f"whole {whole:.0f}, streamed {streamed:.0f} tokens/s, ratio {result['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
