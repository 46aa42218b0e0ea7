# SPDX-License-Identifier: MIT
"""gate_up_quant, mlp_fp8 and mlp_norm: what lies between products inside of them, or apart."""

from __future__ import annotations

import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.checks import has_aligned_rows
from oss_fused.kernels.gemm.triton import fp8_gemm, gemm_sums, linear_in_one_launch
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.triton import act_mul_quant, quantize_parts
from oss_fused.kernels.norm.triton import sums_norm_quant
from oss_fused.kernels.token_tiles import empty_token_codes


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
    return _codes(*gate_up_stream(*operands, prefetch_weights))


def mlp_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``fp8_gemm`` of gate_up_quant's codes, of one token without a launch between both products;
    see kernels/mlp."""
    operands = (x, weight, x_scale, weight_scale, out_dtype, activation, prefetch_weights)
    if x.shape[0] == 1 and _joins(x, weight, x_scale, weight_scale):
        from oss_fused.kernels.mlp.gate_up_stream import gate_up_stream

        y, part_amax = gate_up_stream(*operands)
        out = linear_in_one_launch(y, down_weight, down_scale, bias, prefetch_weights, 1)
        if out is not None:
            return out
        q, scale = _codes(y, part_amax)
    else:
        q, scale = gate_up_quant(*operands)
    return fp8_gemm(q, down_weight, scale, down_scale, bias, out_dtype, prefetch_weights)


def mlp_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    activation: str,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mlp_fp8``, then ``add_rms_norm_quant``, which adds parts of long sums; see kernels/mlp."""
    gate_up = (x, weight, x_scale, weight_scale)
    down = (down_weight, down_scale, bias)
    dtype = residual.dtype
    if x.shape[0] == 1:
        sums = mlp_fp8(*gate_up, *down, dtype, activation, prefetch_weights)
    else:
        q, q_scale = gate_up_quant(*gate_up, dtype, activation, prefetch_weights)
        sums = gemm_sums(q, down_weight, q_scale, down_scale, bias, dtype, prefetch_weights)
    norm = (gain, eps, scale, prefetch_weights, bf16_rows)
    codes, out_scale, hidden, _, levels = sums_norm_quant(sums, residual, *norm)
    return codes, out_scale, hidden, levels


def _codes(y: torch.Tensor, part_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = empty_token_codes(y.shape, y.device)
    scale = torch.empty(y.shape[0], 1, dtype=torch.float32, device=y.device)
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
