#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Tune kernels on this machine's GPU, or look after the cache of what was found.

    python scripts/tune.py matmul --sizes 4096x4096x4096 8192x8192x8192 --output tuning.json
    python scripts/tune.py fp8_gemm --sizes 1024x4096x4096 --memory 0.5
    python scripts/tune.py gated_mlp --sizes 64x2048x5632       # rows, hidden, intermediate
    python scripts/tune.py rmsnorm_rope --sizes 1x8192x4096x64  # batch, sequence, hidden, head
    python scripts/tune.py convolution --sizes 32x256x256x14x3  # N, IC, OC, size, window
    python scripts/tune.py tiles --sizes 1x5120x2880 1024x5120x2880  # the FP8 GEMM's tile table
    python scripts/tune.py recovery --from "NVIDIA H200" --sizes 1x5120x2880 1024x5120x2880 \
        --output recovery.json --summary summary.json  # share of the tuned speed of its tiles here
    python scripts/tune.py simulate --device low_bw --sizes 4096x4096x4096
    python scripts/tune.py --list
    python scripts/tune.py --differences "NVIDIA H200" "NVIDIA H100"  # of their tuned configs
    python scripts/tune.py --merge other-machine.json

--output and --csv have what was found before a failure, too.
Exit codes: 0 ok, 1 no config works or no GPU, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import tuning_recovery
from harness.arguments import Help, duration, output_file, summary_file
from harness.chapters import chapter
from harness.summary import merge_summary
from harness.tuning_differences import differences

from oss_fused.environment import fingerprint
from oss_fused.errors import BackendUnavailableError, OssFusedError, SchemeError
from oss_fused.files import write_json
from oss_fused.kernels import tiles
from oss_fused.kernels.checks import check_device
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning import tile_table
from oss_fused.tuning.cache import CacheEntry, TuningCache
from oss_fused.tuning.device import load_description
from oss_fused.tuning.objective import Objective
from oss_fused.tuning.result import TuningResult, trials_csv
from oss_fused.tuning.simulate import tune_simulated
from oss_fused.tuning.targets import TARGETS, get_target
from oss_fused.tuning.tile_table import Recovery
from oss_fused.tuning.tuner import TritonAutoTuner

chapter("10-autotuning")  # adds the target "matmul"

# targets that work with the FP8 GEMM's tile tables
_TABLES = ("tiles", "recovery")
# options that these measure without
_OTHERS = ("memory", "energy", "warmup_runs", "benchmark_runs")
_UNUSED = {
    **dict.fromkeys(_TABLES, _OTHERS),
    "simulate": (*_OTHERS, "exhaustive", "workers"),
}


def sizes(text: str) -> tuple[int, ...]:
    """``MxNxK``, or as many positive numbers as the target has sizes."""
    parts = text.lower().split("x")
    if len(parts) < 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, e.g. 4096x4096x4096")
    return tuple(int(part) for part in parts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "target",
        nargs="?",
        choices=(*TARGETS, *_TABLES, "simulate"),
        help="what to tune",
    )
    parser.add_argument("--sizes", nargs="+", type=sizes, metavar="MxNxK", help="problem sizes")
    parser.add_argument(
        "--device", default="cuda:0", help="GPU; for simulate the name or file of a description"
    )
    parser.add_argument("--cache", type=Path, help="cache file (default: the user's)")
    parser.add_argument("--force", action="store_true", help="tune even what the cache has")
    parser.add_argument("--exhaustive", action="store_true", help="try every config")
    parser.add_argument(
        "--warmup-runs", type=int, default=10, help="runs of a config that are not timed"
    )
    parser.add_argument(
        "--benchmark-runs", type=int, default=100, help="runs of a config that are timed"
    )
    parser.add_argument("--workers", type=int, default=8, help="threads that compile ahead")
    parser.add_argument("--memory", type=float, default=0.0, help="weight of peak memory")
    parser.add_argument("--energy", type=float, default=0.0, help="weight of NVML energy")
    parser.add_argument("--output", type=output_file, help="JSON of configs, metrics and gains")
    parser.add_argument(
        "--table", type=Path, help="for tiles: table to update (default: this device's own)"
    )
    parser.add_argument(
        "--csv", type=output_file, help="every config of every search, with its metrics"
    )
    parser.add_argument(
        "--differences",
        nargs=2,
        metavar=("A", "B"),
        help="devices of the cache, by name, whose configs to compare",
    )
    parser.add_argument(
        "--seconds", type=duration, help="tiles, recovery: begin no shape after this long"
    )
    parser.add_argument("--from", dest="source", help="for recovery: GPU whose tiles to try here")
    parser.add_argument(
        "--summary", type=summary_file, help="for recovery: JSON to merge the shares into"
    )
    parser.add_argument("--list", action="store_true", help="print what the cache holds")
    parser.add_argument("--merge", type=Path, help="take over new and better entries of a file")
    args = parser.parse_args(argv)
    if args.target and not args.sizes:
        parser.error("--sizes: expected at least one MxNxK")
    if not (args.target or args.list or args.merge or args.differences):
        parser.error("expected a target, --list, --merge or --differences")
    for name in _UNUSED.get(args.target, ()):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')}: has no effect on {args.target}")
    if args.table and args.target != "tiles":
        parser.error("--table: needs tiles")
    if args.workers < 0:
        parser.error(f"--workers {args.workers}: expected at least 0")
    if args.csv and args.target in (None, *_TABLES):
        parser.error("--csv: needs a target other than tiles and recovery")
    if (args.target == "recovery") != bool(args.source):
        parser.error(f"--from {args.source!r}: recovery expects a GPU's name, others none")
    if args.seconds and args.target not in _TABLES:
        parser.error("--seconds: needs tiles or recovery")
    if args.cache and (args.target or args.merge):
        try:
            output_file(str(args.cache))
        except argparse.ArgumentTypeError as error:
            parser.error(f"--cache: {error}")
    if args.summary and not (args.source and args.output):
        parser.error("--summary: needs recovery, and --output, which it names as the source")
    return args


