# SPDX-License-Identifier: MIT
"""Activations of few rows in two levels: producers, and the products that read them."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.levels import BF16_ROWS
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.quantize import reference
from tests.kernels.test_moe_block import Block
from tests.kernels.test_qkv import problem
from tests.kernels.test_qkv import run as run_qkv

FP8 = torch.float8_e4m3fn


def quantised(backend, x):
    """Both levels of rows, and their scales."""
    if backend == "torch":
        return reference.quantize_levels(x)
    from oss_fused.kernels.quantize.triton import quantize_levels

    return quantize_levels(x)


def values(levels, scale):
    return (levels[::2].double() + levels[1::2].double() / 16) * scale.double()


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def weights(n, k, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    return get_kernel("torch", "quantize_fp8")(weight.to(device), None, "channel")


def rows_of(m, k, device, dtype=torch.bfloat16, seed=1):
    """Rows with outliers, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x[:, :: max(k // 3, 1)] *= 40
    return x.to(device, dtype)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("columns", [1, 7, 2880, 20000])
def test_two_levels_hold_what_bfloat16_holds(backend, columns, device):
    x = rows_of(3, columns, device)
    x[1] *= 2.0**100
    x[2] *= 2.0**-100
    levels, scale = quantised(backend, x)
    assert torch.equal(scale.log2(), scale.log2().round())
    kept = x.abs() >= x.abs().amax(1, keepdim=True) * 2.0**-13
    found = values(levels, scale)
    assert torch.equal(found[kept], x.double()[kept])
    # below that, half of a step of the second level's smallest codes
    assert ((found - x.double()).abs() <= scale.double() * 2.0**-14).all()


def test_levels_of_edge_rows(device):
    """Zeros, the smallest values, the largest ones, NaN, infinities: as the twin, bit by bit."""
    x = torch.zeros(6, 33, device=device, dtype=torch.bfloat16)
    x[1, 3] = 2.0**-126
    x[2, 5], x[2, 6] = torch.finfo(torch.bfloat16).max, -1.0
    x[3, 1], x[4, 2], x[5, 0] = float("nan"), float("inf"), -float("inf")
    x[3:, 7] = 1.0
    found, expected = quantised("triton", x), quantised("torch", x)
    for a, b in zip(found, expected):
        assert torch.equal(a.float().nan_to_num(7), b.float().nan_to_num(7))
    assert found[1][3:].isnan().all() and found[1][:3].isfinite().all()
    assert not found[0].float().isnan().any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 48, 64), (2, 33, 96), (3, 130, 272), (8, 64, 2880), (5, 40, 20), (4, 1, 8)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_are_as_exact_as_16_bits(backend, m, n, k, dtype, device):
    """fp8_linear of few rows is the weight-only product; K of 20 takes two products."""
    weight, scale = weights(n, k, device)
    bias = torch.randn(n, device=device).to(dtype)
    x = rows_of(m, k, device, dtype)
    run = get_kernel(backend, "fp8_linear")
    exact = x.double() @ (weight.double() * scale.double()).t() + bias.double()
    # the tensor cores' sums have 14 bits, float16 has three bits more than two levels, and the
    # result is rounded
    size = x.double().abs() @ (weight.double() * scale.double()).abs().t()
    unit = 2.0**-12 if dtype == torch.bfloat16 else 2.0**-9
    limit = size * unit + exact.abs() * torch.finfo(dtype).eps
    error = (run(x, weight, scale, None, bias, False, 8).double() - exact).abs()
    assert (error <= limit).all()
    if k > 200:
        one_level = (run(x, weight, scale, None, bias).double() - exact).abs()
        assert error.mean() * 3 < one_level.mean()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_more_rows_have_one_level(backend, device):
    weight, scale = weights(48, 64, device)
    linear, product = get_kernel(backend, "fp8_linear"), get_kernel(backend, "fp8_gemm")
    x = rows_of(9, 64, device)
    expected = linear(x, weight, scale, None, None)
    assert torch.equal(linear(x, weight, scale, None, None, False, 8), expected)
    codes, token = get_kernel(backend, "quantize_fp8")(x, None, "token")
    nothing = torch.full((16, 64), float("nan"), device=device).to(FP8)
    args = (codes, weight, token, scale, None, torch.bfloat16, False)
    assert torch.equal(product(*args, nothing), product(*args))
    assert linear(x[:0], weight, scale, None, None, False, 8).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_levels_with_strides(m, dtype, device):
    """Levels are a view; codes, and what lies behind the levels of the rows, are unread."""
    weight, scale = weights(40, 64, device)
    x = rows_of(m, 64, device)
    levels, token = quantised("torch", x)
    wide = torch.full((2 * BF16_ROWS, 128), float("nan"), device=device).to(FP8)
    wide[: 2 * m, :64], view = levels, wide[:, :64]
    rest = (weight, token, scale, None, dtype, False)
    found = get_kernel("triton", "fp8_gemm")(wide[-m:, 64:], *rest, view)
    expected = get_kernel("torch", "fp8_gemm")(levels[::2], *rest, levels)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m", [1, 4])
def test_a_poisoned_row_is_nan_and_no_other(bad, m, device):
    weight, scale = weights(48, 64, device)
    x = rows_of(m + 1, 64, device)
    x[0, 3] = bad
    run = get_kernel("triton", "fp8_linear")
    found = run(x, weight, scale, None, None, False, 8)
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("hidden", [130, 2880])
def test_norms_write_both_levels(rows, hidden, device):
    x, residual = rows_of(rows, hidden, device), rows_of(rows, hidden, device, seed=2)
    gain = torch.rand(hidden, device=device).bfloat16()
    found = get_kernel("triton", "add_rms_norm_quant")(
        x, residual, gain, 1e-5, None, True, False, 8
    )
    codes, scale, _, normed, levels = found
    assert levels.shape == (16, hidden) and same_bits(codes, levels[: 2 * rows : 2].contiguous())
    for a, b in zip((levels[: 2 * rows], scale), quantised("torch", normed)):
        assert same_bits(a, b)
    expected = get_kernel("torch", "add_rms_norm_quant")(
        x, residual, gain, 1e-5, None, True, False, 8
    )
    assert [t.shape for t in found] == [t.shape for t in expected]
    torch.testing.assert_close(normed, expected[3], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3, 8, 9])
