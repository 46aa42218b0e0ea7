# SPDX-License-Identifier: MIT
"""Residual add, RMSNorm and FP8 quantisation by vLLM's kernels; see kernels/norm."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FP8, as_rows, check_dtype
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.norm import reference
from oss_fused.kernels.quantize.cuda import quantize_fp8
from oss_fused.kernels.vllm_ops import vllm_ops

_ops = vllm_ops()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of rows [R, H]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _ops.rms_norm(out, x, weight, eps)
    return out


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
    """One launch where the normed rows are not asked for, else norm and quantiser in turn."""
    check_dtype("weight", weight, (x.dtype,))
    rows = as_rows(x).contiguous()
    if has_two_levels(rows.shape[0], bf16_rows):
        # vLLM has no kernel for two levels
        return reference.add_rms_norm_quant(
            x, residual, weight, eps, scale, write_normed, False, bf16_rows
        )
    levels = torch.empty(2 * bf16_rows, x.shape[-1], dtype=FP8, device=x.device)
    # the fused kernels add in place
    hidden = rows.clone() if residual is None else as_rows(residual).clone()
    hidden = hidden.contiguous()
    if write_normed or not x.numel():
        if residual is None:
            normed = rms_norm(rows, weight, eps)
        else:
            normed = rows.clone()
            if x.numel():
                _ops.fused_add_rms_norm(normed, hidden, weight, eps)
        q, out_scale = quantize_fp8(normed.view(x.shape), scale, "token")
        normed = normed.view(x.shape) if write_normed else normed.new_empty(0)
        return q, out_scale, hidden.view(x.shape), normed, levels
    q = torch.empty(rows.shape, dtype=FP8, device=x.device)
    if scale is None:
        out_scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        added = None if residual is None else hidden
        _ops.rms_norm_dynamic_per_token_quant(
            q, rows, weight, out_scale.view(-1, 1), eps, None, added
        )
    else:
        out_scale = scale.clone()
        if residual is None:
            _ops.rms_norm_static_fp8_quant(q, rows, weight, scale, eps)
        else:
            _ops.fused_add_rms_norm_static_fp8_quant(q, rows, hidden, weight, scale, eps)
    return q.view(x.shape), out_scale, hidden.view(x.shape), x.new_empty(0), levels
