#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure decode steps and prefill of several vLLM set-ups side by side, and profile a step.

Every arm is an engine in processes of its own. All start at once on one device (they must fit it
together), stay up and are measured in turn, so one start-up of a minute serves the whole
comparison:

  bench_decode.py --arm "triton=VLLM_PLUGINS= /tmp/gpt-oss-20b --moe-backend triton" \
      --arm "marlin=VLLM_PLUGINS= /tmp/gpt-oss-20b --moe-backend marlin" \
      --arm "oss_fp8=/tmp/gpt-oss-20b --quantization oss_fp8 $SINGLE" --name gpt_oss_20b \
      --output docs/results/h200/decode_gpt_oss_20b --summary docs/results/h200/summary.json

with SINGLE="--additional-config.oss_fused.burst 1": a profile shows single decode steps.
An arm is NAME=[VARIABLE=VALUE ...] MODEL [engine flags as of `vllm serve`]; the last is compared
with the faster of the others, or of --baseline. One arm alone is compared with none. The folder
gets results.json, report.html, report.md with its charts, and profiles.json (every launch).

Exit codes: 0 measured, 1 an engine failed (a baseline that does not start is left out), 2 bad
arguments, 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import decode, decode_figures, decode_profile, decode_report, summary
from harness.arguments import Help, duration, output_folder, positive, summary_file
from harness.arms import Arm, check_model, parse_arm
from harness.decode_limits import load_config, step_bytes
from harness.processes import Terminated, signals_as_exceptions

from oss_fused.environment import fingerprint, has_gpu, portable
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json

