#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure an FP8 KV cache against a bf16 one: decode and prefill times, and KL of logits.

Two engines of each kind run side by side on one device. One pair is compiled and in CUDA graphs as
it serves; bench_decode.py's loads are measured on it in turn. The other pair is eager: it reads
random prompts, and the logits of their last tokens are compared over the whole vocabulary.

  bench_kv_cache.py /tmp/gpt-oss-20b --name gpt_oss_20b \
      --output docs/results/h200/kv_fp8.json --summary docs/results/h200/summary.json

Weights may be random (scripts/make_model.py): attention then spreads over the whole context, and
KL says nothing about text. evaluate.py measures perplexity and needles of trained models.

Exit codes: 0 measured, 1 an engine failed or a signal came (what was measured is written), 2 bad
arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import decode, decode_figures, processes, summary
from harness.arguments import Help, duration, output_file, positive, summary_file
from harness.arms import CPU_ENVIRONMENT, Arm, check_model
from harness.decode_limits import load_config
from harness.kv_cache_worker import TAILS

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint, has_gpu, portable
from oss_fused.errors import ServerError
from oss_fused.files import write_json

WORKER = (sys.executable, "-m", "harness.kv_cache_worker")
KINDS = {"bf16": "bfloat16", "fp8": "fp8"}
CONTEXTS, BATCHES = (8192, 32768), (1, 8, 32)
# positions of the largest load: its cache has to fit twice beside four engines
MOST_POSITIONS = 8 * 32768
# tokens of an engine step
STEP = 8192
PROMPTS = 2


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, write JSON and show the table."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_model(args.model)
        config = load_config(args.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if min(args.contexts) <= max(TAILS.values()):
        least = max(TAILS.values()) + 1
        parser.error(f"--contexts {min(args.contexts)}: expected at least {least}")
    results: dict[str, Any] = {
        "kind": "oss_fused.kv_cache",
        "environment": fingerprint(),
        "settings": {n: getattr(args, n) for n in ("name", "contexts", "batches", "flags", "seed")}
        | {"config": config},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="oss-fused-kv-") as folder:
            measure(args, int(config["vocab_size"]), results, Path(folder))
    except (KeyboardInterrupt, processes.Terminated) as error:
        results.setdefault("errors", []).append(f"stopped by {type(error).__name__}")
    write(args, results)
    print(show(results), file=sys.stderr)
    return int("errors" in results)


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("model", help="checkpoint folder")
    add("--output", type=output_file, required=True, help="JSON file to write")
    add("--name", help="of the model in the summary (default: the folder's)")
    add(
        "--contexts", type=positive, nargs="+", default=list(CONTEXTS), help="tokens of the prompts"
    )
    add("--batches", type=positive, nargs="+", default=list(BATCHES), help="sequences that decode")
    add("--rounds", type=positive, default=2, help="measurements per load and arm (default: 2)")
    add("--flags", type=shlex.split, default=["--quantization", "oss_fp8"], help="of all engines")
    add("--seconds", type=duration, help="begin nothing after this long; what was measured counts")
    add("--seed", type=int, default=1, help="of the prompts (default: 1)")
    add("--startup-timeout", type=duration, default=400.0, help="seconds to start (default: 400)")
    add("--summary", type=summary_file, help="flat JSON for the speed-up at the longest context")
    return parser


def measure(args: argparse.Namespace, vocab: int, results: dict[str, Any], folder: Path) -> None:
    """Run both pairs; fills "quality", "speed" and "errors" of ``results``."""

    def failed(error: Exception) -> None:
        print(f"bench_kv_cache: {error}", file=sys.stderr, flush=True)
        results.setdefault("errors", []).append(str(error).splitlines()[0])

    def keep(measured: dict[str, Any]) -> None:
        # after every load: a signal, or a kill, leaves what there is
        cells = decode_figures.condense(measured["measurements"], "fp8", ["bf16"])
        results["speed"] = {"cells": cells} | {k: v for k, v in measured.items() if k != "profiles"}
        write_json(args.output, portable(results))

    def collect() -> None:
        try:
            results["quality"] = quality.figures()
            print("quality: measured", file=sys.stderr, flush=True)
        except ServerError as error:
            failed(error)
        write(args, results)

    # in a thread: what is measured is written even if the other pair never starts
    waiting = threading.Thread(target=collect, daemon=True)
    with ExitStack() as stack, processes.signals_as_exceptions():
        # last of all, behind the end of its engines: two writers of one file would meet
        stack.callback(lambda: waiting.join() if waiting.is_alive() else None)
        quality = Quality(args, vocab, folder, stack)
        waiting.start()
        try:
            # nothing else may use the device while times are taken
            measured = decode.run(speed_plan(args), folder, waiting.join, keep)
        except ServerError as error:
            failed(error)
            waiting.join()
            return
    keep(measured)
    if measured.get("stopped", decode.TIME_IS_UP) != decode.TIME_IS_UP:
        failed(ServerError(measured["stopped"]))


def speed_plan(args: argparse.Namespace) -> decode.DecodeBenchmark:
    """The loads of the compiled pair."""
    cells = [
        decode.Cell(batch, context, max(48, 384 // batch))
        for context in args.contexts
        for batch in args.batches
        if batch * context <= max(MOST_POSITIONS, context)
    ]
    cells += [decode.Cell(1, context, 0) for context in args.contexts]
    flags = [*args.flags, "--max-num-batched-tokens", str(STEP)]
    if has_gpu():
        # the size of the cache is given: this is only compared with the free memory
        flags += ["--gpu-memory-utilization", "0.15"]
    return decode.DecodeBenchmark(
        arms=[
            Arm(name, args.model, (*flags, "--kv-cache-dtype", dtype))
            for name, dtype in KINDS.items()
        ],
        cells=cells,
        rounds=args.rounds,
        gpu=has_gpu(),
        seed=args.seed,
        startup_timeout=args.startup_timeout,
        deadline=time.monotonic() + args.seconds if args.seconds else math.inf,
    )


class Quality:
    """The eager pair, which starts at once and works on its own."""

    def __init__(
        self, args: argparse.Namespace, vocab: int, folder: Path, stack: ExitStack
    ) -> None:
        """Start both; ``stack`` ends them."""
        generator = np.random.default_rng(args.seed)
        prompts = folder / "prompts.npz"
        lengths = [context for context in args.contexts for _ in range(PROMPTS)]
        arrays = [generator.integers(100, vocab - 100, length) for length in lengths]
        np.savez(prompts, *arrays)
        flags = [*args.flags, "--enforce-eager", "--enable-prefix-caching"]
        flags += ["--no-async-scheduling", "--max-num-seqs", "1"]
        flags += ["--max-model-len", str(max(args.contexts) + 16)]
        flags += ["--max-num-batched-tokens", str(min(STEP, max(args.contexts)))]
        if has_gpu():
            flags += ["--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", "4G"]
        common = dict(os.environ) if has_gpu() else CPU_ENVIRONMENT | dict(os.environ)
        common["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._patience = args.startup_timeout
        self._workers = []
        for name, dtype in KINDS.items():
            job, log_path = folder / f"quality-{name}.json", folder / f"quality-{name}.log"
            output = folder / f"quality-{name}.out.json"
            settings = {
                "model": args.model,
                "flags": [*flags, "--kv-cache-dtype", dtype],
                "prompts": str(prompts),
                "states": str(folder / "states.pt"),
                "is_reference": name == "bf16",
                "output": str(output),
            }
            job.write_text(json.dumps(settings))
            command = [*WORKER, str(job)]
            with log_path.open("wb") as log:
                process = processes.start(command, log, common)
            stack.callback(processes.stop, process)
            self._workers.append((name, process, log_path, output))

    def figures(self) -> dict[str, Any]:
        """Figures of the prompts, by worker, when both have ended.

        Raises:
            ServerError: one failed or takes too long; the message has the tail of its log.
        """
        found = {}
        deadline = time.monotonic() + self._patience
        for name, process, log_path, output in self._workers:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.poll() != 0:
                lines = log_path.read_text(errors="replace").splitlines()[-25:]
                shown = "\n    ".join(line[:300] for line in lines)
                state = "is too slow" if process.poll() is None else "failed"
                raise ServerError(f"quality, {name} cache: {state}\n    {shown}")
            found[name] = json.loads(output.read_text())
        return found


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far, and its named figures."""
    results = portable(results)
    write_json(args.output, results)
    longest = max(args.contexts)
    cells = [
        cell["speedup"]
        for cell in results.get("speed", {}).get("cells", [])
        if cell["context"] == longest and cell["steps"]
    ]
    if args.summary and cells:
        name = f"kv_fp8.{args.name or Path(args.model).name}.speedup_{longest // 1024}k"
        summary.merge_summary(args.summary, {name: round(min(cells), 4)}, args.output)


def show(results: dict[str, Any]) -> str:
    """The figures as two tables."""
    rows = [
        [
            f"{'decode' if cell['steps'] else 'prefill'} {cell['batch']} x {cell['context']}",
            f"{cell['arms']['bf16']['ms']:.3f}",
            f"{cell['arms']['fp8']['ms']:.3f}",
            f"{cell['speedup']:.3f}",
        ]
        for cell in results.get("speed", {}).get("cells", [])
    ]
    quality = results.get("quality", {"bf16": {"prompts": []}, "fp8": {"prompts": []}})
    pairs = zip(quality["bf16"]["prompts"], quality["fp8"]["prompts"], strict=True)
    distances = [
        [
            str(fp8["context"]),
            kind,
            f"{f['kl']:.3e}",
            f"{f['kl_p99']:.3e}",
            f"{f['top1_agreement']:.4f}",
        ]
        for bf16, fp8 in pairs
        for kind, f in (*fp8.items(), *bf16.items())
        if kind != "context"
    ]
    return "\n".join(
        [
            text_table(["load", "bf16 ms", "fp8 ms", "speed-up"], rows),
            "",
            text_table(["context", "pass", "KL", "KL p99", "same top token"], distances),
            *results.get("errors", []),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
