# SPDX-License-Identifier: MIT
"""``add_rms_norm_quant`` of bf16 rows, compiled for a CPU."""

from __future__ import annotations

import torch

from oss_fused.kernels.norm import reference


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
    is_bf16 = x.dtype == weight.dtype == torch.bfloat16
    if scale is not None or bf16_rows or not is_bf16:
        return reference.add_rms_norm_quant(
            x, residual, weight, eps, scale, write_normed, False, bf16_rows
        )
    from oss_fused.kernels.cpu_rows import norm_rows

    codes, of_row, hidden, normed = norm_rows(x, residual, weight, eps)
    levels = codes.new_empty(0, x.shape[-1])
    return codes, of_row, hidden, normed if write_normed else normed[:0].view(0), levels
