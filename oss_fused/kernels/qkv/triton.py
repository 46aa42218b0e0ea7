# SPDX-License-Identifier: MIT
"""qkv_rope_kv and norm_qkv_rope_kv: one launch for few tokens, the separate kernels otherwise."""

from __future__ import annotations

import torch

from oss_fused.kernels.gemm.stream_parts import aligned
from oss_fused.kernels.gemm.triton import fp8_gemm
from oss_fused.kernels.norm.triton import add_rms_norm_quant
from oss_fused.kernels.qkv.stream import fusible, launch
from oss_fused.kernels.rope.rope_kv import rope_kv

# every CTA repeats the norm: beyond so many tokens two launches are faster
FUSED_NORM_ROWS = 4


def qkv_rope_kv(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    is_neox: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    q_scale: torch.Tensor | None = None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """Rotated q of the projection of ``x``; see kernels/qkv for the contract."""
    tokens, norms, scales = (positions, slot_mapping), (q_norm, k_norm), (k_scale, v_scale)
    options = (key_cache, is_neox, num_heads, tokens, norms, scales)
    if (
        aligned(x)
        and x_scale.numel() == x.shape[0]
        and fusible(x, weight, weight_scale, cos_sin_cache, *options)
    ):
        return launch(
            *(x, x_scale, None, None, eps, weight, weight_scale, bias, positions, cos_sin_cache),
            *(num_heads, key_cache, value_cache, slot_mapping, k_scale, v_scale, q_scale),
            *(out_dtype, prefetch_weights),
        )[0]
    qkv = fp8_gemm(x, weight, x_scale, weight_scale, bias, out_dtype, prefetch_weights)
    return rope_kv(
        *(qkv, positions, cos_sin_cache, num_heads, is_neox, key_cache, value_cache),
        *(slot_mapping, k_scale, v_scale, q_norm, k_norm, eps, q_scale),
    )


def norm_qkv_rope_kv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    norm_eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    is_neox: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    q_scale: torch.Tensor | None = None,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As qkv_rope_kv of the normalised sum of ``x`` and ``residual``; see kernels/qkv."""
    tokens, norms, scales = (positions, slot_mapping), (q_norm, k_norm), (k_scale, v_scale)
    options = (key_cache, is_neox, num_heads, tokens, norms, scales)
    rope = (num_heads, is_neox, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if x.shape[0] <= FUSED_NORM_ROWS and fusible(x, weight, weight_scale, cos_sin_cache, *options):
        q, added = launch(
            *(x, None, residual, gain, norm_eps, weight, weight_scale, bias, positions),
            *(cos_sin_cache, num_heads, key_cache, value_cache, slot_mapping, k_scale, v_scale),
            *(q_scale, x.dtype, prefetch_weights),
        )
        assert added is not None
        return q, added
    codes, scale, added, _ = add_rms_norm_quant(
        x, residual, gain, norm_eps, None, False, prefetch_weights
    )
    q = qkv_rope_kv(
        *(codes, weight, scale, weight_scale, bias, x.dtype, positions, cos_sin_cache, *rope),
        *(q_norm, k_norm, eps, q_scale, prefetch_weights),
    )
    return q, added
