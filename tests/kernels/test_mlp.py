# SPDX-License-Identifier: MIT
"""act_mul_quant and gated_mlp against their references and their formulas."""

import pytest
import torch

from oss_fused import functional as F
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
ACTIVATIONS = ["silu", "gelu", "gelu_tanh"]


def rows(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * 2).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("intermediate", [64, 130, 1536])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("static", [True, False])
def test_act_mul_quant_equals_reference(dtype, intermediate, activation, static, device):
    x = rows(5, 2 * intermediate, dtype=dtype, device=device)
    scale = torch.full((1,), 0.02, device=device) if static else None
    want, want_scale = get_kernel("torch", "act_mul_quant")(x, activation, scale)
    got, got_scale = get_kernel("triton", "act_mul_quant")(x, activation, scale)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got_scale, want_scale, rtol=unit, atol=0)
    assert (got.view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.99
    error = (got.float() * got_scale - want.float() * want_scale).norm()
    assert error / (want.float() * want_scale).norm() < 5e-3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_act_mul_quant_edges(backend, device):
    op = get_kernel(backend, "act_mul_quant")
    q, scale = op(rows(0, 64, device=device), "silu", None)
    assert q.shape == (0, 32) and scale.shape == (0, 1)
    x = rows(3, 64, device=device)
    x[1, 3] = float("nan")
    x[2, 40] = float("inf")
    q, scale = op(x, "silu", None)
    assert scale[0].isfinite() and not scale[1:].isfinite().any()
    wide = rows(4, 3, 160, device=device)[..., 16:144]
    assert torch.equal(
        op(wide, "silu", None)[0].view(torch.uint8),
        op(wide.contiguous(), "silu", None)[0].view(torch.uint8),
    )
    with pytest.raises(ShapeMismatchError, match="x.shape"):
        op(rows(2, 7, device=device), "silu", None)
    with pytest.raises(SchemeError, match="activation='relu'"):
        op(rows(2, 8, device=device), "relu", None)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("on", ["up", "gate"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_gated_mlp_bf16(activation, on, tokens, device):
    x = rows(tokens, 96, device=device)
    gate = rows(72, 96, device=device, seed=1) / 10
    up = rows(72, 96, device=device, seed=2) / 10
    got = F.fused_gated_mlp(x, gate, up, activation, activation_on=on)
    f = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[activation]
    g, u = x.double() @ gate.double().t(), x.double() @ up.double().t()
    want = g * f(u) if on == "up" else f(g) * u
    for result in (got, get_kernel("triton", "gated_mlp")(x, gate, up, None, None, activation, on)):
        assert result.dtype == x.dtype
        assert (result.double() - want).norm() / want.norm() < 4e-3


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("tokens,hidden", [(3, 96), (65, 80), (4, 50)])
def test_gated_mlp_fp8_equals_reference(channels, tokens, hidden, device):
    x = rows(tokens, hidden, device=device)
    gate, up = (rows(40, hidden, device=device, seed=s).to(FP8) for s in (1, 2))
    scales = [torch.rand(*((40, 1) if channels else (1,)), device=device) / 50 for _ in range(2)]
    args = (x, gate, up, *scales, "silu", "gate")
    want = get_kernel("torch", "gated_mlp")(*args)
    got = get_kernel("triton", "gated_mlp")(*args)
    assert (got.double() - want.double()).norm() / want.double().norm() < 4e-3


def test_act_mul_quant_of_few_rows_equals_that_of_many(device):
    # few rows are cut into parts that share a scale, many are not
    op = get_kernel("triton", "act_mul_quant")
    x = rows(33, 2 * 1300, device=device)
    x[1, 1200] = float("nan")
    q, scale = op(x, "silu", None)
    few, few_scale = op(x[:5], "silu", None)
    assert torch.equal(few.view(torch.uint8), q[:5].view(torch.uint8))
    torch.testing.assert_close(few_scale, scale[:5], rtol=0, atol=0, equal_nan=True)
    assert few_scale[1].isnan()


def test_gated_mlp_bad_arguments(device):
    x, w = rows(2, 16, device=device), rows(8, 16, device=device)
    with pytest.raises(ShapeMismatchError, match="up_weight.shape"):
        F.fused_gated_mlp(x, w, w[:4])
    with pytest.raises(SchemeError, match="activation_on"):
        F.fused_gated_mlp(x, w, w, activation_on="both")


def test_opcheck(device, check_op):
    x, w = rows(2, 16, device=device), rows(8, 16, device=device)
    check_op(torch.ops.oss_fused.act_mul_quant.default, (x, "silu", None))
    check_op(torch.ops.oss_fused.gated_mlp.default, (x, w, w, None, None, "silu", "up"))
