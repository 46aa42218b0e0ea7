# SPDX-License-Identifier: MIT
"""scripts/bench_library.py in rehearsal: the whole way at tiny sizes."""

from __future__ import annotations

import json

import pytest
import torch
from harness.chapters import chapter

from oss_fused.bench.suite import BenchmarkRow
from tests.loading import load_script

bench_library = load_script("bench_library")


def test_rehearsal_writes_figures_beside_those_of_others(tmp_path, device):
    (tmp_path / "summary.json").write_text('{"serving.tokens": 5}')
    args = ["--device", device.type, "--rehearse", "--output", str(tmp_path)]
    args += ["--parts", "norm", "backends", "matmul", "overhead"]
    assert bench_library.main(args) == 0
    suite = json.loads((tmp_path / "library-suite.json").read_text())
    assert {row["operation"] for row in suite["rows"]} == {"rmsnorm_rope", "gated_mlp", "fp8_gemm"}
    report = (tmp_path / "library-suite.md").read_text()
    assert "![roofline gated_mlp](library-suite-roofline-gated_mlp.png)" in report
    (tmp_path / "library-suite.md").unlink()
    assert bench_library.main(["--output", str(tmp_path), "--render"]) == 0
    assert (tmp_path / "library-suite.md").read_text() == report
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("serving.tokens") == 5
    assert {
        "library.rmsnorm_rope.bandwidth_min",
        "library.rmsnorm_rope.speedup_eager_min",
        "library.matmul_v3.fraction_of_cublas",
        "library.door_overhead_us",
    } <= summary.keys()
    assert all(isinstance(item, float) for item in summary.values())
    detail = json.loads((tmp_path / "library.json").read_text())
    assert set(detail["matmul_ms"]) >= {"v0", "v1", "v2", "v3", "v4", "cublas"}
    assert detail["environment"]["versions"]


def test_a_wrong_kernel_is_an_error_and_keeps_what_was_measured(tmp_path, device, monkeypatch):
    wrong = chapter("06-matmul")
    monkeypatch.setattr(wrong, "matmul_v0", lambda a, b: a @ b * 1.1)
    monkeypatch.setattr(bench_library, "norm_figures", lambda *a: {"library.x": 1.0})
    args = ["--device", device.type, "--rehearse", "--output", str(tmp_path)]
    assert bench_library.main([*args, "--parts", "norm", "matmul"]) == 1
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["library.x"]


def test_a_wrong_row_of_the_suite_is_an_error(tmp_path, device, monkeypatch, capsys):
    rows = {
        "oss_fused": ("wrong", "off by one"),
        "tilelang": ("failed", "no such package"),
        "pytorch": ("ok", ""),
    }

    def backends(run):
        for name, (status, message) in rows.items():
            row = BenchmarkRow("gated_mlp", "1x2", name, status, message)
            run.suite.rows.append(row)

    monkeypatch.setattr(bench_library.Run, "backends", backends)
    monkeypatch.setattr(bench_library.Run, "save", lambda run: None)
    args = ["--device", device.type, "--rehearse", "--output", str(tmp_path), "--parts", "backends"]
    for status in ("wrong", "failed"):
        rows["oss_fused"] = (status, "off by one")
        assert bench_library.main(args) == 1
        told = f"error: gated_mlp/1x2/oss_fused: {status}: off by one\n"
        assert capsys.readouterr().err == told
    rows["oss_fused"] = ("ok", "")
    assert bench_library.main(args) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_usage_error_says_how(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        bench_library.main(["--output", str(tmp_path)])
    assert caught.value.code == 2 and "--device cpu --rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["library.json", "library-suite.json"])
def test_a_part_does_not_overwrite_the_others(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = ["--output", str(tmp_path)]
    assert bench_library.parse([*args, "--parts", "norm"]).parts == ["norm"]
    (tmp_path / name).write_text("{}")
    one_less = ["--parts", "overhead", "norm", "tuning", "backends"]
    for some in (["--parts", "matmul"], one_less, ["--targets", "matmul"], ["--rehearse"]):
        device = ["--device", "cpu"] if some == ["--rehearse"] else []
        with pytest.raises(SystemExit) as caught:
            bench_library.parse([*args, *some, *device])
        assert caught.value.code == 2
        assert f"{tmp_path / name} holds an earlier run" in capsys.readouterr().err
    assert bench_library.parse(args).parts == list(bench_library.PARTS)
