# SPDX-License-Identifier: MIT
"""gate_up_quant: the product with the activation in its epilogue, or the separate operations."""

from __future__ import annotations

from typing import Any

import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.gemm.triton import fp8_gemm
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.gate_up_gemv import gate_up_gemv
from oss_fused.kernels.mlp.triton import act_mul_quant, quantize_parts

# up to so many tokens the activation is part of the product
FUSED_ROWS = 64


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
    (m, _), n = x.shape, weight.shape[0] // 2
    tile = _tile(x, weight, x_scale, weight_scale)
    if tile is None:
        gate_up = fp8_gemm(x, weight, x_scale, weight_scale, None, out_dtype, prefetch_weights)
        return act_mul_quant(gate_up, activation, None)
    operands = (x, weight, x_scale, weight_scale, out_dtype, activation)
    if tile["kernel"] == "gemv":
        sizes = (tile["rows_n"], tile["block_k"], tile["num_warps"])
        y, part_amax = gate_up_gemv(*operands, *sizes, prefetch_weights)
    else:
        from oss_fused.kernels.mlp.gate_up_stream import gate_up_stream

        y, part_amax = gate_up_stream(*operands, tile["block_m"], tile["ctas"], prefetch_weights)
    q = torch.empty(m, n, dtype=FP8, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    quantize_parts(y, part_amax, q, scale)
    return q, scale


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.stride(0) % 16 == 0 and tensor.data_ptr() % 16 == 0 and tensor.stride(1) == 1


def _tile(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> dict[str, Any] | None:
    """The product's own tile where a kernel with the activation has it."""
    (m, k), rows = x.shape, weight.shape[0]
    if not 0 < m <= FUSED_ROWS or rows == 0 or not (_aligned(x) and _aligned(weight)):
        return None
    if x_scale.numel() != m or weight_scale.numel() != rows:
        return None
    tile = dict(tiles.choose_gemm_config(x.device, m, rows, k, runs_gluon(x.device)))
    return tile if tile["kernel"] in ("gemv", "stream") else None
