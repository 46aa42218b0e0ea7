# SPDX-License-Identifier: MIT
"""The command line of scripts/bench_scheduler.py; plugin/test_scheduler.py compares decisions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading import load_script

pytest.importorskip("vllm")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scheduler.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_measures_both(tmp_path: Path) -> None:
    file = tmp_path / "new" / "scheduler.json"
    few = ["--requests", "2", "32", "--contexts", "30", "--steps", "40"]
    done = run("--output", str(file), *few)
    assert done.returncode == 0, done.stderr
    loads = json.loads(file.read_text())["loads"]
    assert [(load["requests"], load["context"]) for load in loads] == [(2, 30), (32, 30)]
    assert loads[1]["vllm"]["median_ms"] > loads[1]["oss_fused"]["median_ms"] > 0
    assert "\n32 x 30  " in done.stderr


@pytest.mark.parametrize("option", ["--requests", "--contexts", "--steps"])
def test_bad_input_exits_with_two(option: str, tmp_path: Path) -> None:
    done = run("--output", str(tmp_path / "x.json"), option, "0")
    assert done.returncode == 2
    assert f"{option} [0]" in done.stderr or f"{option} 0" in done.stderr


def test_no_sequence_ends_before_the_last_step() -> None:
    script = load_script("bench_scheduler")
    assert script.fits(256, 1024, 96) and script.fits(1, 120_000, 96)
    assert not script.fits(1, 131_072, 1) and not script.fits(1, 16, 65_536)
    # the last of so many prompts is read when the first sequences have ended
    assert not script.fits(8192, 65_536, 1)
