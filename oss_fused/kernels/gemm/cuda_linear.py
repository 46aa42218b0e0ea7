# SPDX-License-Identifier: MIT
"""FP8 linear layer: vLLM's quantiser, then cuBLASLt; see kernels/gemm for the contract.

This module does not load where vLLM is missing; the product alone (cuda.py) does.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.gemm.cuda import fp8_gemm
from oss_fused.kernels.quantize.cuda import quantize_fp8


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``."""
    n = weight.shape[0]
    q, scale = quantize_fp8(as_rows(x), input_scale, "token" if input_scale is None else "tensor")
    return fp8_gemm(q, weight, scale, weight_scale, bias, x.dtype).view(*x.shape[:-1], n)
