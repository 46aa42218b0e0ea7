# SPDX-License-Identifier: MIT
"""Command line of compare.py."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.arguments import duration, positive, summary_file
from harness.arms import parse_arm
from harness.compare import QUESTION
from harness.grid import Lengths, parse_lengths


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Command line of compare.py.

    Args:
        description: what --help shows first.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--arm",
        action="append",
        default=[],
        type=argument(parse_arm),
        metavar="ARM",
        help='"NAME=[VAR=VALUE ...] MODEL [flags]"; repeat it',
    )
    add("--baseline", nargs="+", metavar="NAME", help="arms to compare with (default: the first)")
    add("--output", type=Path, help="folder for the results; must not exist")
    add("--overwrite", action="store_true", help="replace an earlier comparison in --output")
    _add_load(parser.add_argument_group("load"))
    _add_servers(parser.add_argument_group("servers"))
    _add_results(parser.add_argument_group("results"))
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=positive,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="concurrent requests (default: 1 8)",
    )
    add(
        "--lengths",
        type=argument(parse_lengths),
        nargs="+",
        default=[Lengths(128, 128)],
        metavar="IN:OUT[@N[xP],...]",
        help="tokens in and out of a request (default: 128:128); @ gives them concurrencies of "
        "their own, such as 4096:16@1,4, and P requests in all (default: 4 x N, >= 8)",
    )
    add(
        "--num-prompts",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="requests per load: one number, or one per concurrency (default: 4 x it, >= 8)",
    )
    add(
        "--question",
        nargs="+",
        default=[QUESTION],
        help=f"asked of every server once (default: {QUESTION})",
    )
    add("--rounds", type=positive, default=2, help="times every arm is served (default: 2)")
    add("--repeats", type=positive, default=1, help="runs of the grid per round (default: 1)")
    add(
        "--warmups",
        type=int,
        metavar="N",
        help="runs of a load before it is measured, at most: they end when the time to first token "
        "is steady (default: 4 on a GPU, 0 on a CPU)",
    )
    add(
        "--streamed",
        type=positive,
        metavar="N",
        help="then ask each server that is no baseline for N answers of 128:512 at once, streamed "
        "and whole in turn",
    )
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")


def _add_servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--together",
        action="store_true",
        help="keep all servers up at once (they must fit the device) and alternate load by load",
    )
    add(
        "--serve-flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help='`vllm serve` flags for every arm, as one word: --serve-flags="--max-num-seqs 64"',
    )
    add(
        "--bench-flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="further `vllm bench serve` flags, as one word",
    )
    add(
        "--busy-host",
        action="store_true",
        help="after the start pin each engine process to one core, beside a busy loop",
    )
    add(
        "--after",
        type=positive,
        metavar="PID",
        help="start the servers, but measure when this process has ended: another comparison",
    )
    add("--port", type=int, help="first port (default: free ones)")
    add(
        "--startup-timeout",
        type=duration,
        default=900.0,
        help="seconds to healthy (default: 900)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--quality", type=Path, help="JSON of evaluate.py, to include in the report")
    add("--summary", type=summary_file, help="flat JSON to merge ratios into")
    add("--summary-prefix", help="name before .tpot_ratio_c1 etc., such as main_job.gpt_oss_20b")
    add("--summary-key", default="ratio_c", help="name before the concurrency (default: ratio_c)")
    add("--summary-rate", help="name before it of the arm's output tokens/s (default: left out)")
    add("--summary-arm", help="the arm of those ratios (default: the first that is no baseline)")
    add(
        "--summary-alias",
        nargs="+",
        default=[],
        metavar="NEW=NAME",
        help="further names: served.x.max_load_ratio=served.x.ratio_c256_1024x1024",
    )
    add(
        "--kernel-ms",
        metavar="NAME",
        help="the kernels' ms per step at 1 request in --summary: its arm's time per token over "
        "it becomes served.host_overhead_c1",
    )
    add(
        "--render",
        type=Path,
        metavar="FOLDER",
        help="measure nothing: redo report and chart of this folder, and --summary",
    )


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` for argparse, which shows the message of a ValueError only in its own wrapping."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert
