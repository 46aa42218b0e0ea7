# SPDX-License-Identifier: MIT
"""FP8 linear layer: vLLM's quantiser, then cuBLASLt; see ops/gemm.py for the contract."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.cuda.gemm import fp8_gemm
from oss_fused.kernels.cuda.quantize import quantize_fp8
from oss_fused.kernels.validation import as_rows


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``."""
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected [..., {k}]")
    q, scale = quantize_fp8(as_rows(x), input_scale, "token" if input_scale is None else "tensor")
    return fp8_gemm(q, weight, scale, weight_scale, bias, x.dtype).view(*x.shape[:-1], n)
