# SPDX-License-Identifier: MIT
"""What serves on a CPU: loops that Numba compiles, and products of weights unpacked to bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from oss_fused.kernels.gemm import reference as gemm
from oss_fused.kernels.op import backend_for, get_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's machine runs the twins")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
CPU = torch.device("cpu")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def both(operation, *args):
    return get_kernel("cpu", operation)(*args), get_kernel("torch", operation)(*args)


def bits(codes):
    return codes.view(torch.uint8)


def layer(n, k):
    """FP8 weight [n, k], the same numbers in bf16, and the scales."""
    codes, scale = get_kernel("torch", "quantize_fp8")(randn(n, k, seed=1), None, "channel")
    return codes, codes.to(BF16), scale


@pytest.mark.parametrize("magnitude", [1.0, 300.0, 1e-4, 1e-30, 1e-38])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (33, 100), (5, 576)])
def test_codes_and_scales_are_the_twins_bit_for_bit(rows, size, magnitude):
    """Of every exponent, subnormal codes and subnormal bf16 included."""
    x = (magnitude * randn(rows, 2 * size).float()).to(BF16)
    # a row that spans all of e4m3's exponents
    x[0, :size] *= torch.logspace(0, -18, size, base=2.0).to(BF16)
    (codes, scale), (twin, twin_scale) = both("act_mul_quant", x, "silu", None)
    assert torch.equal(scale, twin_scale)
    assert torch.equal(bits(codes), bits(twin))


def test_silu_of_every_bf16_is_the_twins():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    # each a row of its own, so that its code and scale are those of its magnitude
    x = torch.stack([every, torch.ones_like(every)], -1)
    (codes, scale), (twin, twin_scale) = both("act_mul_quant", x, "silu", None)
    torch.testing.assert_close(scale, twin_scale, rtol=0, atol=0, equal_nan=True)
    finite = scale.isfinite().view(-1)
    assert torch.equal(bits(codes)[finite], bits(twin)[finite])


def test_every_tie_is_rounded_to_even():
    """Halfway between neighbouring codes, on both sides of zero, with a scale of one."""
    numbers = torch.arange(0x7E, dtype=torch.uint8).view(FP8).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    row = torch.cat([ties, -ties, numbers, torch.tensor([448.0])]).to(BF16)
    from oss_fused.kernels.cpu_rows import quantize_rows

    codes, scale = quantize_rows(row.view(1, -1))
    assert scale.item() == 1.0
    assert torch.equal(bits(codes), bits(row.float().to(FP8).view(1, -1)))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -float("inf")])
def test_rows_of_zeros_nan_and_infinities(bad):
    x = torch.zeros(2, 64, dtype=BF16)
    x[0, 5], x[1] = bad, 1.0
    from oss_fused.kernels.cpu_rows import decode, quantize_rows

    codes, scale = quantize_rows(x)
    twin, twin_scale = get_kernel("torch", "quantize_fp8")(x, None, "token")
    torch.testing.assert_close(scale, twin_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(decode(codes), twin.to(BF16), rtol=0, atol=0, equal_nan=True)


def test_every_code_is_decoded():
    from oss_fused.kernels.cpu_rows import decode

    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    torch.testing.assert_close(decode(codes), codes.to(BF16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_norm_rounds_where_the_twin_rounds(rows, with_residual):
    """The order of the sum of squares is its own: a code in a thousand may be a neighbour."""
    x = randn(rows, 576)[:, ::2]
    residual = randn(rows, 288, seed=2) if with_residual else None
    gain = 1 + randn(288, seed=3) / 10
    args = (x, residual, gain, 1e-5, None)
    (codes, scale, hidden, normed, _), twin = both("add_rms_norm_quant", *args)
    assert torch.equal(hidden, twin[2])
    torch.testing.assert_close(scale, twin[1], rtol=2**-8, atol=0)
    assert (bits(codes) != bits(twin[0])).float().mean() < 1e-3
    assert (normed != twin[3]).float().mean() < 1e-3


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, gemm.MANY_ROWS + 3])
def test_a_product_of_unpacked_weights_is_the_twins_but_for_one_rounding(rows, with_bias):
    codes, unpacked, scale = layer(48, 96)
    bias = randn(48, seed=4) if with_bias else None
    x = randn(rows, 96)
    exact = get_kernel("torch", "fp8_linear")(x, codes, scale, None, bias)
    for served in both("fp8_linear", x, unpacked, scale, None, bias):
        error = (served.float() - exact.float()).norm() / exact.float().norm()
        # each rounding to bf16 errs by 2**-9 at most
        assert error < 2**-8
    q, q_scale = get_kernel("torch", "quantize_fp8")(x, None, "token")
    by_codes = get_kernel("cpu", "fp8_gemm")(q, unpacked, q_scale, scale, bias, BF16)
    assert torch.equal(by_codes, get_kernel("cpu", "fp8_linear")(x, unpacked, scale, None, bias))


@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_scales_of_a_tensor_and_of_rows(scales):
    _, unpacked, scale = layer(48, 96)
    q, q_scale = get_kernel("torch", "quantize_fp8")(randn(5, 96), None, "token")
    if scales == "tensor":
        q_scale, scale = q_scale[:1].view(1), scale[:1].view(1)
    served, twin = both("fp8_gemm", q, unpacked, q_scale, scale, None, BF16)
    assert torch.equal(served, twin)


@pytest.mark.parametrize("has_bf16_instructions", [False, True])
@pytest.mark.parametrize("rows", [1, 5, gemm.MANY_ROWS, gemm.MANY_ROWS + 3])
def test_every_cpu_and_every_batch_sums_in_float32_and_rounds_once(
    rows, has_bf16_instructions, monkeypatch
):
    """Small whole numbers: the sum is exact, whoever adds it up."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16_instructions)
    a = torch.randint(-8, 9, (rows, 96), generator=torch.Generator().manual_seed(0)).to(BF16)
    b = torch.randint(-8, 9, (48, 96), generator=torch.Generator().manual_seed(1)).to(BF16)
    product = gemm.bf16_product(a, b)
    assert torch.equal(product, (a.double() @ b.double().t()).to(BF16))
    assert (product.double() != a.double() @ b.double().t()).any()  # some were rounded


def test_other_dtypes_and_static_scales_run_the_twin():
    _, unpacked, scale = layer(48, 64)
    static = torch.tensor([0.02])
    for x in (randn(5, 64).half(), randn(5, 64)):
        served, twin = both("fp8_linear", x, unpacked, scale, static, None)
        assert served.dtype == x.dtype and torch.equal(served, twin)


def test_operations_without_a_loop_run_the_twin():
    assert backend_for("fp8_linear", CPU) == "cpu"
    assert backend_for("moe_route", CPU) == "torch"
