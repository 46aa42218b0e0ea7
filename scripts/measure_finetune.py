#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure what rounding a fine-tuned gpt-oss back to MXFP4 costs: perplexity, KL, top-1.

  measure_finetune.py --work /tmp/finetune --summary docs/results/h200/summary.json

Two models: the byte-level gpt-oss of the tests in bf16 ("trained"), and its MXFP4 form fine-tuned
in bf16 on Newton's Opticks ("tuned"). Each is calibrated by every rounding of calibrate.py, with
attention and head in bf16 so that nothing else is seen, and once with everything ("everything":
MXFP4 experts, FP8 attention and head). All run in transformers' model in float32 on held-out
texts. What is in --work already is taken from there. Minutes on two cores.
Exit codes: 0 measured, 1 a step failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import finetune, summary
from harness.arguments import Help, output_file, output_folder, summary_file
from harness.tiny_gpt_oss import Training, token_table, train_tiny

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint, portable
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.quant.dataset import load_tokenizer
from oss_fused.quant.pipeline import calibrate as run_recipe
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.run_options import RunOptions

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = ROOT / "tests/data/tiny_gpt_oss"
MODELS = ("trained", "tuned")
EXPERTS_ONLY = {"ignore": ("Linear",)}
DATA = {"rounding": "feedback", "self_check": "off"}
# arm -> settings of its recipe; those with data get the dataset
ARMS: dict[str, dict[str, Any]] = {
    "nearest": {"rounding": "nearest", **EXPERTS_ONLY},
    "mse": {"rounding": "mse", **EXPERTS_ONLY},
    "feedback": {**DATA, **EXPERTS_ONLY},
    "everything": DATA,
}
KEYS = ("perplexity_factor", "kl_divergence", "kl_divergence_p99", "top1_agreement")
# of the tuned model, whose original is known
BASE_ARMS = {"mse_base": ARMS["mse"]}


def main() -> int:
    """Run the steps that are not done yet, write JSON, show the figures."""
    args = parse_args()
    environment = fingerprint()
    try:
        finetune.write_texts(args.work)
        figures = {name: measured(args, name, make_model(args, name)) for name in args.models}
    except OssFusedError as error:
        print(f"measure_finetune: {error}", file=sys.stderr)
        return 1
    names = ("steps", "batch", "learning_rate", "num_samples", "max_bytes")
    results = {
        "kind": "oss_fused.finetune",
        "environment": environment,
        "engine": "transformers in float32, weights dequantised, inputs of FP8 linears rounded",
        "settings": {name: getattr(args, name) for name in names},
        "models": figures,
    }
    write_json(args.output, portable(results))
    if args.summary and len(figures) == len(MODELS):
        summary.merge_summary(args.summary, headline(figures), args.output)
    print(show(figures), file=sys.stderr)
    return 0


def parse_args() -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--work", type=output_folder, required=True, help="folder for texts and checkpoints")
    output = ROOT / "docs/results/cpu/finetune_mxfp4.json"
    add("--output", type=output_file, default=output, help="JSON file to write")
    add(
        "--summary",
        type=summary_file,
        help="summary.json to add finetune.tiny.* to, with both models",
    )
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="default: both")
    add("--steps", type=int, default=40, help="of fine-tuning (default: 40)")
    add("--batch", type=int, default=4, help="windows of 512 bytes a step (default: 4)")
    add("--learning-rate", type=float, default=5e-4, help="default: 0.0005")
    add("--num-samples", type=int, default=256, help="of calibration (default: 256)")
    add("--max-bytes", type=int, default=8192, help="of each held-out text (default: 8192)")
    return parser.parse_args()


def make_model(args: argparse.Namespace, name: str) -> Path:
    """A bf16 model; beside the tuned one there is the MXFP4 one that it comes from."""
    if name == "trained":
        return ORIGIN
    base, tuned = args.work / "original", args.work / "tuned"
    if not base.is_dir():
        finetune.pack_experts(ORIGIN, base)
    if not tuned.is_dir():
        settings = Training(
            steps=args.steps,
            batch=args.batch,
            learning_rate=args.learning_rate,
            save_every=20,
            start=str(base),
            texts=(str(args.work / "tuning.txt"),),
        )
        train_tiny(tuned, settings, torch.device("cpu"), say_step)
    return tuned


