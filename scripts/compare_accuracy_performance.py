#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure each kernel's speed beside its accuracy, leaks and first call; raise alerts.

    python scripts/compare_accuracy_performance.py --output reports
    python scripts/compare_accuracy_performance.py --output reports --baseline before.json
    python scripts/compare_accuracy_performance.py --output reports --hourly 24

Writes summary.md and accuracy_performance.json; the latter is the next run's --baseline. Alerts: a
kernel 10 % slower, 1e-4 more of relative error, over 1 MiB leaked in 1000 calls.
Exit codes: 0 no alert, 1 an alert or a wrong kernel, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.arguments import Help, output_folder, positive
from harness.comprehensive_report import OURS, kernel_summary
from harness.dashboard import DASHBOARD, alerts
from harness.regression import is_number

from oss_fused.bench.memory import leaked_bytes
from oss_fused.bench.suite import BenchmarkSuite, describe
from oss_fused.environment import fingerprint
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.functional import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput


def problems(small: bool) -> dict[str, tuple[Any, Any]]:
    """Operation -> its function and a problem."""
    sizes = ((1, 16, 256), (2, 1, 64, 96), (8, 64, 64)) if small else ()
    norm, mlp, gemm = sizes or ((1, 8192, 4096), (64, 1, 4096, 11264), (4096, 4096, 4096))
    return {
        "rmsnorm_rope": (fused_rmsnorm_rope, RMSNormRoPEInput(*norm)),
        "gated_mlp": (fused_gated_mlp, GatedMLPInput(*mlp)),
        "fp8_gemm": (fp8_gemm, FP8GEMMInput(*gemm)),
    }


def measure(device: str, small: bool) -> tuple[BenchmarkSuite, dict[str, dict[str, Any]]]:
    """The suite's rows, and kernel -> what the dashboard follows."""
    from oss_fused.bench.implementations import implementations

    suite = BenchmarkSuite(5, 20, device=device, compile_baseline=False, backends=())
    calls = 20 if small else 1000
    followed = {}
    for name, (function, problem) in problems(small).items():
        arguments = problem.make(suite.device)

        def call(function: Any = function, arguments: Any = arguments) -> Any:
            return function(**arguments)

        start = time.perf_counter()
        call()
        if suite.device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        rows = suite.benchmark(name, [problem], implementations(name, ()))
        ours = next(row for row in rows if row.implementation == OURS)
        followed[f"{name}/{describe(problem)}"] = {
            **asdict(ours),
            "first_call_seconds": first,
            "leaked_bytes": leaked_bytes(call, suite.device, calls),
        }
    return suite, followed


def check(args: argparse.Namespace, before: dict[str, Any]) -> int:
    """One run; returns the exit code."""
    suite, followed = measure(args.device, args.small or args.device == "cpu")
    wrong = [name for name, row in followed.items() if row["status"] != "ok"]
    timed = {name: row for name, row in followed.items() if name not in wrong}
    raised = alerts(before, timed) + [f"{n}: {followed[n]['message']}" for n in wrong]
    args.output.mkdir(parents=True, exist_ok=True)
    report = kernel_summary(suite.rows)
    if raised:
        report.heading("Alerts")
        report.items(raised)
    (args.output / "summary.md").write_text(report.markdown())
    rows = [{"name": name, **row} for name, row in followed.items()]
    document = {"kind": "oss_fused.accuracy_performance", "environment": fingerprint()}
    write_json(args.output / "accuracy_performance.json", {**document, "rows": rows})
    print(report.text())
    for line in raised:
        print(line, file=sys.stderr)
    return 1 if raised else 0


def rows_of(path: Path) -> dict[str, Any]:
    """Rows of an earlier run by their names.

    Raises:
        ValueError: the file cannot be read, or is something else.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
        found = {row["name"]: row for row in rows if row["status"] == "ok"}
        for name, row in found.items():
            if not is_number(row["latency_ms"]) or row["latency_ms"] <= 0:
                raise ValueError(f"{name}: latency_ms={row['latency_ms']!r}")
            if not is_number(row["relative_error"]):
                raise ValueError(f"{name}: relative_error={row['relative_error']!r}")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--baseline {path}: expected an accuracy_performance.json ({error!r})"
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Run once, or hourly; returns the last exit code that was not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_folder, default=Path("reports"), help="folder")
    parser.add_argument("--baseline", type=Path, help="accuracy_performance.json to compare with")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--small", action="store_true", help="small sizes; always on a CPU")
    parser.add_argument(
        "--hourly", type=positive, default=1, metavar="RUNS", help="runs, an hour apart"
    )
    args = parser.parse_args(argv)
    before: dict[str, Any] = {}
    try:
        if args.baseline:
            before = rows_of(args.baseline)
        code = check(args, before)
        for _ in range(args.hourly - 1):
            time.sleep(DASHBOARD.interval_seconds)
            code = check(args, before) or code
        return code
    except (OssFusedError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
