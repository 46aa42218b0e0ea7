# SPDX-License-Identifier: MIT
"""Products of packed weights: vLLM's CPU operations sum in float32 and round once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.gemm import packed
from oss_fused.kernels.gemm.reference import bf16_product
from oss_fused.kernels.op import get_kernel

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _vllm_operations():
    if torch.cuda.is_available() or not packed.HAS_INSTRUCTIONS:
        pytest.skip("this machine has a GPU, or a CPU without bf16 instructions")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    assert packed.available()


def finite_codes(n, k):
    return (torch.arange(n * k) % 0x7F).to(torch.uint8).view(FP8).view(n, k)


def layer(n, k):
    """FP8 weight [n, k], packed, and the scales."""
    codes, scale = get_kernel("torch", "quantize_fp8")(torch.randn(n, k), None, "channel")
    return codes, packed.pack(codes.to(BF16)), scale


# vLLM's loop for few rows and its loop for many; N at the end of a block of 32 and in its middle
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 33, 100])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (208, 160), (960, 576)])
def test_a_packed_product_is_the_sum_rounded_once(n, k, rows):
    weight, a = (finite_codes(*shape).to(BF16) for shape in ((n, k), (rows, k)))
    a[0] *= -1
    got = packed.product(a, packed.pack(weight)).double()
    exact = a.double() @ weight.double().t()
    # float32 sums: k roundings at most of the magnitudes' sum
    sums = k * 2**-24 * (a.double().abs() @ weight.double().abs().t())
    assert ((got - exact).abs() <= 2**-8 * exact.abs() + sums).all()


def test_rows_may_be_strided_absent_and_not_finite():
    weight = packed.pack(finite_codes(48, 64).to(BF16))
    a = torch.ones(7, 128, dtype=BF16)[:, ::2]
    a[2, 5], a[4, 63] = float("nan"), float("inf")
    product = bf16_product(a, weight)
    assert torch.equal(product[0], bf16_product(torch.ones(1, 64, dtype=BF16), weight)[0])
    finite = product.isfinite().all(-1)
    assert finite.tolist() == [True, True, False, True, False, True, True]
    assert bf16_product(a[:0], weight).shape == (0, 48)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scheme", ["token", "tensor", "weight only", "codes"])
def test_operations_take_packed_weights(scheme, with_bias, backend):
    """As the twin of FP8 weights computes, but for one rounding to bf16."""
    codes, weight, scale = layer(48, 96)
    x = torch.randn(5, 96).to(BF16)
    bias = torch.randn(48).to(BF16) if with_bias else None
    static = torch.tensor([0.02]) if scheme == "tensor" else None
    token, of_token = get_kernel("torch", "quantize_fp8")(x, None, "token")

    def run(backend, weight):
        if scheme == "weight only":
            return get_kernel("torch", "weight_only_linear")(x, weight, scale, bias)
        if scheme == "codes":
            return get_kernel(backend, "fp8_gemm")(token, weight, of_token, scale, bias, BF16)
        return get_kernel(backend, "fp8_linear")(x, weight, scale, static, bias)

    served, exact = run(backend, weight).double(), run("torch", codes).double()
    assert (served - exact).norm() / exact.norm() < 2**-8


def test_what_cannot_be_packed_or_read_is_refused():
    # vLLM takes so few rows, and holds them in float32
    with pytest.raises(ShapeMismatchError, match=r"weight.shape=\(8, 32\): .* a multiple of 16"):
        packed.pack(torch.zeros(8, 32, dtype=BF16))
    weight, scale = torch.zeros(48, 64, dtype=packed.PACKED), torch.ones(48, 1)
    with pytest.raises(UnsupportedDtypeError, match=r"x.dtype=torch.float16"):
        torch.ops.oss_fused.weight_only_linear(
            torch.ones(2, 64, dtype=torch.float16), weight, scale, None
        )


@pytest.mark.parametrize("name", ["fp8_linear", "weight_only_linear", "fp8_gemm"])
def test_opcheck(name, check_op):
    _, weight, scale = layer(48, 64)
    x = torch.randn(5, 64).to(BF16)
    arguments = {
        "fp8_linear": (x, weight, scale, None, None),
        "weight_only_linear": (x, weight, scale, None),
        "fp8_gemm": (x.to(FP8), weight, torch.ones(5, 1), scale, None, BF16),
    }
    check_op(getattr(torch.ops.oss_fused, name).default, arguments[name])
