# SPDX-License-Identifier: MIT
"""FP8 quantisation by vLLM's compiled kernels; see kernels/quantize for the contract."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import (
    FP8,
    as_rows,
)
from oss_fused.kernels.vllm_ops import vllm_ops

_ops = vllm_ops()


def quantize_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``x``: static where ``scale`` is given, else per tensor or per row."""
    rows = as_rows(x).contiguous()
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    codes = q.view(rows.shape)
    if scale is not None:
        if q.numel():
            # (rows, columns) that share a scale; -1 stands for all of them
            group = [-1, -1] if scale.numel() == 1 else [1, -1]
            column = scale if scale.numel() == 1 else scale.reshape(-1, 1)
            _ops.static_scaled_fp8_quant(codes, rows, column, group)
        return q, scale.clone()
    per_tensor = strategy == "tensor"
    shape = (1,) if per_tensor else (*x.shape[:-1], 1)
    scale = torch.ones(shape, dtype=torch.float32, device=x.device)
    if q.numel() and per_tensor:
        _ops.dynamic_scaled_fp8_quant(codes, rows, scale)
    elif q.numel():
        _ops.dynamic_per_token_scaled_fp8_quant(codes, rows, scale.view(-1, 1), None)
    return q, scale
