# SPDX-License-Identifier: MIT
"""The demo's steps, what it keeps, and its last line."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import demo
import pytest
from harness.arms import parse_arm


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps that succeed without doing anything, and a comparison; returns its results."""
    cell = {"concurrency": 1, "input_len": 64, "output_len": 32, "arms": {}}
    ratio = {"output_throughput": {"median": 0.93}}
    cell["arms"] = {"bf16": {"ratios": {}}, "oss_fp8": {"ratios": ratio}}
    parts: dict[str, Any] = {"environment": {}, "settings": {}, "arms": {}, "measurements": []}
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare/report.md").write_text("the report")
    (tmp_path / "compare/results.json").write_text(json.dumps(parts | {"cells": [cell]}))
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **options: done)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["demo.py", *map(str, arguments)])
    return demo.main()


def steps(gpu: bool, no_gpt_oss: bool = False) -> list[tuple[str, list[str], Path | None]]:
    args = argparse.Namespace(force=False, rounds=1, gpu=gpu, no_gpt_oss=no_gpt_oss)
    return demo.plan(Path("m"), Path("r"), args)


def test_it_ends_with_what_a_gpu_brings_and_leaves_the_report_to_the_comparison(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--results", finished, "--models", finished, "--force") == 0
    said = capsys.readouterr().err
    figures = json.loads((demo.ROOT / "docs/results/h200/summary.json").read_text())
    last = said.strip().splitlines()[-1]
    assert "H200" in last and f"1/{figures['main_job.gpt_oss_20b.tpot_ratio_c1']:.2f}" in last
    assert "the report" not in said
    assert "SmolLM2-135M-Instruct-oss-fp8 --gpu-memory-utilization 0.5" in said


def test_ctrl_c_names_the_step(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.subprocess, "run", interrupted)
    assert run(monkeypatch, "--results", finished, "--models", finished, "--force") == 130
    assert "interrupted in step 1" in capsys.readouterr().err


def test_minutes_and_ratio_are_kept(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, flat = finished / "demo.json", finished / "summary.json"
    options = ("--record", kept, "--summary", flat, "--note", "shared", "--force")
    assert run(monkeypatch, "--results", finished, "--models", finished, *options) == 0
    figures = json.loads(flat.read_text())
    assert figures["main_job.demo_cpu.ratio_c1"] == 0.93
    assert 0 <= figures["main_job.demo_cpu.minutes"] < 1
    assert json.loads(kept.read_text())["note"] == "shared"


def test_the_comparison_asks_all_questions_of_both() -> None:
    *_, (_, command, _) = steps(gpu=False)
    at = command.index("--question")
    assert tuple(command[at + 1 : at + 1 + len(demo.QUESTIONS)]) == demo.QUESTIONS
    arms = [parse_arm(command[i + 1]) for i, word in enumerate(command) if word == "--arm"]
    assert [arm.name for arm in arms] == ["bf16", "oss_fp8"]


def test_a_gpu_compares_the_shape_of_gpt_oss_too() -> None:
    *small, made, compared = [command for _, command, _ in steps(gpu=True)]
    assert small == [command for _, command, _ in steps(gpu=True, no_gpt_oss=True)]
    assert made[made.index("--output") + 1] == "m/gpt-oss-20b-shape"
    arms = [compared[i + 1] for i, word in enumerate(compared) if word == "--arm"]
    stock, ours = map(parse_arm, arms)
    # without the plugin, which would change nothing of it but could
    assert dict(stock.environment) == {"VLLM_PLUGINS": ""} and not stock.flags
    assert stock.model == ours.model == "m/gpt-oss-20b-shape"
    assert "--together" in compared and "--together" in small[-1]
    assert len(steps(gpu=False)) == len(small) and "--together" not in steps(gpu=False)[-1][1]


def test_a_gpus_figures_have_names_of_their_own_and_the_last_line_is_of_this_gpu(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    (finished / "gpt-oss-20b").mkdir()
    ratio = {"ratios": {"output_throughput": {"median": 1.237}}}
    cells = [{"arms": {"stock": {"ratios": {}}, "oss_fp8": ratio}}]
    (finished / "gpt-oss-20b/results.json").write_text(json.dumps({"cells": cells}))
    kept, flat = finished / "demo.json", finished / "summary.json"
    options = ("--record", kept, "--summary", flat, "--force")
    assert run(monkeypatch, "--results", finished, "--models", finished, *options) == 0
    figures = json.loads(flat.read_text())
    assert figures["main_job.demo_gpu.ratio_c1"] == 0.93
    assert set(figures) == {"main_job.demo_gpu.ratio_c1", "main_job.demo_gpu.minutes"}
    assert "1.24 times the baseline" in capsys.readouterr().err.strip().splitlines()[-1]