def check_sizes(target: str, given: Iterable[tuple[int, ...]]) -> None:
    """Refuse all sizes where one of them is none of the target's, before the first is tuned.

    Raises:
        ValueError: another number of sizes than the target has.
    """
    names = "MxNxK" if target in (*_TABLES, "simulate") else get_target(target).sizes
    for size in given:
        if len(size) != len(names.split("x")):
            raise ValueError(f"--sizes {'x'.join(map(str, size))}: {target} expects {names}")


def tune(args: argparse.Namespace, size: tuple[int, ...]) -> TuningResult:
    """Tune one size of the chosen target."""
    cache = TuningCache(args.cache)
    target = None if args.target == "simulate" else get_target(args.target)
    if target is None:
        m, n, k = size
        problem = FP8GEMMInput(m, n, k)
        return tune_simulated(load_description(args.device), problem, cache, args.force)
    device = gpu(args)
    problem = target.problem(*size)
    tuner = TritonAutoTuner(
        target.function,
        target.space,
        args.warmup_runs,
        args.benchmark_runs,
        operation=args.target,
        reference=target.reference,
        tolerance=target.tolerance,
        objective=Objective(1.0, args.memory, args.energy),
        cache=cache,
        accumulators=target.accumulators,
        exhaustive=args.exhaustive,
        compile_workers=args.workers,
        progress=sys.stderr.isatty(),
    )
    return tuner.tune(
        *target.arguments(problem, device),
        problem_size=problem,
        device=device,
        force=args.force,
        default=target.default,
    )


