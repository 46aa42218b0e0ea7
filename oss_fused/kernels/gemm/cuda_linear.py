# SPDX-License-Identifier: MIT
"""FP8 linear layer: vLLM's quantiser, then cuBLASLt; see kernels/gemm for the contract.

This module does not load where vLLM is missing; the product alone (cuda.py) does.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.gemm.cuda import fp8_gemm
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.quantize.cuda import quantize_fp8
from oss_fused.kernels.quantize.reference import quantize_levels


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``."""
    rows, levels = as_rows(x), None
    if has_two_levels(rows.shape[0], bf16_rows):
        levels, scale = quantize_levels(rows)
        q = levels[::2]
    else:
        column = None if input_scale is None else input_scale.reshape(-1, 1)
        q, scale = quantize_fp8(rows, column, "token" if input_scale is None else "tensor")
    out = fp8_gemm(q, weight, scale, weight_scale, bias, x.dtype, False, levels)
    return out.view(*x.shape[:-1], weight.shape[0])