def say_step(step: int, loss: float, seconds: float) -> None:
    """A line of training's progress."""
    print(f"step {step}: {loss:.3f} nats a byte, {seconds:.0f} s", file=sys.stderr, flush=True)


def measured(args: argparse.Namespace, name: str, model: Path) -> dict[str, Any]:
    """Figures of one model, from --work if they are there."""
    path = args.work / f"{name}.json"
    if not path.is_file():
        write_json(path, measure(args, name, model))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure(args: argparse.Namespace, name: str, model: Path) -> dict[str, Any]:
    """Figures of one model: how each arm was made, and what each held-out text says."""
    arms = {arm: {**settings} for arm, settings in ARMS.items()}
    if name == "tuned":
        base = str(args.work / "original")
        arms |= {arm: {**settings, "base": base} for arm, settings in BASE_ARMS.items()}
    folders = {arm: args.work / f"{name}-{arm}" for arm in arms}
    made = {arm: calibrate(args, model, folders[arm], arms[arm]) for arm in arms}
    table = token_table(load_tokenizer(model))
    texts = {
        text: (data, finetune.windows(data, table, args.max_bytes))
        for text, data in finetune.held_out_texts().items()
    }
    served = finetune.load_served(model)
    reference = {text: finetune.log_probabilities(served, ids) for text, (_, ids) in texts.items()}
    told: dict[str, Any] = {
        text: {
            "sha256": hashlib.sha256(data).hexdigest(),
            "tokens": ids.numel(),
            "perplexity": finetune.perplexity(reference[text], ids),
            "arms": {},
        }
        for text, (data, ids) in texts.items()
    }
    for arm, folder in folders.items():
        served = finetune.load_served(folder)
        for text, (_, ids) in texts.items():
            own = finetune.log_probabilities(served, ids)
            told[text]["arms"][arm] = finetune.compare(reference[text], own, ids)
    return {"model": model.name, "arms": made, "texts": told}


def calibrate(
    args: argparse.Namespace, model: Path, output: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """Make an arm's checkpoint, if it is not there; what its calibration.json says of experts."""
    if not output.is_dir():
        dataset = {"dataset": str(args.work / "calibration.txt"), "num_samples": args.num_samples}
        data = dataset if settings["rounding"] == "feedback" else {}
        began = time.monotonic()
        run_recipe(make_recipe({**settings, **data, "experts": "mxfp4"}), RunOptions(model, output))
        print(f"{output.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    record = load_record(output)
    return {
        "expert_rounding": record.expert_rounding,
        "calibration_tokens": record.tokens,
        "blocks": sum(layer.mxfp4_blocks or 0 for layer in record.layers),
        "base_blocks": sum(layer.base_blocks or 0 for layer in record.layers),
    }


def headline(figures: dict[str, Any]) -> dict[str, float]:
    """The worst text of both models: KL over nearest's, and the factor with everything."""
    texts = [text["arms"] for model in figures.values() for text in model["texts"].values()]

    def over_nearest(arm: str) -> float:
        kl = "kl_divergence"
        return round(max(arms[arm][kl] / arms["nearest"][kl] for arms in texts), 4)

    return {
        "finetune.tiny.kl_feedback_over_nearest_max": over_nearest("feedback"),
        "finetune.tiny.kl_least_error_over_nearest_max": over_nearest("mse"),
        "finetune.tiny.everything_factor": round(
            max(arms["everything"]["perplexity_factor"] for arms in texts), 5
        ),
    }


def show(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [
        [model, text, arm, *(f"{value[key]:.4f}" for key in KEYS)]
        for model, found in figures.items()
        for text, of_text in found["texts"].items()
        for arm, value in of_text["arms"].items()
    ]
    return text_table(["model", "text", "arm", *KEYS], rows)


if __name__ == "__main__":
    sys.exit(main())
