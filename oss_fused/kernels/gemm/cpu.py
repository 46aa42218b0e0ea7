# SPDX-License-Identifier: MIT
"""``fp8_gemm`` and ``fp8_linear`` of a served layer on a CPU: bf16 holds the weight's codes."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import flat_rows
from oss_fused.kernels.gemm import reference
from oss_fused.kernels.gemm.reference import BF16, CPU_WEIGHTS, bf16_product
from oss_fused.kernels.levels import levels_of


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
    has_both = levels_of(a, levels) is not None
    if has_both or b.dtype not in CPU_WEIGHTS or out_dtype != BF16:
        return reference.fp8_gemm(a, b, a_scale, b_scale, bias, out_dtype, False, levels)
    from oss_fused.kernels import cpu_rows

    return cpu_rows.scale_rows(bf16_product(cpu_rows.decode(a), b), a_scale, b_scale, bias)


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
    is_bf16 = weight.dtype in CPU_WEIGHTS and x.dtype == BF16
    if bf16_rows or input_scale is not None or not is_bf16:
        return reference.fp8_linear(x, weight, weight_scale, input_scale, bias, False, bf16_rows)
    from oss_fused.kernels import cpu_rows

    n = weight.shape[0]
    codes, scale = cpu_rows.quantize_rows(flat_rows(x))
    out = cpu_rows.scale_rows(
        bf16_product(cpu_rows.decode(codes), weight), scale, weight_scale, bias
    )
    return out.view(*x.shape[:-1], n)