KIND = "oss_fused.decode"
CONTEXTS, BATCHES, PREFILL = (128, 1024), (1, 8, 32, 128, 256), 8192


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write the folder and show the report."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.render:
            results = saved(parser, args.render)
            raw = args.render / "profiles.json"
            profiles = json.loads(raw.read_text()) if raw.is_file() else None
            write(args, results, profiles, args.render)
        else:
            arms = check(parser, args)
            results, profiles = measure(args, arms)
            write(args, results, profiles, args.output)
    except (OssFusedError, OSError, ValueError) as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print(f"bench_decode: stopped by {type(error).__name__}", file=sys.stderr)
        return 130
    print(f"\n{decode_report.make_report(results, draw=False).text()}", file=sys.stderr)
    return int(not args.render and results.get("stopped", decode.TIME_IS_UP) != decode.TIME_IS_UP)


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--arm", action="append", default=[], metavar="ARM", help="repeat it; see above")
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME",
        help="an arm to compare with; repeat it (default: all but the last)",
    )
    add("--output", type=output_folder, help="folder for the results")
    add("--name", help="of the model in the summary, such as gpt_oss_20b (default: the folder's)")
    add("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences that decode")
    add("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="their prompts' tokens")
    add(
        "--steps",
        type=int,
        default=48,
        help="decode steps per measurement from batch 8 on (default: 48)",
    )
    add("--prefill", type=int, default=PREFILL, help="tokens of a prompt; 0: none (default: 8192)")
    add("--rounds", type=int, default=2, help="measurements per load and arm (default: 2)")
    add("--seconds", type=duration, help="begin nothing after this long; what was measured counts")
    add("--profile", type=int, nargs="*", default=[1, 32, 128], help="batches to profile")
    add("--host", type=int, nargs="*", default=[], help="batches whose host time is taken")
    add("--engine-flags", type=shlex.split, default=[], help="engine flags for all, as one word")
    add("--seed", type=int, default=1, help="of the prompts (default: 1)")
    add("--startup-timeout", type=duration, default=600.0, help="seconds to start (default: 600)")
    add("--after", type=positive, metavar="PID", help="measure when this process has ended")
    add("--summary", type=summary_file, help="flat JSON to merge the speed-ups into")
    add("--summary-prefix", default="", help="before the figures' names, such as h100")
    add("--render", type=Path, metavar="FOLDER", help="measure nothing: redo this folder's report")
    return parser


def saved(parser: argparse.ArgumentParser, folder: Path) -> dict[str, Any]:
    """Results of an earlier run; ends with a usage error where ``folder`` holds none."""
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--render {path}: cannot be read as JSON: {error}")
    if not isinstance(found, dict) or found.get("kind") != KIND:
        parser.error(f"--render {path}: expected results of bench_decode.py")
    return found


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Arm]:
    """The arms; ends with a usage error where arguments make no sense."""
    if not args.arm or not args.output:
        parser.error("--arm and --output are required (or --render)")
    for name in ("batches", "contexts", "profile", "host"):
        values = getattr(args, name)
        if len(set(values)) != len(values) or any(value < 1 for value in values):
            parser.error(f"--{name} {values}: expected different numbers of at least 1")
    for name, least in (("steps", 8), ("prefill", 0), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: expected at least {least}")
    arms: list[Arm] = []
    for text in args.arm:
        try:
            arms.append(parse_arm(text))
            check_model(arms[-1].model)
            load_config(arms[-1].model)
        except (OSError, ValueError) as error:
            parser.error(f"--arm: {error}")
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        parser.error(f"--arm: names must differ, got {', '.join(names)}")
    args.baseline = args.baseline or names[:-1]
    if not set(args.baseline) <= set(names[:-1]):
        parser.error(f"--baseline {args.baseline}: expected some of {', '.join(names[:-1])}")
    return arms


def measure(
    args: argparse.Namespace, arms: list[Arm]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the plan; the results and, apart from them, the recorded profiles."""
    prefill = [decode.Cell(1, args.prefill, 0)] if args.prefill else []
    plan = decode.DecodeBenchmark(
        arms=arms,
        cells=[
            *(
                decode.Cell(b, c, steps_of(b, args.steps))
                for c in args.contexts
                for b in args.batches
            ),
            *prefill,
        ],
        profiles=[
            *(decode.Cell(batch, args.contexts[0], 8) for batch in args.profile),
            *(prefill if args.profile else []),
        ],
        hosts=[decode.Cell(batch, args.contexts[0], args.steps) for batch in args.host],
        rounds=args.rounds,
        gpu=has_gpu(),
        flags=args.engine_flags,
        seed=args.seed,
        startup_timeout=args.startup_timeout,
        deadline=time.monotonic() + args.seconds if args.seconds else math.inf,
        after=args.after,
    )
    settings = {name: getattr(args, name) for name in ("rounds", "seed", "engine_flags")} | {
        "model": args.name or Path(arms[-1].model).name,
        "config": load_config(arms[-1].model),
        "candidate": arms[-1].name,
        "baselines": args.baseline,
    }
    head = {"kind": KIND, "version": 1, "environment": fingerprint()}
    head["settings"] = settings

    def keep(measured: dict[str, Any]) -> None:
        # --render makes the report of a run that was killed
        short = [decode_profile.condense(profile) for profile in measured["profiles"]]
        kept = portable({**head, **measured, "profiles": short})
        # an earlier run's launches are not those of this one
        (args.output / "profiles.json").unlink(missing_ok=True)
        write_json(args.output / "results.json", kept)

    logs = Path(tempfile.mkdtemp(prefix="oss-fused-decode-"))
    try:
        with signals_as_exceptions():
            measured = decode.run(plan, logs, keep=keep)
    except BaseException:
        print(f"bench_decode: logs are in {logs}", file=sys.stderr)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    profiles = measured.pop("profiles")
    return {**head, **measured}, profiles


def steps_of(batch: int, steps: int) -> int:
    """Steps in which ``batch`` sequences yield as many tokens as 8 do in ``steps``, or more.

    A step of one sequence is limited by vLLM's work on the host. After another engine's turn, the
    host takes some tenths of a second to reach the speed that it has in a server.
    """
    return max(steps, steps * 8 // batch)


def write(
    args: argparse.Namespace,
    results: dict[str, Any],
    profiles: list[dict[str, Any]] | None,
    folder: Path,
) -> None:
    """Condense ``results`` and write everything that follows from them."""
    settings = results["settings"]
    baselines = [name for name in settings["baselines"] if name in results["arms"]]
    if settings["baselines"] and not baselines:
        raise ValueError(f"none of {', '.join(settings['baselines'])} could be measured")
    if profiles is not None:
        results["profiles"] = [decode_profile.condense(profile) for profile in profiles]
        write_json(folder / "profiles.json", profiles)
    results["cells"] = decode_figures.condense(
        results["measurements"], settings["candidate"], baselines, results["profiles"]
    )
    for profile in results["profiles"]:
        profile["limits"] = limits(results, profile)
    results = portable(results)
    write_json(folder / "results.json", results)
    decode_report.render(results, folder)
    if args.summary:
        prefix = f"{args.summary_prefix}." if args.summary_prefix else ""
        figures = {f"{prefix}{name}": value for name, value in named(results).items()}
        summary.merge_summary(args.summary, figures, folder / "results.json")


def limits(results: Mapping[str, Any], profile: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds that the bytes of a decode step take, by group; none for a prefill."""
    if not profile["steps"] or not results["bandwidth"]:
        return {}
    config = results["settings"]["config"]
    sizes = step_bytes(config, profile["batch"], profile["context"])
    return {group: size / results["bandwidth"] * 1e6 for group, size in sizes.items()}


def named(results: Mapping[str, Any]) -> dict[str, float]:
    """Figures for the summary: speed-ups, kernels per step at the smallest batch, kernel time.

    An arm called "exact" is oss_fp8 with bf16 activations of the experts in every step.
    """
    settings = results["settings"]
    figures = decode_figures.named_speedups(results["cells"], settings["model"])
    own = [p for p in results["profiles"] if p["arm"] == settings["candidate"] and p["steps"]]
    if own:
        fewest = min(own, key=lambda profile: int(profile["batch"]))
        figures[f"decode.{settings['model']}.kernels_per_step"] = fewest["kernels_per_step"]
    for profile in own:
        name = f"decode.{settings['model']}.kernel_ms_b{profile['batch']}"
        figures[name] = round(profile["busy_us"] / 1e3, 4)
    for cell in results["cells"]:
        if not cell["steps"] and "exact" in cell["arms"]:
            name = f"prefill.{settings['model']}.speedup_{cell['batch'] * cell['context']}_exact"
            best, exact = (cell["arms"][arm]["ms"] for arm in (cell["baseline"], "exact"))
            figures[name] = round(best / exact, 4)
    return figures


if __name__ == "__main__":
    sys.exit(main())