def tune_tiles(args: argparse.Namespace, cache: TuningCache) -> Iterator[dict[str, Any]]:
    """Tune the kernels of the FP8 GEMM for every size; the tile table is written after each."""
    device, tuner = table_tuner(args, cache)
    path = args.table or tiles.table_path(torch.cuda.get_device_name(device))
    for size in in_time(args.sizes, args.seconds):
        entries = tile_table.tune_table(
            tuner,
            [size],
            lambda bucket, n, k: tile_table.gpu_launch(bucket, n, k, device),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        tile_table.write_table(path, "fp8_gemm", entries)
        yield from ({"key": key, "config": entry} for key, entry in entries.items())


def in_time(sizes: list[tuple[int, ...]], seconds: float | None) -> Iterator[Any]:
    """The sizes, until so many seconds are over; the first one in any case."""
    start = time.monotonic()
    for done, size in enumerate(sizes):
        if done and seconds and time.monotonic() > start + seconds:
            print(f"time is up: {len(sizes) - done} sizes left", file=sys.stderr)
            return
        yield size


def gpu(args: argparse.Namespace) -> torch.device:
    """The GPU that --device names.

    Raises:
        BackendUnavailableError: it names none, or no GPU is usable here.
        UnsupportedDeviceError: this machine has no GPU of that number.
    """
    if not args.device.startswith("cuda"):
        raise BackendUnavailableError(
            f"--device {args.device}: {args.target} expects an NVIDIA GPU, 'cuda' or 'cuda:N'"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"--device {args.device}: no NVIDIA GPU is usable here; {args.target} expects one"
        )
    return check_device(args.device)


def table_tuner(args: argparse.Namespace, cache: TuningCache) -> tuple[Any, Any]:
    """The device and the tuner of its tile table.

    Raises:
        BackendUnavailableError: the device is a CPU, which has no tile table.
    """
    device = gpu(args)
    return device, tile_table.gpu_tuner(device, cache, args.force, args.exhaustive, args.workers)


def entries_of(cache: TuningCache) -> dict[str, CacheEntry]:
    """What the cache holds; its file stays as it is.

    Raises:
        SchemeError: the file is no cache.
    """
    try:
        return cache.read()
    except SchemeError as error:
        raise SchemeError(f"--cache: {error}") from None


def shares_of(found: list[Recovery]) -> list[dict[str, Any]]:
    """Rows of the output of recovery."""
    return [{**asdict(recovery), "share": recovery.share} for recovery in found]


def write_output(path: Path, found: list[dict[str, Any]]) -> None:
    """Write what was found, with the environment."""
    write_json(path, {"environment": fingerprint(), "results": found})


def measure_recovery(args: argparse.Namespace, cache: TuningCache) -> list[Recovery]:
    """Try another device's tiles for every size, print the table.

    Raises:
        ValueError: that device has no table.
    """
    table = tiles.load_table(args.source).get("fp8_gemm")
    if not table:
        raise ValueError(
            f"--from {args.source!r}: no tile table {tiles.table_path(args.source).name}; "
            "expected a GPU's name as torch has it, such as 'NVIDIA H200'"
        )
    device, tuner = table_tuner(args, cache)
    found = []
    for m, n, k in in_time(args.sizes, args.seconds):
        bucket = tiles.row_bucket(m)
        launch = tile_table.gpu_launch(bucket, n, k, device)
        found.append(tuner.recovery(bucket, n, k, launch, table))
        print(f"{found[-1].key}: {found[-1].share:.1%}", file=sys.stderr, flush=True)
        if args.output:
            write_output(args.output, shares_of(found))
    name = torch.cuda.get_device_name(device)
    print(tuning_recovery.make_report(found, args.source, name).text())
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = parse(argv)
    cache = TuningCache(args.cache)
    found: list[dict[str, Any]] = []
    results: list[TuningResult] = []
    recovered: list[Recovery] = []
    listed: dict[str, CacheEntry] = {}
    code = 0
    try:
        if args.target:
            check_sizes(args.target, args.sizes)
        if args.cache:
            entries_of(cache)  # a file that the user named, and that is no cache, is not renamed
        if args.merge:
            if not args.merge.is_file():
                raise ValueError(f"--merge {args.merge}: no such file")
            print(f"{cache.merge(args.merge)} entries taken into {cache.path}", file=sys.stderr)
        if args.target == "tiles":
            rows: dict[str, dict[str, Any]] = {}
            for row in tune_tiles(args, cache):
                rows[row["key"]] = row  # sizes of one bucket of rows have one key
                found = list(rows.values())
        if args.target == "recovery":
            recovered = measure_recovery(args, cache)
            found = shares_of(recovered)
        for size in (args.sizes or []) if args.target not in _TABLES else []:
            result = tune(args, size)
            print(result.summary(), file=sys.stderr)
            results.append(result)
            found.append(
                {
                    "key": result.key,
                    "config": result.best_config,
                    "metrics": result.metrics.to_dict(),
                    "gain": result.gain,
                }
            )
        if args.differences:
            print(differences(entries_of(cache).values(), *args.differences).text())
        listed = entries_of(cache) if args.list else {}
    except (OssFusedError, ValueError, RuntimeError, KeyboardInterrupt) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        code = 1
        if isinstance(error, (ValueError, KeyboardInterrupt)):
            code = 2 if isinstance(error, ValueError) else 130
        if not found:
            return code
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        args.csv.write_text(trials_csv(results))
    if args.list and not code:
        print(f"{len(listed)} configs in {cache.path}", file=sys.stderr)
        for name, entry in sorted(listed.items()):
            config = " ".join(f"{key}={value}" for key, value in entry.config.items())
            print(f"{name}: {entry.metrics.get('latency_ms')} ms with {config}", file=sys.stderr)
    if args.output:
        write_output(args.output, found)
    if args.summary and not code:
        device = torch.cuda.get_device_name(torch.device(args.device))
        shares = tuning_recovery.figures(recovered, args.source, device)
        merge_summary(args.summary, shares, args.output)
    return code


if __name__ == "__main__":
    sys.exit(main())
