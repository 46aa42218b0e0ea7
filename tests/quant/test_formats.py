# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch

from oss_fused.errors import (
    NumericalOverflowError,
    SchemeError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from oss_fused.kernels.quantize.reference import scale_of_amax
from oss_fused.quant.formats import (
    E2M1_VALUES,
    E4M3,
    E5M2,
    FORMATS,
    amax_to_scale,
    dequantize,
    fake_quantize,
    quantize,
    relative_error,
)
from oss_fused.quant.mxfp4 import pack_mxfp4, unpack_mxfp4


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_constants_are_those_of_the_dtype(fmt) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.smallest == info.smallest_normal * 2.0**-fmt.mantissa_bits


def test_scale_is_the_kernels_scale() -> None:
    amax = torch.tensor([0.0, 1e-45, 1.0, 3.3, 448.0, 1e38, float("inf"), float("nan")])
    ours, kernel = amax_to_scale(amax), scale_of_amax(amax.clone())
    assert torch.equal(ours.nan_to_num(7), kernel.nan_to_num(7))
    assert ours[0] == 1 and ours[1] == 2.0**-126 and ours[4] == 1
    assert not ours[6:].isfinite().any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("strategy", ["tensor", "channel", "token"])
def test_round_trip_is_within_half_a_step(fmt, strategy) -> None:
    x = torch.randn(7, 45) * torch.logspace(-3, 3, 7).unsqueeze(1)
    q, scale = quantize(x, strategy, fmt=fmt)
    assert q.dtype is fmt.dtype
    assert scale.shape == ((1,) if strategy == "tensor" else (7, 1))
    step = 2.0 ** -(fmt.mantissa_bits + 1)
    bound = (x.abs() * step).clamp(min=fmt.smallest * scale.max().item() / 2)
    assert ((dequantize(q, scale) - x).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_non_finite_values_are_never_clipped(fmt) -> None:
    x = torch.tensor([[1.0, float("inf"), float("nan"), -float("inf"), 2.0]])
    q, _ = quantize(x, "tensor", torch.ones(1), fmt)
    assert q.float().isnan().tolist() == [[False, True, True, True, False]]
    assert q.float()[0, 0] == 1


def test_static_scale_saturates() -> None:
    x = torch.tensor([[1000.0, -1000.0, 3.0]])
    assert dequantize(*quantize(x, "tensor", torch.ones(1))).tolist() == [[448.0, -448.0, 3.0]]


def test_zero_row_has_scale_one() -> None:
    q, scale = quantize(torch.zeros(2, 4), "channel")
    assert scale.tolist() == [[1.0], [1.0]] and not q.float().any()


def test_fake_quantize_keeps_dtype_and_is_idempotent() -> None:
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    once = fake_quantize(x)
    assert once.dtype is torch.bfloat16 and relative_error(x, once) < 0.04
    ones = torch.ones(1)
    static = fake_quantize(x.float(), "tensor", ones)
    assert torch.equal(fake_quantize(static, "tensor", ones), static)


def test_bad_arguments_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedDtypeError, match="x.dtype"):
        quantize(x.int())
    with pytest.raises(SchemeError, match="strategy='row'"):
        quantize(x, "row", fmt=E5M2)
    with pytest.raises(SchemeError, match="strategy='row'"):
        quantize(x, "row")
    with pytest.raises(ShapeMismatchError, match="scale.shape"):
        quantize(x, "channel", torch.ones(3, 1))
    with pytest.raises(UnsupportedDtypeError, match="q.dtype"):
        dequantize(x, torch.ones(1))
    with pytest.raises(ShapeMismatchError, match="scale.shape"):
        dequantize(x.to(E4M3.dtype), torch.ones(3))


def test_mxfp4_unpacks_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes.flip(0) << 4)).view(1, 16)
    values = unpack_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8)).float()
    table = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert values[0::2].tolist() == [2 * v for v in table]
    assert values[1::2].tolist() == [2 * v for v in reversed(table)]


def test_mxfp4_packing_inverts_unpacking() -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    codes[..., 0] = 7  # the largest value, so that the block's exponent is determined
    scales = torch.randint(2, 250, (3, 5, 4), dtype=torch.uint8)
    values = unpack_mxfp4(codes, scales, torch.float32)
    blocks, repacked = pack_mxfp4(values)
    assert torch.equal(repacked, scales) and torch.equal(blocks, codes)


def test_mxfp4_rounds_to_the_nearest_ties_to_even() -> None:
    x = torch.zeros(32)
    x[:7] = torch.tensor([4.0, 5.0, 2.5, 0.25, 0.75, -3.5, 5.5])
    values = unpack_mxfp4(*pack_mxfp4(x), torch.float32)
    assert values[:7].tolist() == [4.0, 4.0, 2.0, 0.0, 1.0, -4.0, 6.0]


def test_mxfp4_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(NumericalOverflowError, match="NaN or Inf"):
        pack_mxfp4(torch.full((32,), float("nan")))
    with pytest.raises(ShapeMismatchError, match="multiple of 32"):
        pack_mxfp4(torch.zeros(33))
    with pytest.raises(ShapeMismatchError, match=r"blocks\.shape"):
        unpack_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
    nan = unpack_mxfp4(
        torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)
    )
    assert nan.isnan().all()


@pytest.mark.parametrize("at", [0, 1, 30, 31])
def test_every_element_of_a_row_counts_for_its_scale(at: int) -> None:
    x = torch.full((3, 32), 0.5)
    x[1, at] = -896.0
    codes, scale = quantize(x, "channel")
    assert scale[1] == 2.0 and codes[1, at].float() == -448.0
    assert scale[0] == scale[2] == torch.tensor(0.5) / 448


def test_a_scale_per_column_is_refused() -> None:
    with pytest.raises(ShapeMismatchError, match="one per row"):
        dequantize(torch.zeros(3, 4, dtype=torch.float8_e4m3fn), torch.ones(4))


def test_what_is_not_zero_where_zero_was_expected_is_an_error() -> None:
    assert relative_error(torch.zeros(2), torch.tensor([3.0, 4.0])) == 5.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_errors_of_16_bit_values_are_not_rounded() -> None:
    exact, found = torch.tensor([256.0, 0.5]).bfloat16()[:, None]
    assert relative_error(exact, found) == 255.5 / 256


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_fake_quantize_is_a_round_trip_in_the_format_asked_for(fmt) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(
        fake_quantize(x, fmt=fmt), dequantize(*quantize(x, "token", fmt=fmt), x.dtype)
    )
