# SPDX-License-Identifier: MIT
"""Residual add + RMSNorm + FP8 quantisation, step by step in float32."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FP8, flat_rows
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.quantize.reference import quantize_levels, quantize_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the rounding of vLLM's kernel: to x.dtype before and after the weight."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    write_normed: bool = True,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale, new residual, normed row, levels; see kernels/norm for the contract."""
    hidden = x.clone() if residual is None else x + residual
    normed = rms_norm(hidden, weight, eps)
    rows = flat_rows(normed)
    levels = torch.empty(2 * bf16_rows, x.shape[-1], dtype=FP8, device=x.device)
    if has_two_levels(rows.shape[0], bf16_rows):
        both, out_scale = quantize_levels(rows)
        q, levels[: both.shape[0]] = both[::2].contiguous(), both
    else:
        q, out_scale = quantize_rows(rows, scale)
    out_scale = out_scale.view(*x.shape[:-1], 1) if scale is None else scale.clone()
    if not write_normed:
        normed = normed.new_empty(0)
    return q.view(x.shape), out_scale, hidden, normed, levels
