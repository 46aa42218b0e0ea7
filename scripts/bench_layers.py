#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Time a chain of decoder layers on one NVIDIA GPU: microseconds per layer of a decode step.

The layers have the real shapes and random weights, and run the operators of a served model in one
CUDA graph. A kernel's time depends on its neighbours, whose weights arrive while it runs: this
shows what a change is worth in a model, without an engine and its host.

--against FOLDER times the package of another checkout as well, in turn: a process for each, one
replays while the other waits.

    python scripts/bench_layers.py --model llama-3-8b --tokens 1 8 32 --output layers.json
    git worktree add /tmp/before HEAD~1
    python scripts/bench_layers.py --against /tmp/before --output layers.json

The JSON is written after each number of tokens. Exit codes: 0 measured, 1 no GPU or a process
failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.arguments import Help, output_file, positive

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("gpt-oss-20b", "gpt-oss-120b", "llama-3-8b")
REPLAYS = 10


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="shape of the layers")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[1, 8, 32, 128], help="sequences of a step"
    )
    parser.add_argument("--context", type=positive, default=130, help="cached positions of each")
    parser.add_argument("--layers", type=positive, default=4, help="layers, of own weights each")
    parser.add_argument("--turns", type=positive, default=15, help="measurements of each checkout")
    parser.add_argument("--against", type=_checkout, help="root of another checkout")
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser


def _checkout(text: str) -> Path:
    path = Path(text)
    if not (path / "oss_fused" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text}: expected a folder that holds oss_fused")
    return path


def work(arguments: argparse.Namespace) -> int:
    """For each number of tokens read from stdin print microseconds per layer, until stdin ends."""
    import torch
    from harness.layers import SHAPES, Chain

    import oss_fused
    from oss_fused.bench.timing import capture

    found = Path(oss_fused.__file__).resolve().parents[1]
    if found != arguments.worker.resolve():
        raise SystemExit(f"oss_fused is imported from {found}: expected {arguments.worker}")
    chain = Chain(SHAPES[arguments.model], arguments.layers, torch.device("cuda"))
    graphs: dict[int, Any] = {}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for line in sys.stdin:
        tokens = int(line)
        if tokens not in graphs:
            step = chain.prepare(tokens, arguments.context)
            step()
            torch.cuda.synchronize()
            # the graph reads the step's tensors, which live as long as it does
            graphs[tokens] = (*capture([step]), step)
        graph = graphs[tokens][0]
        # what ran before left dirty lines in L2: the first replay writes them back
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        print(1e3 * start.elapsed_time(end) / REPLAYS / arguments.layers, flush=True)
    return 0


def ask(worker: subprocess.Popen[str], tokens: int) -> float:
    """One measurement of ``worker``.

    Raises:
        RuntimeError: it ended.
    """
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(f"{tokens}\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"a process ended with {worker.wait()}; its error is above")
    return float(answer)


def _start(root: Path) -> subprocess.Popen[str]:
    """A process that measures the package of the checkout ``root``."""
    # the command line's own modules import the package already
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--worker", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def measure(
    arguments: argparse.Namespace,
    checkouts: dict[str, Path],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each number of tokens: median, least and greatest of each checkout's turns.

    ``keep`` is given the rows so far after each.
    """
    workers = {name: _start(root) for name, root in checkouts.items()}
    rows = []
    try:
        for tokens in arguments.tokens:
            # the first compiles
            times: dict[str, list[float]] = {name: [] for name in workers}
            for turn in range(arguments.turns + 1):
                for name, worker in workers.items():
                    us = ask(worker, tokens)
                    if turn:
                        times[name].append(us)
            row: dict[str, Any] = {"tokens": tokens}
            for name, found in times.items():
                row[name] = {"us": statistics.median(found), "min": min(found), "max": max(found)}
            rows.append(row)
            keep(rows)
            print(line(row), flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    shown = [f"{row['tokens']:5} tokens"]
    shown += [
        f"{name} {row[name]['us']:.2f} us ({row[name]['min']:.2f} to {row[name]['max']:.2f})"
        for name in row
        if name != "tokens"
    ]
    if "against" in row:
        shown.append(f"{row['against']['us'] / row['here']['us']:.3f}x")
    return "  ".join(shown)


def main() -> int:
    """Parse the command line and measure."""
    arguments = build_parser().parse_args()
    if arguments.worker:
        return work(arguments)
    sys.path.insert(0, str(ROOT))
    import torch

    if not torch.cuda.is_available():
        print("bench_layers: needs an NVIDIA GPU", file=sys.stderr)
        return 1
    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json

    checkouts = {"here": ROOT}
    if arguments.against:
        checkouts["against"] = arguments.against.resolve()
    settings = {name: getattr(arguments, name) for name in ("model", "context", "layers", "turns")}
    head = {"kind": "oss_fused.layers", "environment": fingerprint(), "settings": settings}

    def keep(rows: list[dict[str, Any]]) -> None:
        if arguments.output:
            write_json(arguments.output, head | {"rows": rows})

    try:
        measure(arguments, checkouts, keep)
    except RuntimeError as failure:
        print(f"bench_layers: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
