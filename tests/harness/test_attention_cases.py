# SPDX-License-Identifier: MIT
"""Inputs of bench_attention.py, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from harness.attention_cases import SHAPES, Case, candidates, make_pool

from oss_fused.kernels.op import get_kernel
from tests.loading import load_script


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: shape.name)
def test_a_case_runs_on_every_layer(shape, queries, device):
    case = Case(shape, 1, 40, make_pool(device, 1 << 18), queries)
    assert len(case.caches) == case.layers > 1
    assert case.ideal_bytes == 40 * shape.position_bytes
    outputs = []
    for call, (keys, values) in zip(case.native()[:2], case.caches):
        call()
        outputs.append(case.out.clone())
        expected = torch.empty_like(case.out)
        scales = [case.one if shape.fp8 else None] * 3
        get_kernel("torch", "decode_attention")(
            *(case.query, keys, values, case.table, case.lens, expected, case.arrivals),
            *(shape.head_dim**-0.5, shape.window, case.sinks, *scales),
            *(False, case.starts, queries),
        )
        torch.testing.assert_close(outputs[-1], expected, atol=1e-2, rtol=2e-2)
    assert not torch.equal(*outputs)
    assert case.launch().splits == 1
    assert {launch.splits for launch in candidates(case)} == {1}


@pytest.fixture
def script():
    return load_script("bench_attention")


@pytest.mark.parametrize("flash", [True, False])
def test_both_kernels_are_timed_in_turn(script, monkeypatch, flash):
    timed = []

    def time_graphs(contestants, replays):
        timed.append((list(contestants), replays))
        return {name: SimpleNamespace(median=float(len(name))) for name in contestants}

    def without_vllm():
        raise ImportError("no vLLM")

    monkeypatch.setattr("oss_fused.bench.timing.time_graphs", time_graphs)
    case = Case(SHAPES[0], 1, 16, make_pool(torch.device("cpu"), 1 << 20))
    monkeypatch.setattr(case, "flash", case.native if flash else without_vllm)
    row = script.measure(case, 1e12, sweep=False)
    assert timed == [(["native", "flash"] if flash else ["native"], 10)]
    assert row["native_us"] == 6.0 and row.get("flash_us") == (5.0 if flash else None)
    assert row.get("relative_l2") == (0.0 if flash else None)
    assert ("no vLLM" in row.get("flash_error", "")) != flash


def test_the_figure_is_the_worst_cell_of_single_tokens(script):
    rows = [
        {"queries": 1, "native_us": 10.0, "flash_us": 20.0},
        {"queries": 1, "native_us": 10.0, "flash_us": 9.0},
        {"queries": 4, "native_us": 10.0, "flash_us": 1.0},
        {"queries": 1, "native_us": 10.0, "flash_error": "no vLLM"},
    ]
    assert script.figures(rows) == {"attention.vs_fa3_min": 0.9}
    assert script.figures(rows[3:]) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "typo"], "--shapes typo: expected some of"),
        (["--batches", "0"], "--batches: 0: expected at least 1"),
        (["--contexts", "999999999"], "--batches, --contexts: expected a product of at most"),
    ],
)
def test_nothing_to_measure_is_refused(script, tmp_path, monkeypatch, capsys, options, message):
    output = ["--output", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *options, *output])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_needs_a_gpu(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", "--output", str(tmp_path / "a.json")])
    assert script.main() == 1
    assert "GPU" in capsys.readouterr().err
