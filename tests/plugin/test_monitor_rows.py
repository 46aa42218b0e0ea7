# SPDX-License-Identifier: MIT
"""Magnitudes that the monitor notes of an operator's input, row by row."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

import oss_fused.kernels  # noqa: F401
from oss_fused.kernels import op as registration
from oss_fused.plugin.monitor.watch import Monitor, Statistics


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OSS_FUSED_MONITOR_DIR", str(tmp_path / "figures"))


@pytest.mark.parametrize("strategy", ["token", "tensor"])
def test_rows_of_each_operator(strategy):
    """Both operators give the same magnitudes, NaN and saturation included."""
    x = torch.randn(5, 64)
    x[3, 7] = float("nan")
    weight = torch.randn(32, 64)
    w, w_scale = torch.ops.oss_fused.quantize_fp8(weight, None, "channel")
    scale = None if strategy == "token" else torch.tensor([0.001])
    watcher = Monitor(1, rank=0)
    watcher._rows, watcher._counts = torch.zeros(1, 256), [0]
    watcher._index = {w.data_ptr(): 0}
    limit = float("inf") if scale is None else 0.448
    watcher.statistics = Statistics(["layer"], [limit], 0)
    q, q_scale = torch.ops.oss_fused.quantize_fp8(x, scale, strategy)
    exact = x.abs().amax(-1)
    registration.set_observer(watcher.observe)
    try:
        torch.ops.oss_fused.fp8_linear(x, w, w_scale, scale, None)
        linear = watcher._rows[0, :5].clone()
        torch.ops.oss_fused.fp8_gemm(q, w, q_scale, w_scale, None, torch.float32)
    finally:
        registration.set_observer(None)
    torch.testing.assert_close(linear, exact, equal_nan=True)
    clipped = exact if scale is None else exact.clamp(max=limit)
    torch.testing.assert_close(watcher._rows[0, :5], clipped, equal_nan=True)
    assert watcher._counts == [5]


@pytest.mark.parametrize("rows", [5, 300])
def test_rows_of_both_projections_of_a_dense_mlp(rows):
    """What the down projection reads leaves no operator; no more rows are computed than noted."""
    draw = [torch.randn(*shape).bfloat16() for shape in ((rows, 64), (2 * 32, 64), (48, 32))]
    (q, scale), (w, w_scale), (down, down_scale) = (
        torch.ops.oss_fused.quantize_fp8(tensor, None, "token") for tensor in draw
    )
    watcher = Monitor(1, rank=0)
    watcher._rows, watcher._counts = torch.zeros(2, 256), [0, 0]
    watcher.statistics = Statistics(["gate_up", "down"], [float("inf")] * 2, 0)
    gate_up = (q, w, scale, w_scale)
    between = torch.ops.oss_fused.gate_up_quant(*gate_up, torch.bfloat16, "silu")[1]
    met = []

    def observe(name, arguments):
        met.append((name, arguments[0].shape[0]))
        watcher.observe(name, arguments)

    registration.set_observer(observe)
    try:
        operands = (*gate_up, down, down_scale, None, torch.bfloat16, "silu", True)
        torch.ops.oss_fused.mlp_fp8(*operands)
        # nobody watches these weights
        assert met == [("mlp_fp8", rows)]
        watcher._index = {down.data_ptr(): 1, w.data_ptr(): 0}
        torch.ops.oss_fused.mlp_fp8(*operands)
    finally:
        registration.set_observer(None)
    kept = min(rows, 256)
    assert met[1:] == [("mlp_fp8", rows), ("gate_up_quant", kept)]
    assert watcher._counts == [kept, kept]
    torch.testing.assert_close(watcher._rows[0, :kept], draw[0].float().abs().amax(-1)[:kept])
    torch.testing.assert_close(watcher._rows[1, :kept], between.flatten()[:kept] * 448)


@pytest.mark.parametrize("operator", ["fp8_gemm", "qkv_rope_kv"])
def test_rows_in_two_levels(operator):
    """Their scale is a power of two, which says little of the largest magnitude."""
    x = torch.randn(5, 64).bfloat16()
    x[3, 7] = float("nan")
    gain = torch.ones(64, dtype=torch.bfloat16)
    q, scale, _, normed, levels = torch.ops.oss_fused.add_rms_norm_quant(
        x, None, gain, 1e-6, None, True, False, 8
    )
    w, w_scale = torch.ops.oss_fused.quantize_fp8(torch.randn(64, 64), None, "channel")
    watcher = Monitor(1, rank=0)
    watcher._rows, watcher._counts = torch.zeros(1, 256), [0]
    watcher._index = {w.data_ptr(): 0}
    watcher.statistics = Statistics(["layer"], [float("inf")], 0)
    product = (q, w, scale, w_scale, None, torch.bfloat16)
    cache = [torch.zeros(1, 16, 1, 16, dtype=torch.bfloat16) for _ in range(2)]
    index = torch.zeros(5, dtype=torch.int64)
    rope = (index, torch.ones(4, 16).bfloat16(), 2, True, *cache, index, *4 * [None], 1e-6, None)
    registration.set_observer(watcher.observe)
    try:
        between = () if operator == "fp8_gemm" else rope
        getattr(torch.ops.oss_fused, operator)(*product, *between, False, levels)
    finally:
        registration.set_observer(None)
    exact = normed.float().abs().amax(-1)
    torch.testing.assert_close(watcher._rows[0, :5], exact, equal_nan=True, rtol=1e-6, atol=0)
