# SPDX-License-Identifier: MIT
"""FP8 matrix product and linear layer in float32 arithmetic; on bf16 weights, in bf16's."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import flat_rows
from oss_fused.kernels.gemm.packed import BF16, PACKED, product
from oss_fused.kernels.levels import has_two_levels, levels_of, values_of
from oss_fused.kernels.quantize.reference import quantize_levels, quantize_rows

# dtypes of weights that hold e4m3 codes as bf16 numbers
CPU_WEIGHTS = (BF16, PACKED)
# rows from which a float32 product and the weight's conversion are faster than a bf16 product
MANY_ROWS = 32


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
    levels: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(a @ b.T) * a_scale * b_scale.T + bias``; see kernels/gemm for the contract."""
    both = levels_of(a, levels)
    values = a.float() if both is None else values_of(both)
    return _scaled_product(values, b, a_scale.view(-1, 1), b_scale, bias).to(out_dtype)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``; see kernels/gemm for the contract."""
    rows, levels = flat_rows(x), None
    if has_two_levels(rows.shape[0], bf16_rows):
        levels, scale = quantize_levels(rows)
        codes = levels[::2]
    else:
        column = None if input_scale is None else input_scale.reshape(-1, 1)
        codes, scale = quantize_rows(rows, column)
    out = fp8_gemm(codes, weight, scale, weight_scale, bias, x.dtype, False, levels)
    return out.view(*x.shape[:-1], weight.shape[0])


def _scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    is_bf16 = b.dtype in CPU_WEIGHTS
    acc = bf16_product(a.to(BF16), b) if is_bf16 else torch.mm(a, b.float().t())
    out = acc.float().mul_(a_scale).mul_(b_scale.view(1, -1))
    return out if bias is None else out.add_(bias)


def bf16_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` of bf16 [M, K] and [N, K] on a CPU, summed in float32, rounded to bf16.

    ``b`` may be packed; see packed.py. A CPU without bf16 instructions multiplies many rows in
    float32: widening the weight takes less time than a bf16 product there.
    """
    if b.dtype == PACKED:
        return product(a, b)
    if a.shape[0] < MANY_ROWS or torch.cpu._is_avx512_bf16_supported():
        return torch.nn.functional.linear(a, b)
    return torch.mm(a.float(), b.float().t()).to(BF16)
