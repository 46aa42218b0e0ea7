#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Put a server under mixed load for a while: errors, memory, and greedy answers at both ends.

    soak.py models/SmolLM2-135M-Instruct-oss-fp8 --minutes 30 --output docs/results/cpu/soak.json

Starts `vllm serve` on the loopback interface and mixes short, long, streamed, cancelled,
malformed and too long requests, JSON by schema, log-probabilities and several answers at once.
SIGTERM or Ctrl-C during the load end it early, with all that was measured; FILE is written as it
goes ("complete": false until the end). Exit codes: 0 no error and greedy answers identical, 1
otherwise, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import soak
from harness.arguments import Help, output_file, summary_file
from harness.arms import check_model
from harness.processes import Terminated, signals_as_exceptions
from harness.summary import merge_summary

from oss_fused.environment import fingerprint
from oss_fused.errors import ServerError
from oss_fused.files import write_json


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint folder")
    add("--minutes", type=float, default=30.0, help="of load (default: 30)")
    add("--max-requests", type=int, default=100_000, metavar="N", help="end earlier after N")
    add("--concurrency", type=int, default=4, metavar="N", help="clients at once (default: 4)")
    add("--max-model-len", type=int, default=1024, metavar="N", help="tokens (default: 1024)")
    add("--serve-flags", type=shlex.split, default=[], metavar="FLAGS", help="as one word")
    add("--seed", type=int, default=0, help="of the mix (default: 0)")
    add("--output", type=output_file, required=True, metavar="FILE", help="JSON of everything seen")
    add("--summary", type=summary_file, metavar="FILE", help="flat JSON to merge soak.* into")
    return parser


def say(text: str) -> None:
    """Print to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Parse the command line, run the test, write the results."""
    parser = make_parser()
    args = vars(parser.parse_args())
    output, summary = args.pop("output"), args.pop("summary")
    plan = soak.SoakTest(**args)
    try:
        check_model(plan.model)
        soak.check(plan)
    except (ServerError, ValueError) as error:
        parser.error(str(error))
    head = {"kind": "oss_fused.soak", "environment": fingerprint()}

    def save(report: dict[str, Any]) -> None:
        write_json(output, {**head, "complete": "ended_by" in report, **report})

    with tempfile.TemporaryDirectory(prefix="oss-fused-soak-") as scratch:
        try:
            with signals_as_exceptions():
                result = soak.run(plan, Path(scratch), say, save)
        except ServerError as error:
            say(f"soak: {error}")
            return 1
        except (KeyboardInterrupt, Terminated) as error:
            say(f"soak: stopped by {type(error).__name__}; server ended")
            return 130
    save(result)
    figures = {
        "soak.errors": len(result["errors"]),
        "soak.memory_growth_mib": result["memory_growth_mib"],
    }
    if summary:
        merge_summary(summary, figures, output)
    total = sum(result["requests"].values())
    say(
        f"{total} requests in {result['seconds']:.0f} s, {len(result['errors'])} errors, memory "
        f"{result['memory_growth_mib']:+.1f} MiB, greedy identical: {result['greedy_identical']}"
    )
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
