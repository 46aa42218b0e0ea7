# SPDX-License-Identifier: MIT
"""scripts/bench_decode.py with a stand-in for the engines."""

from __future__ import annotations

import functools
import json
from unittest.mock import patch

import pytest
from harness import decode, decode_report

from tests.harness.test_decode import GPT_OSS, WORKER
from tests.loading import load_script


@pytest.fixture
def script(monkeypatch):
    module = load_script("bench_decode")
    monkeypatch.setattr(
        decode, "DecodeBenchmark", functools.partial(decode.DecodeBenchmark, worker=WORKER)
    )
    return module


@pytest.fixture
def arms(tmp_path):
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GPT_OSS))
    return ["--arm", f"baseline={model}", "--arm", f"oss_fp8={model} q"]


def test_writes_folder_and_summary_and_renders_again(script, arms, tmp_path):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    options = ["--batches", "1", "2", "--contexts", "16", "--profile", "1", "2", "--name", "m"]
    options += ["--host", "2", "1"]
    common = ["--output", str(out), "--summary", str(summary)]
    assert script.main([*arms, *options, "--prefill", "64", *common]) == 0
    results = json.loads((out / "results.json").read_text())
    figures = json.loads(summary.read_text())
    assert figures["decode.m.speedup_b2"] == 2.0
    assert figures["prefill.m.speedup_64"] == 2.0
    assert figures["decode.m.kernels_per_step"] == 8
    assert figures["decode.m.kernel_ms_b2"] == results["profiles"][-1]["busy_us"] / 1e3
    assert "prefill.m.speedup_64_exact" not in figures
    steps = {m["batch"]: m["steps"] for m in results["measurements"] if m["steps"]}
    assert steps == {1: 384, 2: 192}, "few sequences take more steps"
    report = (out / "report.md").read_text()
    assert "2.00 (2.00-2.00)" in report and "### Decode, batch 2" in report
    assert "| 1 x 16 | oss_fp8 | 1.500 | 2.50 | 0.250 | 0.250 |" in report
    assert [row["batch"] for row in results["host"]] == [2, 2, 1, 1]
    assert (out / "step-batch-2.png").stat().st_size > 5000
    assert "<table>" in (out / "report.html").read_text()
    (out / "report.md").unlink()
    (out / "profiles.json").unlink()
    assert script.main(["--render", str(out)]) == 0
    assert (out / "report.md").read_text() == report
    prefixed = ["--summary", str(summary), "--summary-prefix", "h100", "--name", "m"]
    assert script.main(["--render", str(out), *prefixed]) == 0
    assert json.loads(summary.read_text())["h100.decode.m.speedup_b2"] == 2.0


