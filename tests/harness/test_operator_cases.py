# SPDX-License-Identifier: MIT
"""What bench_operators makes of its rows."""

import json

import pytest
from harness import convolution_cases
from harness import operator_cases as cases
from harness.chapters import MEASURED, chapter

from tests.loading import load_script


def row(operation, implementation, **values):
    return {"operation": operation, "implementation": implementation, "error": "", **values}


def squares(operation, size, share, speedup):
    return row(operation, "oss_fused", size=size, share=share, speedup=speedup, us=1.0, gbps=2.0)


def flash(implementation, dim, length, tflops, causal=False):
    shape = {"dim": dim, "length": length, "causal": causal}
    return row("flash forward", implementation, **shape, tflops=tflops, us=10.0, speedup=2.0)


ROWS = [
    squares("softmax", 1024, 0.4, 1.2),
    squares("softmax", 4096, 0.92, 1.5),
    squares("softmax", 8192, 0.95, 1.4),
    {**squares("layer_norm", 8192, 0.9, 1.4), "error": "row 3 is NaN"},
    flash("oss_fused", 64, 16384, 410.0),
    flash("flash_attention_3", 64, 16384, 400.0),
    flash("oss_fused", 64, 512, 150.0, causal=True),
    flash("flash_attention_3", 64, 512, 300.0, causal=True),
    row("flash backward", "oss_fused", dim=64, length=512, causal=True, speedup=0.9, tflops=1.0),
    row("flash backward", "oss_fused", dim=64, length=512, causal=False, speedup=0.8, tflops=1.0),
    row("flash backward", "pytorch", dim=64, length=512, causal=False, speedup=0.1, tflops=1.0),
]


def test_figures_leave_out_what_is_wrong_or_missing():
    assert cases.figures(ROWS) == {
        "operators.softmax.bandwidth_min": 0.92,
        "operators.softmax.speedup_eager_min": 1.2,
        "operators.flash.fwd_tflops_d64": 410.0,
        "operators.flash.vs_fa3_fwd_min": 0.5,
        "operators.flash.vs_fa3_bwd_min": 0.8,
    }


def test_the_table_says_what_is_wrong():
    lines = cases.table(ROWS).splitlines()
    assert len(lines) == len(ROWS)
    assert "WRONG row 3 is NaN" in lines[3] and "WRONG" not in lines[1]
    assert "92.0% of copy" in lines[1] and "causal" in lines[6] and "150.0 TFLOPS" in lines[6]


def convolution(implementation, layout, speedup, error=""):
    values = {"problem": f"32x64x64x56x3 {layout}", "speedup": speedup, "saved": 0.6, "us": 1.0}
    return {**row("convolution", implementation, **values, value="3 TFLOPS"), "error": error}


def test_figures_and_lines_of_convolution():
    rows = [
        convolution("oss_fused", "nhwc", 0.8),
        convolution("oss_fused", "nhwc", 0.9),
        convolution("oss_fused", "nchw", 0.3),
        convolution("oss_fused bias relu", "nhwc", 0.5),
        convolution("oss_fused", "nhwc", 0.1, "wrong"),
    ]
    assert convolution_cases.figures(rows) == {
        "operators.conv.vs_cudnn_min": 0.3,
        "operators.conv.fused_bytes_saved": 0.6,
    }
    assert convolution_cases.figures(ROWS) == {}
    fused = row("gemm epilogue", "bias and silu", fraction=0.97)
    epilogue = chapter("12-epilogue-patterns")
    assert epilogue.figures([*ROWS, fused]) == {"operators.gemm_epilogue.fraction": 0.97}
    assert epilogue.figures([*ROWS, fused | {"error": "wrong"}]) == {}
    assert all(callable(chapter(name).gpu_rows) for name in MEASURED)
    assert "32x64x64x56x3 nhwc" in cases.table(rows)


def test_parts_before_a_failure_are_written(tmp_path, monkeypatch):
    script = load_script("bench_operators")

    def fails(bandwidth):
        yield ROWS[0]
        raise RuntimeError("gone")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("oss_fused.bench.timing.copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr("oss_fused.environment.fingerprint", dict)
    monkeypatch.setattr(cases, "compile_attention", lambda sweep: None)
    monkeypatch.setattr(cases, "attention_rows", lambda lengths: iter(ROWS[4:6]))
    monkeypatch.setattr(cases, "row_operations", fails)
    output = tmp_path / "o.json"
    with pytest.raises(RuntimeError, match="gone"):
        script.main(["--output", str(output), "--parts", "rows", "attention"])
    written = json.loads(output.read_text())
    assert written["rows"] == ROWS[4:6] and written["figures"] == cases.figures(ROWS[4:6])
