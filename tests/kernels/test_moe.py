# SPDX-License-Identifier: MIT
"""Expert kernels against float64 arithmetic on unpacked weights."""

from __future__ import annotations

import pytest
import torch
from moe_layer import Layer, ops, random_mxfp4, relative_error

from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.moe.mxfp4 import moe_unpack_mxfp4
from oss_fused.quant.mxfp4 import unpack_mxfp4


@pytest.mark.parametrize("gate_up", [True, False])
@pytest.mark.parametrize("columns", [32, 128, 224, 288])
def test_repack_is_exact_and_inverted(columns, gate_up):
    torch.manual_seed(columns)
    weight, scale, values = random_mxfp4(192, columns, 2, spread=11)
    packed, words = ops.moe_repack_mxfp4(weight, scale, gate_up)
    assert packed.shape == weight.shape and packed.dtype == torch.uint8
    assert words.shape == (2, 3, -(-columns // 128), 64) and words.dtype == torch.int32
    for expert in range(2):
        back = moe_unpack_mxfp4(packed[expert], words[expert], gate_up)
        torch.testing.assert_close(back, values[expert], rtol=0, atol=0)


def test_repack_rounds_far_blocks_and_keeps_zero_and_nan():
    weight, scale, _ = random_mxfp4(64, 256, 1)
    scale[0, 0, 3] = scale[0, 0].max() - 20
    weight[0, 1, 16:32] = 0x80  # a block of zeros, whatever its scale says
    scale[0, 1, 1] = 250
    scale[0, 2, 5] = 255
    values = unpack_mxfp4(weight.unflatten(-1, (-1, 16)), scale, torch.float32)[0]
    back = moe_unpack_mxfp4(*(t[0] for t in ops.moe_repack_mxfp4(weight, scale, False)), False)
    assert (back[0] - values[0]).abs().max() <= values[0].abs().max() * 2.0**-15
    torch.testing.assert_close(back[1], values[1], rtol=0, atol=0)
    assert back[2].isnan().all()
    torch.testing.assert_close(back[3:], values[3:], rtol=0, atol=0)


def test_repack_rejects_bad_shapes():
    weight, scale, _ = random_mxfp4(64, 64, 1)
    with pytest.raises(ShapeMismatchError, match="multiple of 64"):
        ops.moe_repack_mxfp4(weight[:, :48], scale[:, :48], False)
    with pytest.raises(ShapeMismatchError, match="scale"):
        ops.moe_repack_mxfp4(weight, scale[..., :1], False)
    with pytest.raises(UnsupportedDtypeError, match="scale"):
        ops.moe_repack_mxfp4(weight, scale.int(), False)


# bfloat16: outputs and the intermediate round at 2^-9; float32 differs in the order of sums
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("activation", "renormalize"), [("swigluoai", True), ("silu", True), ("swigluoai", False)]
)
def test_reference_layer(dtype, activation, renormalize):
    layer = Layer(128, 96, 8)
    # most gates and ups are beyond the clamps at 7
    x, logits = (20 * torch.randn(5, 128)).to(dtype), torch.randn(5, 8)
    out = layer.run(x, logits, renormalize=renormalize, activation=activation)
    assert out.dtype == dtype
    expected = layer.expected(x, logits, renormalize=renormalize, activation=activation)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_reference_layer_clamps():
    """Twenty times the input: gates and ups beyond the clamps at 7, on both sides."""
    layer = Layer(128, 96, 8)
    x, logits = 20 * torch.randn(5, 128), torch.randn(5, 8)
    assert relative_error(layer.run(x, logits), layer.expected(x, logits)) < TOLERANCE[x.dtype]


def test_reference_fp8_activations_stay_close():
    layer = Layer(128, 96, 8)
    x, logits = torch.randn(16, 128).bfloat16(), torch.randn(16, 8)
    exact, fp8 = layer.run(x, logits), layer.run(x, logits, fp8_min_tokens=16)
    assert 1e-3 < relative_error(fp8, exact) < 5e-2
    assert torch.equal(layer.run(x, logits, fp8_min_tokens=17), exact)


def test_expert_map_splits_the_sum():
    layer = Layer(64, 32, 8)
    x, logits = torch.randn(6, 64), torch.randn(6, 8)
    whole = layer.run(x, logits)
    parts = torch.zeros_like(whole)
    for rank in range(2):
        local = slice(4 * rank, 4 * rank + 4)
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(4, dtype=torch.int32)
        parts += ops.moe_mxfp4(
            x, logits, *(t[local] for t in layer.packed13), layer.b13[local],
            *(t[local] for t in layer.packed2), layer.b2[local], 4, True, expert_map=expert_map,
        )  # fmt: skip
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)


def test_empty_and_nan_rows():
    layer = Layer(64, 32, 4)
    assert layer.run(torch.empty(0, 64), torch.empty(0, 4)).shape == (0, 64)
    x, logits = torch.randn(4, 64), torch.randn(4, 4)
    clean = layer.run(x, logits, top_k=2)
    x[1, 3] = float("nan")
    logits[2] = float("nan")
    out = layer.run(x, logits, top_k=2)
    assert out[1].isnan().all() and out[2].isnan().all()
    torch.testing.assert_close(out[[0, 3]], clean[[0, 3]])


def test_bad_arguments_name_the_argument():
    layer = Layer(64, 32, 4)
    x, logits = torch.randn(2, 64), torch.randn(2, 4)
    with pytest.raises(SchemeError, match="activation='gelu'"):
        layer.run(x, logits, activation="gelu")
    with pytest.raises(ShapeMismatchError, match="top_k=5"):
        layer.run(x, logits, top_k=5)
    with pytest.raises(ShapeMismatchError, match="router_logits"):
        layer.run(x, logits[:1])
    with pytest.raises(ShapeMismatchError, match="w2_bias"):
        layer.run(torch.randn(2, 128), logits)


def test_opcheck():
    layer = Layer(64, 32, 4)
    x, logits = torch.randn(2, 64), torch.randn(2, 4)
    weight, scale, _ = random_mxfp4(64, 160, 1)
    torch.library.opcheck(ops.moe_repack_mxfp4.default, (weight, scale, True))
    torch.library.opcheck(ops.moe_route.default, (logits, 2, True))
    args = (x, logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, 2, True)
    torch.library.opcheck(ops.moe_mxfp4.default, args)
