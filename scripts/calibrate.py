#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Make an FP8 checkpoint from a Hugging Face one (bf16, fp16, fp32 or MXFP4 gpt-oss).

    calibrate.py MODEL --output MODEL-oss-fp8

A fine-tuned gpt-oss, whole or as a LoRA adapter, becomes MXFP4 again (docs/calibration.md):

    calibrate.py MY-FINE-TUNE --output OUT --experts mxfp4 --dataset chats.jsonl
    calibrate.py BASE --adapter MY-LORA --output OUT --experts mxfp4
    calibrate.py MY-FINE-TUNE --output OUT --format oss-fp8 --format mxfp4   # also for vLLM alone

Without --dataset only weights are read, and activations are quantised per token as the model is
served. With --dataset the model runs layer by layer on it. Memory holds one layer at a time.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import calibrate_options
from harness.calibration_report import FOLDER, append_trend, figures_of, write_report
from tqdm import tqdm

from oss_fused.errors import OssFusedError, SchemeError
from oss_fused.quant.calibrator import Run, Summary
from oss_fused.quant.pipeline import (
    BOTH,
    calibrate,
    calibrate_both,
    end_replacements,
    is_finished,
    rehearse,
)
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.run_options import RunOptions

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = calibrate_options.make_parser(__doc__).parse_args(argv)
    both = set(args.formats or ()) == set(BOTH)
    # what an interrupted run is judged by: of two checkpoints the one that is made last
    output = args.output / BOTH[-1] if both else args.output
    before = None
    try:
        before = _inode(output)
        recipe = make_recipe(calibrate_options.settings_of(args))
        if args.fp8_stage and recipe.accuracy_target is None:
            raise SchemeError(
                f"--fp8-stage={str(args.fp8_stage)!r}: is where a search begins; expected "
                f"--accuracy-target beside it"
            )
        options = RunOptions(
            model=args.model,
            output=args.output,
            adapter=args.adapter,
            device=args.device,
            resume=args.resume,
            overwrite=args.overwrite,
            max_shard_bytes=args.max_shard_size,
            stage=args.fp8_stage,
            kept={"--trend": args.trend} if args.trend else {},
        )
        if not args.dry_run:
            end_replacements(options, both)
        if is_finished(recipe, options, both):
            tell(f"{args.output}: finished already, with these settings; nothing to do")
            return 0
        if args.dry_run:
            for run in rehearse(recipe, options, both):
                describe(run)
            return 0
        pages = partial(write_pages, trend=args.trend)
        if both:
            summaries = calibrate_both(recipe, options, show_progress, tell, pages)
        else:
            summaries = [calibrate(recipe, options, show_progress, tell, complete=pages)]
    except OssFusedError as error:
        message = calibrate_options.with_flags(str(error), args)
        print(f"calibrate.py: error: {message}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        remedy = "go on with the same command and --resume"
        print(f"\ncalibrate.py: interrupted; {fate(output, before, remedy)}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # what is beside the output has a longer name
            print(f"calibrate.py: error: {error}", file=sys.stderr)
            return USAGE_ERROR
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "go on with the same command and --resume"
        remedy = f"free some space, then {remedy}" if full else remedy
        print(f"calibrate.py: error: {error}; {fate(output, before, remedy)}", file=sys.stderr)
        return FAILURE
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        remedy = "free some memory or take fewer samples; the same command with --resume goes on"
        what = str(error).partition("\n")[0]
        print(
            f"calibrate.py: error: out of memory: {what}; {fate(output, before, remedy)}",
            file=sys.stderr,
        )
        return FAILURE
    for summary in summaries:
        report(summary)
    return 0


def fate(output: Path, before: int | None, remedy: str) -> str:
    """Whether an interrupted run finished ``output``, and what to do if not."""
    if _inode(output) not in (None, before):
        return f"{output} is complete"
    return f"{output} was not made; {remedy}"


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def show_progress(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Tensors or layers under a progress bar."""
    unit = "tensor" if what == "Calibrating" else "layer"
    bar = tqdm(items, desc=what, unit=unit, dynamic_ncols=True)
    for item in bar:
        layer = getattr(item, "layer", None)
        if layer is not None:
            bar.set_postfix_str(f"layer {layer}", refresh=False)
        yield item


def tell(line: str) -> None:
    """Print a line for the user."""
    print(line, file=sys.stderr)


def describe(run: Run) -> None:
    """Say what a run would make."""
    plan = run.plan
    quantised = [name for name, scheme in plan.schemes.items() if scheme is not None]
    kept = [name for name, scheme in plan.schemes.items() if scheme is None]
    merged = run.reader.adapter
    adapter = [f"adapter        {merged.folder}, {len(merged.changed)} tensors"] if merged else []
    lines = [
        f"model          {run.options.model} ({run.skeleton.family}, {run.skeleton.layers} layers)",
        f"output         {run.options.output} ({run.recipe.format})",
        *adapter,
        f"scheme         {run.recipe.scheme}",
        f"linears        {len(quantised)} in FP8, {len(kept)} kept{_some(kept)}",
        f"experts        {plan.experts or 'none'}",
        f"KV scales      {'calibrated' if plan.kv_scales else 'none'}",
        f"size           {_gb(run.reader.total_bytes())} -> {_gb(run.output_bytes)}",
        "dry run: nothing was written",
    ]
    print("\n".join(lines), file=sys.stderr)


def report(summary: Summary) -> None:
    """The final summary: sizes, worst layers, next command."""
    sizes = f"{_gb(summary.source_bytes)} -> {_gb(summary.output_bytes)}"
    share = f"{summary.quantised} of {summary.linears} linears in FP8"
    lines = [f"{summary.output}: {share}, {sizes} in {summary.seconds:.0f} s"]
    worst = summary.worst()
    if worst:
        lines.append("largest relative errors:")
        for name, metrics in worst:
            output = f", output {metrics['output_error']:.2%}" if "output_error" in metrics else ""
            lines.append(f"  {name}: weight {metrics['weight_error']:.2%}{output}")
    if summary.unrouted:
        lines.append(
            f"{len(summary.unrouted)} experts saw no calibration token and are rounded plainly"
            f"{_some(list(summary.unrouted))}"
        )
    if summary.few:
        lines.append(
            f"{len(summary.few)} experts saw fewer calibration tokens than they have inputs and "
            f"are rounded without feedback{_some(list(summary.few))}; more --num-samples help"
        )
    if summary.base_blocks is not None:
        kept = summary.base_blocks / summary.blocks
        lines.append(f"{kept:.1%} of the MXFP4 blocks are those of --base, bit for bit")
    lines.append(f"next: vllm serve {summary.output}")
    page = summary.output / FOLDER / "report.html"
    if page.is_file():
        lines.append(f"report: {page}")
    print("\n".join(lines), file=sys.stderr)


def write_pages(output: Path, trend: Path | None) -> None:
    """Write OUTPUT/report; the checkpoint is made even if that fails."""
    try:
        record = load_record(output)
        runs = append_trend(trend, record, figures_of(record)) if trend else []
        write_report(output / FOLDER, record, runs=runs)
    except Exception as error:
        print(f"calibrate.py: warning: no report: {error}", file=sys.stderr)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.2f} MB"


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""


if __name__ == "__main__":
    sys.exit(main())
