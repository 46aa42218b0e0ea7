# SPDX-License-Identifier: MIT
"""bench_kernels without a GPU: cases, figures, rendering, bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import kernel_report, kernels, vllm_kernels

from oss_fused.errors import BackendUnavailableError
from tests.loading import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"


def row(group, us, baselines, **shape):
    return {
        "group": group,
        "name": " ".join([group, *(f"{k}={v}" for k, v in shape.items())]),
        **shape,
        "error": 0.0,
        "tolerance": 1e-2,
        "passed": True,
        "us": us,
        "us_p95": us,
        "baselines_us": baselines,
        "bytes": 10**6,
        "flops": 10**9,
        "bytes_per_second": 1e12,
        "flops_per_second": 1e15,
        "bandwidth_fraction": 0.9,
        "peak_fraction": 0.5,
        "speedup": min(baselines.values()) / us,
    }


ROWS = [
    row("norm_quant", 2.0, {"vllm": 4.0}, rows=1, hidden=64),
    row("norm_quant", 10.0, {"vllm": 40.0}, rows=2048, hidden=64),
    row("gemm_small", 5.0, {"cutlass": 10.0}, M=1, K=64, N=64),
    row("gemm_small", 5.0, {"cutlass": 40.0}, M=4, K=64, N=64),
    row("gemm_large", 5.0, {"cublaslt": 4.0, "cutlass": 1.0}, M=8192, K=8192, N=8192),
    row("w8a16", 5.0, {"bf16": 10.0}, M=1, K=64, N=64),
    row("w8a16", 5.0, {"bf16": 6.0}, M=64, K=64, N=64),
    {"group": "rope_kv", "name": "rope_kv rows=1", "passed": False, "failure": "RuntimeError: x"},
]


def test_figures():
    figures = kernels.figures(ROWS)
    assert figures["kernels.gemm_small.speedup_geomean"] == pytest.approx(4.0)
    assert figures["kernels.gemm_small.speedup_min"] == pytest.approx(2.0)
    assert figures["kernels.gemm_large.speedup_min"] == pytest.approx(0.8)
    assert figures["kernels.gemm_8192.tflops"] == pytest.approx(1000.0)
    assert figures["kernels.small_rows.time_ratio_max"] == pytest.approx(0.5)
    assert figures["kernels.norm_quant.bandwidth_min"] == pytest.approx(0.9)
    assert figures["kernels.w8a16.speedup_b1"] == pytest.approx(2.0)
    assert figures["kernels.w8a16.speedup_min"] == pytest.approx(1.2)
    assert "kernels.rope_kv.bandwidth" not in figures


def test_report_files(tmp_path):
    report = {
        "environment": json.loads(json.dumps(kernels.fingerprint())),
        "copy_bandwidth": 4e12,
        "results": ROWS,
        "figures": kernels.figures(ROWS),
    }
    kernel_report.write(report, tmp_path, tmp_path / "summary.json")
    assert "RuntimeError: x" in (tmp_path / "kernels.md").read_text()
    assert (tmp_path / "kernels-roofline.png").stat().st_size > 1000
    page = (tmp_path / "kernels.html").read_text()
    assert "cutlass 1.00, cublaslt 4.00" in page, "the fastest baseline stands first"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kernels.gemm_small.speedup_min"] == 2.0


def test_a_later_run_replaces_rows(tmp_path):
    environment = {"gpus": [], "cpu": "x", "cpu_count": 1, "versions": {}, "commit": None}
    reports = [
        {
            "environment": {**environment, "timestamp": time},
            "copy_bandwidth": 4e12,
            "results": rows,
            "figures": {},
        }
        for time, rows in (
            ("first", ROWS[:3]),
            ("second", [row("gemm_small", 2.5, {"cutlass": 10.0}, M=1, K=64, N=64)]),
        )
    ]
    merged = kernels.merged([kernels.merged(reports[:1]), reports[1]])
    assert len(merged["results"]) == 3
    assert merged["figures"]["kernels.gemm_small.speedup_min"] == pytest.approx(4.0)
    assert merged["figures"]["kernels.norm_quant.bandwidth_min"] == pytest.approx(0.9)
    text = kernel_report.make_report(merged).text()
    assert "Rows of 2 runs" in text and "first, second" in text


def test_cases_are_named_apart():
    names = [case.name for case in kernels.select()]
    assert len(names) == len(set(names)) > 100
    assert {case.group for case in kernels.select(["norm_quant"])} == {"norm_quant"}
    assert all(case.nbytes > 0 for case in kernels.select())


def test_missing_library_is_named(tmp_path):
    with pytest.raises(BackendUnavailableError, match="nothing.so"):
        vllm_kernels.load(tmp_path / "nothing.so")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--groups", "nope"], "--groups nope"),
        (["--from-json", "/no/such.json", "--output", "x"], "--from-json /no/such.json"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    command = [sys.executable, SCRIPT, *arguments]
    # the folder of --output is made before other arguments are looked at
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr


def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    def measure(case, bandwidth):
        if case.group != "norm_quant":
            raise KeyboardInterrupt
        return ROWS[0]

    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(kernels, "_measure", measure)
    cases = [kernels.select([group])[0] for group in ("norm_quant", "rope_kv", "norm_quant")]
    report = kernels.run(cases)
    assert report["results"] == ROWS[:1] and report["interrupted"] == cases[1].name
    assert "interrupted" not in kernels.merged([report])


def test_an_interrupted_run_is_no_success(monkeypatch, tmp_path, capsys):
    script = load_script("bench_kernels")
    cases = kernels.select(["norm_quant"])[:3]
    answers = iter([ROWS[0], KeyboardInterrupt])

    def measure(case, bandwidth):
        if (answer := next(answers)) is KeyboardInterrupt:
            raise answer
        return answer

    monkeypatch.setattr("oss_fused.environment.has_gpu", lambda: True)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    monkeypatch.setattr(vllm_kernels, "load", lambda path: None)
    monkeypatch.setattr(kernels, "select", lambda groups=(), contains="": cases)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(kernels, "_measure", measure)
    assert script.main(["--output", str(tmp_path), "--compile-jobs", "1"]) == 130
    assert "1 of 3 cases, 0 wrong" in capsys.readouterr().err
    assert f"**Interrupted in {cases[1].name}**" in (tmp_path / "kernels.md").read_text()
    assert json.loads((tmp_path / "kernels.json").read_text())["results"] == ROWS[:1]
