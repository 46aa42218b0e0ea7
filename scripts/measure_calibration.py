#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a calibration costs: time by stage, and the host memory it needs at its peak.

  make_model.py --arch gpt-oss --size 20b --format mxfp4 --output /tmp/gpt-oss-20b
  measure_calibration.py /tmp/gpt-oss-20b --num-samples 4 --output calibration_20b.json

A fine-tuned gpt-oss-20b, from two layers of its shape: memory holds one layer at a time, so the
peak of all 24 is theirs.

  make_model.py --arch gpt-oss --size 20b --layers 2 --output /tmp/two-layers
  measure_calibration.py /tmp/two-layers --experts mxfp4 --kv-cache none --output finetune.json

Calibrates as calibrate.py does, with error feedback, an FP8 lm_head where that is the default, and
KV scales; the checkpoint is dropped. Resident memory counts the pages of the source that are
mapped, which the system takes back when it needs them; anonymous memory is what must be there.
Exit codes: 0 measured, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from harness.arguments import output_file, summary_file
from harness.summary import merge_summary

from oss_fused.environment import fingerprint
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.quant import expert_stream, streaming
from oss_fused.quant.calibrator import Run
from oss_fused.quant.checkpoint.writer import CheckpointWriter
from oss_fused.quant.export import Exporter
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.run_options import RunOptions
from oss_fused.quant.runner import LayerRunner
from oss_fused.quant.streaming import LayerStream

HEAD, REST = "lm_head", "rest"
# what is timed: the innermost counts, but all that lm_head takes is lm_head's
STAGES: tuple[tuple[Any, str, str], ...] = (
    (LayerRunner, "load", "read a layer"),
    (LayerRunner, "forward", "run samples"),
    (streaming, "input_basis", "round"),
    (streaming, "round_with_feedback", "round"),
    (expert_stream, "round_with_feedback", "round"),
    (LayerStream, "run_head", HEAD),
    (LayerStream, "commit", "save states"),
    (Exporter, "run", "judge weights"),
    (CheckpointWriter, "write", "write tensors"),
    (CheckpointWriter, "finish", "sync to disk"),
)


class Stages:
    """Seconds and peaks of memory by stage."""

    def __init__(self) -> None:
        """Begin outside every stage."""
        self.now = REST
        self.since = time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)
        self.anonymous: dict[str, float] = defaultdict(float)
        self.resident = 0.0

    def enter(self, stage: str) -> str:
        """Another stage begins; returns the one before."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        time_now, before = time.monotonic(), self.now
        self.seconds[before] += time_now - self.since
        self.now, self.since = stage, time_now
        return before

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """``function``, whose time is that of ``stage``."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(self.now if self.now == HEAD else stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return run

    def table(self) -> str:
        """A line for each stage, the longest first."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        return "\n".join(
            f"{name:15} {seconds:7.1f} s  {self.anonymous[name]:6.2f} GiB"
            for name, seconds in longest
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the stages and look at this process's memory every 20 ms."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                lines = Path("/proc/self/status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                anonymous, resident = (
                    int(status[field].split()[0]) / 2**20 for field in ("RssAnon", "VmHWM")
                )
                self.anonymous[self.now] = max(self.anonymous[self.now], anonymous)
                self.resident = resident

        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in STAGES]
        for (owner, name, stage), (_, _, original) in zip(STAGES, originals):
            setattr(owner, name, self.timed(original, stage))
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
            self.enter(REST)
            for owner, name, original in originals:
                setattr(owner, name, original)


def main(argv: list[str] | None = None) -> int:
    """Calibrate, write JSON, print a table."""
    args = parse_args(argv)
    recipe = {"dataset": "python", "kv_cache": args.kv_cache, "experts": args.experts}
    sizes = {"num_samples": args.num_samples, "max_seq_length": args.max_seq_length}
    stages = Stages()
    try:
        if args.work:
            args.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.work or args.model.parent) as work:
            options = RunOptions(args.model, Path(work) / "out", args.device)
            with stages.watched():
                run = Run(make_recipe({**recipe, **sizes}), options)
                model: Any = run.skeleton.model
                layer = max(
                    sum(p.numel() for p in layer.parameters()) for layer in model.model.layers
                )
                summary = run.execute()
    except (OssFusedError, OSError) as error:
        print(f"measure_calibration: {error}", file=sys.stderr)
        return 2
    finally:
        print(stages.table(), file=sys.stderr)  # an interrupted run tells where it was
    figures = {
        "kind": "oss_fused.measure_calibration",
        "environment": fingerprint(),
        "device": run.device.type,
        **sizes,
        "layers": run.skeleton.layers,
        "largest_layer_float32_gib": layer * 4 / 2**30,
        "experts": run.plan.experts,
        "kv_cache": args.kv_cache,
        "source_gib": summary.source_bytes / 2**30,
        "linears_in_fp8": summary.quantised,
        **used(stages, run.device.type == "cuda"),
    }
    write_json(args.output, figures)
    if args.summary:
        named = {args.summary_name: round(stages.resident, 2)}
        if args.summary_anonymous:
            named = {args.summary_anonymous: round(figures["peak_anonymous_gib"], 2)}
        merge_summary(args.summary, named, args.output)
    print(
        f"{figures['seconds']:.1f} s; at its peak {figures['peak_anonymous_gib']:.2f} GiB "
        f"anonymous, {stages.resident:.2f} GiB resident with the mapped source",
        file=sys.stderr,
    )
    return 0


def used(stages: Stages, gpu: bool) -> dict[str, Any]:
    """Time and memory that the run took."""
    return {
        "seconds": sum(stages.seconds.values()),
        "peak_resident_gib": stages.resident,
        "peak_anonymous_gib": max(stages.anonymous.values()),
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        "stages": {
            name: {"seconds": seconds, "peak_anonymous_gib": stages.anonymous[name]}
            for name, seconds in stages.seconds.items()
        },
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the checkpoint")
    add("--output", type=output_file, required=True, metavar="JSON", help="file to write")
    add("--summary", type=summary_file, metavar="JSON", help="file of named figures to add to")
    add("--summary-name", default="calibration.peak_gib_20b", help="default: %(default)s")
    add("--summary-anonymous", metavar="NAME", help="name of the anonymous memory's peak there")
    add("--experts", default="auto", help="as calibrate.py takes it (default: auto)")
    add("--kv-cache", default="fp8", help="as calibrate.py takes it (default: fp8)")
    add("--num-samples", type=int, default=4, help="default: 4")
    add("--max-seq-length", type=int, default=512, help="default: 512")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--work", type=Path, help="where the checkpoint is made (default: beside MODEL)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
