#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Serve models with `vllm serve`, measure each with `vllm bench serve`, and compare them.

The first --arm is the baseline, or those of --baseline are: each figure is compared with the
baseline that is best in it. An arm is NAME=MODEL with any `vllm serve` flags after it, and
environment variables before the model:

  compare.py --arm bf16=models/M --arm "oss_fp8=models/M --quantization oss_fp8" --output results/m
  compare.py --arm "a=OSS_FUSED_BACKEND=torch M" --arm "b=OSS_FUSED_BACKEND=triton M" --output ...

Writes results.json (every run, environment, settings), report.md with its charts, report.html and
server-logs.txt, all of them or none. What was measured before a server died, a signal came or
anything else failed goes to OUTPUT.incomplete, with the cause; OUTPUT.unfinished.json has it after
every run. Servers are stopped whatever happens. On a GPU, one start-up instead of several:
--rounds 1 --repeats 3 --together --serve-flags="--cudagraph-capture-sizes 1 2 4 8 16 32".

Exit codes: 0 compared, 1 a server or something else failed, 2 bad arguments, 130 stopped by a
signal.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import compare, compare_report, streaming, summary
from harness.arguments import content_of
from harness.arms import check_model
from harness.compare_options import make_parser
from harness.grid import make_grid
from harness.processes import Terminated, signals_as_exceptions
from harness.server import Server

from oss_fused.environment import fingerprint, has_gpu
from oss_fused.errors import OssFusedError, ServerError
from oss_fused.files import writable, write_json

_GPU_WARMUPS = 4
_STREAMED_PAIRS = 2
_SIGNALS = (KeyboardInterrupt.__name__, Terminated.__name__)


