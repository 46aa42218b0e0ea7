# SPDX-License-Identifier: MIT
"""The modules equal their functions, keep their state, and train where they can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.functional import fused_gated_mlp, fused_rmsnorm_rope
from oss_fused.layers import FP8Linear, FusedGatedMLP, FusedRMSNorm, FusedRMSNormRoPE
from oss_fused.specs import RMSNormRoPEInput


def test_rmsnorm_rope_module():
    module = FusedRMSNormRoPE(8, 4, eps=1e-3)
    args = RMSNormRoPEInput(2, 3, 8, 4, torch.float32).make()
    module.load_state_dict({"weight": args["weight"]})
    out = module(args["x"], args["cos"], args["sin"])
    assert torch.equal(out, fused_rmsnorm_rope(**args, eps=1e-3))
    with pytest.raises(ShapeMismatchError, match="head_dim=3"):
        FusedRMSNormRoPE(9, 3)


def test_rmsnorm_module_equals_torch():
    weight = nn.Parameter(torch.rand(6) + 0.5)
    x = torch.randn(2, 5, 6)
    expected = nn.functional.rms_norm(x, (6,), weight, 1e-5)
    torch.testing.assert_close(FusedRMSNorm(weight, 1e-5)(x), expected)
    assert FusedRMSNorm(weight, 1e-5)(x[:0]).shape == (0, 5, 6)
    for bad in (torch.ones(5), torch.ones(0), torch.ones(2, 2)):
        with pytest.raises(ShapeMismatchError, match="even"):
            FusedRMSNorm(nn.Parameter(bad), 1e-5)


@pytest.mark.parametrize("activation_on", ["up", "gate"])
def test_gated_mlp_module(activation_on):
    module = FusedGatedMLP(8, 12, "gelu", activation_on=activation_on)
    x = torch.randn(3, 8)
    weights = (module.gate_weight, module.up_weight)
    expected = fused_gated_mlp(x, *weights, "gelu", activation_on=activation_on)
    torch.testing.assert_close(module(x), expected)
    module(x).sum().backward()
    assert module.gate_weight.grad is not None and module.up_weight.grad is not None


def test_a_gated_mlp_starts_as_two_linears_with_the_activation_on_up():
    module = FusedGatedMLP(64, 48)
    assert "silu on up" in repr(module)
    for weight in (module.gate_weight, module.up_weight):
        # uniform within 1 / sqrt(K), as nn.Linear's
        assert 0.12 < weight.abs().max() <= 0.125


def test_gated_mlp_in_fp8_is_close():
    gate, up = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
    x = torch.randn(5, 64)
    exact = FusedGatedMLP.from_linears(gate, up, "silu")(x)
    made = FusedGatedMLP.from_linears(gate, up, "silu", fp8=True)
    assert made.gate_weight.dtype == torch.float8_e4m3fn
    error = (made(x) - exact).norm() / exact.norm()
    assert 0 < error < 0.08


@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear(bias):
    linear = nn.Linear(64, 24, bias=bias)
    module = FP8Linear.from_linear(linear)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        out, exact = module(x), linear(x)
    assert out.shape == exact.shape and out.dtype == x.dtype
    assert 0 < (out - exact).norm() / exact.norm() < 0.06
    # with a graph the same numbers come out
    torch.testing.assert_close(module(x.requires_grad_()).detach(), out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_only_linear(dtype):
    """Inputs lose nothing: the product of the dequantised weight, and its gradient."""
    linear = nn.Linear(64, 24, dtype=dtype)
    module = FP8Linear.from_linear(linear, quantize_inputs=False)
    assert "inputs=16 bits" in repr(module)
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    wide = (module.weight.float() * module.weight_scale).double()
    exact = x.double() @ wide.t() + linear.bias.double()
    with torch.no_grad():
        out = module(x)
    assert out.dtype == dtype and out.shape == (2, 3, 24)
    assert (out - exact).norm() / exact.norm() < (1e-6 if dtype == torch.float32 else 2**-8)
    module(x).sum().backward()
    expected = torch.ones(2, 3, 24).double() @ wide
    assert (x.grad - expected).norm() / expected.norm() < 2**-7
    with pytest.raises(SchemeError, match=r"quantize_inputs=False: expected input_scale=None"):
        FP8Linear.from_linear(linear, torch.ones(1), quantize_inputs=False)


def test_fp8_linear_state_dict_round_trip_and_moved_weights():
    first, second = FP8Linear(16, 8), FP8Linear(16, 8)
    x = torch.randn(2, 16)
    with torch.no_grad():
        assert not torch.equal(first(x), second(x))
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(x), second(x))
    assert first.state_dict()["weight"].dtype == torch.float8_e4m3fn
    assert {"weight", "weight_scale", "bias"} == first.state_dict().keys()


def test_fp8_linear_static_scale_and_gradients():
    linear = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    scale = x.abs().max().view(1) / 448
    module = FP8Linear.from_linear(linear, input_scale=scale)
    with torch.no_grad():
        static = module(x)
    assert (static - linear(x)).norm() / static.norm() < 0.06
    x.requires_grad_()
    module(x).backward(torch.ones(4, 8))
    wide = module.weight.float() * module.weight_scale
    torch.testing.assert_close(x.grad, torch.ones(4, 8) @ wide)
    torch.testing.assert_close(module.bias.grad, torch.full((8,), 4.0))


def test_inputs_of_several_dimensions_under_a_static_scale():
    """Rows that the scale does not fit are adjusted, which is the default."""
    linear = nn.Linear(16, 8)
    x = torch.randn(2, 3, 16)
    scale = x[0].abs().max().view(1) / 448
    x[1] *= 30
    for module in (FP8Linear.from_linear(linear, scale), FP8Linear(16, 8)):
        module.input_scale = scale
        exact = nn.functional.linear(x, module.weight.float() * module.weight_scale, module.bias)
        with torch.no_grad():
            out = module(x)
        assert module.on_overflow == "adjust" and out.shape == (2, 3, 8)
        assert (out - exact).norm() / exact.norm() < 0.06


def test_the_inputs_of_a_layer_are_shown():
    linear = nn.Linear(16, 8, bias=False)
    assert "bias=False, inputs=per token" in repr(FP8Linear.from_linear(linear))
    assert "inputs=static" in repr(FP8Linear.from_linear(linear, torch.ones(1)))


def test_a_static_scale_of_wrong_shape_or_dtype_is_named():
    with pytest.raises(ShapeMismatchError, match=r"input_scale\.shape=\(2,\)"):
        FP8Linear.from_linear(nn.Linear(16, 8), torch.ones(2))
    with pytest.raises(UnsupportedDtypeError, match=r"input_scale\.dtype=torch\.float16"):
        FP8Linear.from_linear(nn.Linear(16, 8), torch.ones(1).half())


def test_wrong_input_size_is_named():
    with pytest.raises(ShapeMismatchError, match=r"x\.shape=\(2, 5\)"), torch.no_grad():
        FP8Linear(16, 8)(torch.randn(2, 5))


def test_modules_compile():
    module = FP8Linear(16, 8)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
