# SPDX-License-Identifier: MIT
"""FP8 matrix product by cuBLASLt, through ``torch._scaled_mm``; see kernels/gemm."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import (
    FP8,
    HALF_DTYPES,
    as_rows,
    check_dtype,
)
from oss_fused.kernels.levels import levels_of, sum_of_levels

_ALIGNMENT = 16


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
    """``(a @ b.T) * a_scale * b_scale.T + bias``.

    Raises:
        ShapeMismatchError: also where N or K is no multiple of 16, which cuBLASLt asks for.
        UnsupportedDtypeError: also for a float32 result with a bias.
    """
    both = levels_of(a, levels)
    if both is not None:
        return sum_of_levels(fp8_gemm, both, b, a_scale, b_scale, bias, out_dtype)
    n, k = b.shape
    if n % _ALIGNMENT or k % _ALIGNMENT:
        raise ShapeMismatchError(
            f"b.shape={(n, k)}: backend 'cuda' expects multiples of {_ALIGNMENT}"
        )
    if a.numel() == 0:
        out = torch.zeros(a.shape[0], n, dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias.to(out_dtype)
    if a_scale.numel() == b_scale.numel() == 1:
        a_scale, b_scale = a_scale.view(1), b_scale.view(1)
    else:
        a_scale = a_scale.expand(a.shape[0], 1).contiguous()
        b_scale = b_scale.view(1, -1).expand(1, n).contiguous()
    if bias is not None:
        bias = bias.to(out_dtype)
        check_dtype("bias", bias, HALF_DTYPES)
    a, b = as_rows(a).contiguous(), as_rows(b).contiguous()
    check_dtype("b", b, (FP8,))
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, bias=bias, out_dtype=out_dtype)