def test_a_killed_run_can_be_rendered(script, arms, tmp_path, monkeypatch):
    measure, out = decode._measure, tmp_path / "out"

    def killed(engine, cell, seed, number):
        if number == 1:
            raise KeyboardInterrupt
        return measure(engine, cell, seed, number)

    monkeypatch.setattr(decode, "_measure", killed)
    options = ["--batches", "2", "--contexts", "16", "--profile", "2", "--prefill", "64"]
    assert script.main([*arms, *options, "--output", str(out)]) == 130
    assert [path.name for path in out.iterdir()] == ["results.json"]
    assert script.main(["--render", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert [cell["speedup"] for cell in results["cells"]] == [2.0, 2.0]
    assert "### Decode, batch 2" in (out / "report.md").read_text()


def test_a_late_failure_is_told_and_an_earlier_run_is_not_mixed_in(script, arms, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--batches", "2", "--prefill", "0", "--rounds", "1", "--output", str(out)]
    assert script.main([*arms, *options, "--contexts", "16", "--profile", "1"]) == 0
    earlier = (out / "profiles.json").read_bytes()
    # the stand-in fails at a context of 19
    assert script.main([*arms, *options, "--contexts", "16", "19", "--profile", "2"]) == 1
    report = (out / "report.md").read_text()
    assert "**Stopped early: engine baseline" in report and "unlucky" in report
    assert "| 2 x 16 |" in report
    # killed behind its first load: what stood there is another run's
    (out / "profiles.json").write_bytes(earlier)
    options += ["--contexts", "16", "--profile", "2"]
    with patch.object(script, "write", side_effect=KeyboardInterrupt):
        assert script.main([*arms, *options]) == 130
    assert script.main(["--render", str(out)]) == 0
    assert {p["batch"] for p in json.loads((out / "results.json").read_text())["profiles"]} == {2}


def test_decode_alone(script, arms, tmp_path):
    options = ["--batches", "2", "--contexts", "16", "--profile", "2", "--prefill", "0"]
    assert script.main([*arms, *options, "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert {m["steps"] for m in results["measurements"]} == {192}
    assert len(results["profiles"]) == 2
    assert "## Prefill" not in (tmp_path / "out/report.md").read_text()


def test_one_arm_is_compared_with_none(script, arms, tmp_path):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    options = ["--batches", "2", "--contexts", "16", "--profile", "2", "--prefill", "64"]
    options += ["--name", "m", "--output", str(out), "--summary", str(summary)]
    assert script.main([*arms[2:], *options]) == 0
    results = json.loads((out / "results.json").read_text())
    assert json.loads(summary.read_text()).keys() == {
        "decode.m.kernels_per_step",
        "decode.m.kernel_ms_b2",
    }
    assert all("speedup" not in cell and "oss_fp8" in cell["arms"] for cell in results["cells"])
    report = (out / "report.md").read_text()
    assert "Speed-up:" not in report and "### Decode, batch 2" in report
    assert script.main(["--render", str(out)]) == 0
    assert (out / "report.md").read_text() == report


def test_prefill_with_exact_activations_has_a_name_of_its_own(script, arms, tmp_path):
    model, summary = arms[1].removeprefix("baseline="), tmp_path / "summary.json"
    exact = ["--arm", f"exact={model}", *arms[2:], "--baseline", "baseline"]
    options = ["--batches", "1", "--contexts", "16", "--profile", "--prefill", "64"]
    where = ["--output", str(tmp_path / "out"), "--summary", str(summary), "--name", "m"]
    assert script.main([*arms[:2], *exact, *options, *where]) == 0
    figures = json.loads(summary.read_text())
    assert figures["prefill.m.speedup_64"] == 2.0
    assert figures["prefill.m.speedup_64_exact"] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--render", "nowhere"], "--render nowhere/results.json: cannot be read"),
        (["--batches", "1", "1"], "different numbers"),
        (["--steps", "4"], "--steps 4"),
        (["--seconds", "0"], "--seconds: 0.0: expected a number above 0"),
        (["--after", "-1"], "--after: -1: expected at least 1"),
        (["--baseline", "nobody"], "--baseline"),
        (["--arm", "gone=/no/such/model"], "no such folder"),
        (["--arm", "baseline=."], "config.json"),
    ],
)
def test_bad_arguments_exit_with_two(script, arms, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        script.main([*arms, *options, "--output", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failing_engine_exits_with_one(script, arms, tmp_path, capsys):
    options = ["--batches", "13", "--contexts", "16", "--output", str(tmp_path / "out")]
    assert script.main([*arms, *options]) == 1
    assert "unlucky" in capsys.readouterr().err


def test_loads_without_a_steady_round_are_named():
    arms = {
        "triton": {"left_out": 0, "steady": False},
        "oss_fp8": {"left_out": 0, "steady": True},
    }
    results = {
        "measurements": [{"round": 0}],
        "settings": {"baselines": ["triton"], "candidate": "oss_fp8"},
        "cells": [{"batch": 1, "context": 128, "arms": arms}],
    }
    text = decode_report._method(results)
    assert "left out" not in text
    assert text.endswith("or less than half, and they count: triton, batch 1, context 128.")
