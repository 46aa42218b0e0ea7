# SPDX-License-Identifier: MIT
"""FP8 linear layer and residual add, one after the other."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import check_shape
from oss_fused.kernels.gemm.reference import fp8_linear


def fp8_linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``fp8_linear(x, ...) + residual``; see kernels/qkv for the contract."""
    check_shape("residual", residual, (*x.shape[:-1], weight.shape[0]))
    return fp8_linear(x, weight, weight_scale, input_scale, bias) + residual
