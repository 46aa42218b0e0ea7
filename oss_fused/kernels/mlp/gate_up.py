# SPDX-License-Identifier: MIT
"""gate_up_quant: the product with the activation in its epilogue, or the separate operations."""

from __future__ import annotations

import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import FP8, has_aligned_rows
from oss_fused.kernels.gemm.triton import fp8_gemm
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.triton import act_mul_quant, quantize_parts


def gate_up_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    activation: str,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``act_mul_quant(fp8_gemm(...))``; see kernels/mlp."""
    if not _joins(x, weight, x_scale, weight_scale):
        gate_up = fp8_gemm(x, weight, x_scale, weight_scale, None, out_dtype, prefetch_weights)
        return act_mul_quant(gate_up, activation, None)
    from oss_fused.kernels.mlp.gate_up_stream import gate_up_stream

    operands = (x, weight, x_scale, weight_scale, out_dtype, activation)
    y, part_amax = gate_up_stream(*operands, prefetch_weights)
    q = torch.empty(y.shape, dtype=FP8, device=x.device)
    scale = torch.empty(y.shape[0], 1, dtype=torch.float32, device=x.device)
    quantize_parts(y, part_amax, q, scale)
    return q, scale


def _joins(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> bool:
    """Whether the product alone would run in a kernel of which there is one with the activation.

    That is so for 1 to 64 tokens on Hopper.
    """
    (m, k), rows = x.shape, weight.shape[0]
    if m == 0 or rows == 0 or x_scale.numel() != m or weight_scale.numel() != rows:
        return False
    if not (has_aligned_rows(x) and has_aligned_rows(weight)):
        return False
    tile = tiles.choose_gemm_config(x.device, m, rows, k, runs_gluon(x.device))
    # one token's product alone is faster by gemv, but the launch that it saves takes longer
    return tile["kernel"] in ("stream", "gemv") and runs_gluon(x.device) and m <= 64