def test_experts_leave_both_levels_to_the_next_layer(tokens, device):
    block = Block(320, 96, 12, device, seed=tokens)
    x, residual = block.random(tokens, 320), block.random(tokens, 320)
    codes, scale, added, levels = block.run("triton", x, residual, bf16_rows=8)
    one_level = block.run("triton", x, residual)
    assert torch.equal(added, one_level[2]) and levels.shape == (16, 320)
    if tokens > BF16_ROWS:
        assert same_bits(codes, one_level[0]) and torch.equal(scale, one_level[1])
        return
    assert same_bits(codes, levels[: 2 * tokens : 2].contiguous())
    normed = get_kernel("torch", "add_rms_norm_quant")(
        added, None, block.next_gain, 1e-5, None, True
    )[3]
    found = values(levels[: 2 * tokens], scale)
    # the order of the sum of squares may move a value by one step of bfloat16
    torch.testing.assert_close(found, normed.double(), rtol=2**-7, atol=1e-3)
    assert (found == normed.double()).float().mean() > 0.9


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("tokens", [1, 5, 8, 9])
def test_the_joined_projection_reads_both_levels(tokens, cache_dtype, device):
    arguments = problem(tokens, 8, 2, 64, 2880, cache_dtype, device)
    # without outliers: rotated, a rounded large value would hide what is compared
    x = torch.randn(tokens, 2880).to(device, torch.bfloat16)
    levels = torch.full((2 * BF16_ROWS, 2880), float("nan"), device=device).to(FP8)
    if tokens > BF16_ROWS:
        codes, scale = get_kernel("torch", "quantize_fp8")(x, None, "token")
    else:
        levels[: 2 * tokens], scale = quantised("torch", x)
        codes = levels[: 2 * tokens : 2].contiguous()
    more = arguments | {"prefetch_weights": False, "levels": levels}
    found = run_qkv("triton", codes, scale, more, cache_dtype)
    expected = run_qkv("torch", codes, scale, more, cache_dtype)
    lost = run_qkv("torch", codes, scale, arguments, cache_dtype)
    for a, b in zip(found, expected):
        # FP8 caches hold few bits, and a value may round the other way
        limit = (0.03 if cache_dtype == FP8 else 0.004) * b.float().norm()
        assert (a.float() - b.float()).norm() <= limit
    if tokens <= BF16_ROWS and cache_dtype != FP8:
        error, without = (x[0].float() - expected[0].float() for x in (found, lost))
        assert error.norm() * 4 < without.norm()


@pytest.mark.parametrize(
    ("operation", "args", "message"),
    [
        ("fp8_linear", (None, False, 9), "bf16_rows=9: expected 0 to 8"),
        (
            "fp8_linear",
            (torch.ones(1), False, 8),
            "bf16_rows=8: expected 0 with a given input",
        ),
    ],
)
def test_bad_numbers_of_rows(operation, args, message):
    weight, scale = weights(48, 64, "cpu")
    with pytest.raises(SchemeError, match=message):
        get_kernel("torch", operation)(
            rows_of(2, 64, "cpu"), weight, scale, args[0], None, *args[1:]
        )


def test_levels_of_other_columns():
    weight, scale = weights(48, 64, "cpu")
    levels, token = quantised("torch", rows_of(2, 64, "cpu"))
    other = torch.zeros(16, 32).to(FP8)
    with pytest.raises(ShapeMismatchError, match=r"levels.shape=\(16, 32\)"):
        get_kernel("torch", "fp8_gemm")(
            levels[::2], weight, token, scale, None, torch.bfloat16, False, other
        )
