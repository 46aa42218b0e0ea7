# SPDX-License-Identifier: MIT
"""Commands that were asked for by name: what they collect, and that they run."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest

from tests.loading import load_script
from tests.selection import selected

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = ROOT / "tests/conftest.py"


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("test_rmsnorm_rope", "test_1_rmsnorm_rope_equals_its_formula", "rope_kv"),
        ("test_fp8_gemm", "test_6_fp8_against_the_fp16_baseline", "rmsnorm"),
    ],
)
def test_a_subject_has_its_tests_and_they_run_once_in_the_suite(name, has, lacks):
    module = importlib.import_module(f"tests.{name}")
    found = [test for test, value in vars(module).items() if inspect.isfunction(value)]
    found = [test for test in found if test.startswith("test_")]
    assert has in found and len(found) > 4 and not any(lacks in test for test in found)
    ignored = re.search(r"^collect_ignore = \[.*\]$", CONFTEST.read_text(), re.MULTILINE)
    assert ignored and f'"{name}.py"' in ignored[0]


def test_a_selection_that_is_empty_fails():
    module = importlib.import_module("tests.selection")
    with pytest.raises(AssertionError, match="no test has 'norm'"):
        selected(module, "norm")


@pytest.mark.parametrize("name", ["rmsnorm_rope", "gated_mlp", "fp8_gemm"])
def test_benchmarks_print_a_report(name, capsys, tmp_path):
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    output = tmp_path / "report.json"
    assert module.main(["--small", "--device", "cpu", "--output", str(output)]) == 0
    assert name in capsys.readouterr().out and output.is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


TREND = [{"p99": 0.02 + 0.001 * i, "clip": 0.001, "kl": 0.1, "group_size": 8} for i in range(6)]
CURVE = {"mean_abs": 0.01, "max_abs": 0.1, "p50_abs": 0.01, "p90_abs": 0.02, "p99_abs": 0.03}
ACCURACY = {
    "curves": {
        "baseline": {**CURVE, "clip_ratio": 0.0, "kl_vs_laplace_like": 0.1},
        "fp8_group": {**CURVE, "clip_ratio": 0.002, "kl_vs_laplace_like": 0.2},
    },
    "per_group": {"group_size": 8, "target_clip": 0.01, "candidates": {"8": {"clip_ratio": 0.002}}},
}


def test_fp8_trends_are_drawn(tmp_path, capsys):
    trend, plot = tmp_path / "trend.json", tmp_path / "trend.png"
    main = load_script("plot_fp8_trends").main
    assert main([str(trend), "--output", str(plot)]) == 2
    trend.write_text(json.dumps(TREND))
    assert main([str(trend), "--output", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    trend.write_text('[{"p99": 1}]')
    assert main([str(trend), "--output", str(plot)]) == 2
    assert "trend.json: expected" in capsys.readouterr().err


def test_fp8_report(tmp_path, capsys):
    accuracy, trend = tmp_path / "accuracy.json", tmp_path / "trend.json"
    accuracy.write_text(json.dumps(ACCURACY))
    trend.write_text(json.dumps(TREND))
    main = load_script("generate_fp8_report").main
    assert main([str(accuracy), "--trend", str(trend), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "fp8_report.md").read_text()
    assert "| fp8_group | 0.01 |" in page and "Trend of 6 runs" in page and "Advice" in page
    assert "![" in page and (tmp_path / "out" / "fp8_report.html").is_file()
    assert main([str(tmp_path / "none.json"), "--output", str(tmp_path)]) == 2
    assert "none.json" in capsys.readouterr().err


def test_accuracy_beside_performance_with_alerts(tmp_path, capsys, monkeypatch):
    module = load_script("compare_accuracy_performance")
    # the second run compares the same figures with others
    monkeypatch.setattr(module, "measure", functools.cache(module.measure))
    assert module.main(["--device", "cpu", "--small", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "summary.md").read_text()
    assert "| kernel | problem |" in page and "fp8_gemm" in page and "rmsnorm_rope" in page
    found = json.loads((tmp_path / "accuracy_performance.json").read_text())
    assert all(row["leaked_bytes"] < 2**20 for row in found["rows"])
    assert all(row["first_call_seconds"] > 0 for row in found["rows"])
    better = json.loads(json.dumps(found))
    for row in better["rows"]:
        row["latency_ms"] /= 1000
    before = tmp_path / "before.json"
    before.write_text(json.dumps(better))
    args = [
        "--device",
        "cpu",
        "--small",
        "--output",
        str(tmp_path / "b"),
        "--baseline",
        str(before),
    ]
    assert module.main(args) == 1
    assert "slower" in capsys.readouterr().err


def test_alerts_of_the_dashboard():
    from harness.dashboard import DASHBOARD, alerts

    assert DASHBOARD.interval_seconds == 3600
    assert DASHBOARD.metrics == ("throughput", "memory", "accuracy", "compilation time")
    good = {"latency_ms": 1.0, "relative_error": 1e-3, "leaked_bytes": 0, "first_call_seconds": 2.0}

    def raised(**changes):
        now = {"k": {**good, **changes}}
        return [line.split(": ")[1].split(" ")[0] for line in alerts({"k": good}, now)]

    assert raised() == raised(latency_ms=1.09, relative_error=1.09e-3, leaked_bytes=2**20) == []
    assert raised(latency_ms=1.11) == raised(latency_ms=float("nan")) == ["slower"]
    assert raised(relative_error=1.2e-3) == ["error"]
    assert raised(leaked_bytes=2**20 + 1) == ["leaked"]
    assert alerts({}, {"k": good}) == [] and "gone" in alerts({"k": good}, {})[0]
