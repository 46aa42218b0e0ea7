# SPDX-License-Identifier: MIT
"""quantize_fp8 and dequantize_fp8: codes and scales equal the reference's, bit for bit."""

import pytest
import torch

import oss_fused.ops  # noqa: F401
from oss_fused import dequantize_fp8, quantize_fp8
from oss_fused.errors import NumericalOverflowError, SchemeError, UnsupportedDtypeError
from oss_fused.kernels.registry import get_kernel

FP8 = torch.float8_e4m3fn


def both(op, *args):
    return get_kernel("torch", op)(*args), get_kernel("triton", op)(*args)


def assert_same(ours, expected):
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if got.dtype == FP8:
            got, want = got.view(torch.uint8), want.view(torch.uint8)
            # one NaN is as good as another
            got, want = ((t & 127 == 127).logical_not() * t for t in (got, want))
        assert (
            torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
            if got.is_floating_point()
            else torch.equal(got, want)
        )


def awkward(shape, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.logspace(-4, 3, shape[-1])
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "token", "channel"])
@pytest.mark.parametrize("shape", [(3, 5), (7, 576), (2, 3, 130), (1, 20000), (0, 64)])
def test_equal_to_reference(shape, strategy, dtype, device):
    expected, ours = both("quantize_fp8", awkward(shape, dtype, device), None, strategy)
    assert_same(ours, expected)


def test_static_scales_and_saturation(device):
    x = awkward((6, 200), torch.float32, device)
    for scale in (torch.tensor([0.05]), torch.rand(6, 1) + 0.01):
        expected, ours = both("quantize_fp8", x, scale.to(device), "tensor")
        assert_same(ours, expected)
        assert ours[0].float().abs().max() == 448


def test_all_codes_round_trip(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).view(2, 128)
    one = torch.ones(1, device=device)
    for backend in ("torch", "triton"):
        values = get_kernel(backend, "dequantize_fp8")(codes, one, torch.float32)
        assert torch.equal(values.nan_to_num(999.0), codes.float().nan_to_num(999.0))
        again, _ = get_kernel(backend, "quantize_fp8")(values, one, "tensor")
        assert_same((again,), (codes,))


def test_ties_round_to_even(device):
    finite = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middle = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([middle, -middle]).to(device).view(1, -1)
    expected, ours = both("quantize_fp8", x, torch.ones(1, device=device), "tensor")
    assert_same(ours, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_never_becomes_a_number(bad, device):
    x = torch.ones(3, 96, device=device)
    x[1, 17] = bad
    for backend in ("torch", "triton"):
        q, scale = get_kernel(backend, "quantize_fp8")(x, None, "token")
        assert not scale[1].isfinite().any() and scale[0].isfinite().all()
        assert (q.float() * scale)[1].isnan().all()
        q, _ = get_kernel(backend, "quantize_fp8")(x, torch.ones(1, device=device), "tensor")
        assert q.float()[1, 17].isnan() and q.float().isnan().sum() == 1


def test_zero_and_tiny_rows(device):
    x = torch.zeros(3, 64, device=device)
    x[1] = 1e-40
    x[2] = -3e38
    expected, ours = both("quantize_fp8", x, None, "token")
    assert_same(ours, expected)
    assert ours[1][0] == 1 and ours[1][1] == 2.0**-126


def test_strided_input(device):
    wide = awkward((9, 256), torch.bfloat16, device)
    for x in (wide[::2, 64:192], wide.t(), wide[:, ::2]):
        expected, ours = both("quantize_fp8", x, None, "token")
        assert_same(ours, expected)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_equal_to_reference(out_dtype, device):
    q, scale = get_kernel("torch", "quantize_fp8")(
        awkward((5, 200), torch.float32, device), None, "token"
    )
    expected, ours = both("dequantize_fp8", q, scale, out_dtype)
    assert torch.equal(expected, ours)


def test_round_trip_error_is_bounded(device):
    x = awkward((4, 333), torch.float32, device)
    q, scale = quantize_fp8(x, strategy="token")
    error = (dequantize_fp8(q, scale) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale * 2.0**-10)).all()


def test_overflow_policies(device):
    x = torch.full((2, 8), 1000.0, device=device)
    small = torch.ones(1, device=device)
    q, scale = quantize_fp8(x, scale=small)
    assert torch.equal(dequantize_fp8(q, scale), x)
    q, scale = quantize_fp8(x, scale=small, on_overflow="saturate")
    assert scale == 1 and (q.float() == 448).all()
    with pytest.raises(NumericalOverflowError, match="scale=1.0"):
        quantize_fp8(x, scale=small, on_overflow="raise")


def test_bad_arguments_are_named(device):
    with pytest.raises(UnsupportedDtypeError, match="x.dtype"):
        quantize_fp8(torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(SchemeError, match="strategy='block'"):
        quantize_fp8(torch.zeros(2, 2, device=device), strategy="block")


@pytest.mark.parametrize("strategy", ["tensor", "token"])
def test_opcheck(strategy, device, check_op):
    x = awkward((3, 32), torch.float32, device)
    check_op(torch.ops.oss_fused.quantize_fp8.default, (x, None, strategy))
    q, scale = torch.ops.oss_fused.quantize_fp8(x, None, strategy)
    check_op(torch.ops.oss_fused.dequantize_fp8.default, (q, scale, torch.bfloat16))