def main() -> int:
    """Parse the command line, compare, write the results."""
    parser = make_parser(__doc__)
    args = parser.parse_args()
    try:
        if args.render:
            check_render(parser, args)
            folder = args.render
            results = condensed(json.loads((folder / "results.json").read_text()))
            write_json(folder / "results.json", results)
            compare_report.render(results, folder)
        else:
            check(parser, args)
            folder, results = measure(args)
        if results["cells"]:
            add_to_summary(args, folder / "results.json", results)
    except (OssFusedError, OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print(f"compare: stopped by {type(error).__name__}; servers ended", file=sys.stderr)
        return 130
    print(compare_report.make_report(results, draw=False).text(), file=sys.stderr)
    print(f"wrote {folder}/report.html, report.md and results.json", file=sys.stderr)
    if "stopped" in results and not args.render:
        cause = f"{results['stopped']}: {results['failure']}"
        print(f"compare: stopped early by {cause}; servers ended", file=sys.stderr)
        return 130 if results["stopped"] in _SIGNALS else 1
    return 0


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error where arguments contradict each other or files are missing."""
    if not args.arm or not args.output:
        parser.error("--arm and --output are required (or --render)")
    names = [arm.name for arm in args.arm]
    if len(set(names)) != len(names):
        parser.error(f"--arm: names must differ, got {', '.join(names)}")
    if args.port is not None and not 0 < args.port <= 65535 - len(names):
        parser.error(f"--port {args.port}: expected 1 to {65535 - len(names)}")
    args.baseline = args.baseline or names[:1]
    if args.warmups is None:
        args.warmups = _GPU_WARMUPS if has_gpu() else 0
    if args.warmups < 0:
        parser.error(f"--warmups {args.warmups}: expected at least 0")
    if not set(args.baseline) <= set(names):
        parser.error(f"--baseline {args.baseline}: expected some of {', '.join(names)}")
    check_summary(parser, args, [name for name in names if name not in args.baseline])
    if args.quality:
        check_json(parser, "--quality", args.quality, "texts")
    try:
        for arm in args.arm:
            check_model(arm.model)
            if args.streamed and arm.name not in args.baseline:
                streaming.vocabulary_of(arm.model)  # which needs the checkpoint's config.json
        args.grid = make_grid(args.lengths, args.concurrency, args.num_prompts)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # a link stands for its target
    args.output = Path(os.path.realpath(args.output))
    if args.output.exists() and not args.overwrite:
        parser.error(f"--output {args.output}: exists; choose another, or pass --overwrite")
    if args.output.exists() and not is_comparison(args.output):
        parser.error(f"--output {args.output}: is no earlier comparison; not overwriting it")
    try:
        writable(args.output)
    except OSError as error:
        parser.error(f"--output {args.output}: cannot be written: {error}")


def is_comparison(folder: Path) -> bool:
    """Whether ``folder`` holds what a comparison writes, and nothing else."""
    own = {*compare_report.FILES, *compare_report.CHARTS}
    try:
        found = json.loads((folder / "results.json").read_text())
        strange = {path.name for path in folder.iterdir()} - own
        return found.get("kind") == "oss_fused.compare" and not strange
    except (OSError, ValueError, AttributeError):
        return False


def check_render(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error where --render cannot work."""
    file = args.render / "results.json"
    check_json(parser, "--render", file, "measurements")
    try:
        # a trial: the report is made before anything is replaced
        with content_of("--render", file, "a results.json of compare.py"):
            results = condensed(json.loads(file.read_text()))
            compare_report.make_report(results, draw=False)
    except ValueError as error:
        parser.error(str(error))
    baselines = results.get("baselines") or list(results["arms"])[:1]
    check_summary(parser, args, [name for name in results["arms"] if name not in baselines])


def check_summary(
    parser: argparse.ArgumentParser, args: argparse.Namespace, candidates: Sequence[str]
) -> None:
    """End with a usage error where no summary could be made; ``candidates`` are no baselines."""
    if args.summary and (not args.summary_prefix or not candidates):
        parser.error("--summary: needs --summary-prefix, and an arm that is no baseline")
    if args.summary_arm and args.summary_arm not in candidates:
        parser.error(f"--summary-arm {args.summary_arm}: expected one of {', '.join(candidates)}")
    for alias in args.summary_alias:
        if not all(alias.partition("=")):
            parser.error(f"--summary-alias {alias}: expected NEW=NAME")
    if (args.summary_alias or args.kernel_ms) and not args.summary:
        parser.error("--summary-alias, --kernel-ms: need --summary, which they add to")


def check_json(parser: argparse.ArgumentParser, flag: str, path: Path, key: str) -> None:
    """End with a usage error before anything is measured, unless ``path`` has ``key``."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or key not in found:
            parser.error(f"{flag} {path}: expected a JSON object with {key!r}")
    except (OSError, ValueError) as error:
        parser.error(f"{flag} {path}: cannot be read as JSON: {error}")


def measure(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the comparison and write its folder; returns that folder and the results."""
    plan = compare.Comparison(
        arms=args.arm,
        grid=args.grid,
        rounds=args.rounds,
        questions=args.question,
        repeats=args.repeats,
        warmups=args.warmups,
        together=args.together,
        gpu=has_gpu(),
        serve_flags=args.serve_flags,
        bench_flags=args.bench_flags,
        port=args.port,
        seed=args.seed,
        startup_timeout=args.startup_timeout,
        busy_host=args.busy_host,
        after=args.after,
        stream=functools.partial(stream, args) if args.streamed else None,
    )
    known = {
        "kind": "oss_fused.compare",
        "version": 1,
        "environment": fingerprint(),
        "settings": settings_of(args),
        "planned_arms": len(args.arm),
        "baselines": args.baseline,
        "quality": json.loads(args.quality.read_text()) if args.quality else None,
    }
    unfinished = free_path(args.output, ".unfinished.json")

    def finished(measured: Mapping[str, Any]) -> dict[str, Any]:
        return condensed({**known, **measured}, [arm.name for arm in args.arm])

    def keep(measured: Mapping[str, Any]) -> None:
        try:
            write_json(unfinished, finished(measured))
        except OSError as error:
            print(f"compare: warning: {unfinished}: {error}", file=sys.stderr)

    logs = Path(tempfile.mkdtemp(prefix="oss-fused-compare-"))
    try:
        # also while the results are written: a second signal must not interrupt that
        with signals_as_exceptions():
            results = finished(compare.run(plan, logs, keep))
            folder = write(args.output, results, logs)
    except ServerError:
        with contextlib.suppress(OSError):
            logs.rmdir()  # where no server has started; else the message names the logs
        raise
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    unfinished.unlink(missing_ok=True)
    shutil.rmtree(logs, ignore_errors=True)
    return folder, results


def stream(args: argparse.Namespace, server: Server) -> dict[str, Any] | None:
    """Tokens per second of streamed and of whole answers of a server that is no baseline."""
    if server.name in args.baseline:
        return None
    plan = streaming.Plan(server.model, args.streamed, repeats=_STREAMED_PAIRS)
    return streaming.measure(plan, server, streaming.vocabulary_of(server.model))


def write(output: Path, results: dict[str, Any], logs: Path) -> Path:
    """Write the results' folder and return it; an incomplete one does not take OUTPUT's name."""
    if "stopped" in results:
        output = free_path(output, ".incomplete")
    earlier = free_path(output, ".earlier")
    try:
        if output.exists():
            output.rename(earlier)
        compare_report.write_folder(results, output, logs)
    except BaseException:
        if earlier.exists() and not output.exists():
            earlier.rename(output)
        print("compare: the results could not be written; they follow", file=sys.stderr)
        print(json.dumps(results))
        raise
    shutil.rmtree(earlier, ignore_errors=True)
    return output


def free_path(output: Path, suffix: str) -> Path:
    """``output`` with ``suffix``, numbered if an earlier run left something of that name."""
    names = (f"{output.name}{number}{suffix}" for number in ("", *map(str, range(2, 1000))))
    return next(path for name in names if not (path := output.with_name(name)).exists())


def condensed(results: dict[str, Any], arms: Sequence[str] = ()) -> dict[str, Any]:
    """``results`` with their "cells"; ``arms`` is for those of which not all have started."""
    names, baselines = list(arms or results["arms"]), results.get("baselines", ())
    cells = []
    if len(names) == results.get("planned_arms", len(names)):
        cells = summary.condense(results["measurements"], names, baselines)
    return results | {"cells": cells}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the measurement, JSON-ready."""
    names = ("concurrency", "lengths", "num_prompts", "rounds", "repeats", "warmups", "together")
    return {
        name: getattr(args, name)
        for name in (*names, "busy_host", "streamed", "seed", "serve_flags", "bench_flags")
    }


def add_to_summary(args: argparse.Namespace, file: Path, results: dict[str, Any]) -> None:
    """Merge the ratios into --summary, if given."""
    if not args.summary:
        return
    baselines = results.get("baselines") or list(results["arms"])[:1]
    arm = args.summary_arm or next(name for name in results["arms"] if name not in baselines)
    names = args.summary_prefix, args.summary_key, args.summary_rate
    figures = summary.named_ratios(results["cells"], arm, *names)
    for measured in filter(None, [results.get("streaming", {}).get(arm)]):
        requests = results["settings"]["streamed"]
        figures[f"{args.summary_prefix}.streamed_ratio_c{requests}"] = measured["ratio"]
    for alias in args.summary_alias:
        new, _, name = alias.partition("=")
        if name not in figures:
            raise ValueError(f"--summary-alias {alias}: expected one of {', '.join(figures)}")
        figures[new] = figures[name]
    if args.kernel_ms:
        known = json.loads(args.summary.read_text())
        overhead = summary.host_overhead(results["cells"], arm, known.get(args.kernel_ms))
        figures["served.host_overhead_c1"] = overhead
    summary.merge_summary(args.summary, figures, file)
    for name, figure in figures.items():
        print(f"{name} = {figure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
