#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tokens per second that vLLM's API server streams, over a stand-in for the engine.

    bench_api_server.py --requests 128 200 512 --step-ms 5.6 7 16 --output results/api.json

The stand-in gives each request a token every step, so what is lost against whole answers is lost in
the API server (and to the client, which shares the cores). Servers: vLLM's, and with oss_fp8. Needs
no GPU. The JSON is written after each load. Exit codes: 0 measured, 1 a server failed or an answer
was short, 2 bad arguments, 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import streaming
from harness.arguments import Help, duration, output_file, positive
from harness.arms import CPU_ENVIRONMENT
from harness.model_factory import get_shape, make_model
from harness.processes import Terminated, signals_as_exceptions
from harness.server import Server

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.errors import ServerError
from oss_fused.files import write_json

SERVER = (sys.executable, "-m", "harness.stand_in_server")
ARMS = {"vllm": ["--quantization", "mxfp4"], "oss_fp8": ["--quantization", "oss_fp8"]}


def main() -> int:
    """Parse the command line, measure, write JSON and show a table."""
    parser = make_parser()
    args = parser.parse_args()
    if len(args.step_ms) != len(args.requests):
        parser.error(f"--step-ms {args.step_ms}: expected one per number of requests")
    loads = list(zip(args.requests, args.step_ms))
    head = {"kind": "oss_fused.bench_api_server", "environment": fingerprint()}
    rows: list[dict[str, Any]] = []
    try:
        with signals_as_exceptions(), tempfile.TemporaryDirectory() as scratch:
            for (requests, step_ms), arm in itertools.product(loads, ARMS):
                sizes = requests, step_ms, args.tokens, args.repeats
                rows.append(measure(Path(scratch), arm, *sizes))
                write_json(args.output, head | {"tokens": args.tokens, "loads": rows})
    except ServerError as error:
        print(f"bench_api_server: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print(f"bench_api_server: stopped by {type(error).__name__}", file=sys.stderr)
        return 130
    table = []
    for row in rows:
        rates = [f"{row['tokens_per_s'][kind]:.0f}" for kind in streaming.KINDS]
        table.append([row["arm"], str(row["requests"]), *rates, f"{row['ratio']:.3f}"])
    header = ["server", "requests", *(f"{kind}, tokens/s" for kind in streaming.KINDS), "ratio"]
    print(text_table(header, table), file=sys.stderr)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--requests", type=positive, nargs="+", default=[128, 200, 512], help="at once")
    add(
        "--step-ms", type=duration, nargs="+", default=[5.6, 7.0, 16.0], help="one for each of them"
    )
    add("--tokens", type=positive, default=128, help="of an answer (default: 128)")
    add("--repeats", type=positive, default=2, help="pairs of runs (default: 2)")
    add("--output", type=output_file, required=True, metavar="FILE", help="JSON to write")
    return parser


def measure(
    scratch: Path, arm: str, requests: int, step_ms: float, tokens: int, repeats: int
) -> dict[str, Any]:
    """Figures of one server at one load, as ``streaming.measure`` returns them, and the load."""
    model = scratch / "model"
    if not model.exists():
        make_model(model, get_shape("gpt-oss", "tiny"), "mxfp4")
    environment = {**CPU_ENVIRONMENT, **os.environ, "STEP_MS": str(step_ms)}
    flags = ["--max-num-seqs", str(requests), "--max-model-len", str(tokens + 64)]
    flags += ["--enforce-eager", *ARMS[arm]]
    plan = streaming.Plan(str(model), requests, 16, tokens, repeats)
    with Server(arm, str(model), flags, scratch / "log", environment, None, SERVER) as server:
        server.wait_until_healthy()
        found = streaming.measure(plan, server, streaming.vocabulary_of(str(model)))
    return {"arm": arm, "requests": requests, "step_ms": step_ms, **found}


if __name__ == "__main__":
    sys.exit(main())
