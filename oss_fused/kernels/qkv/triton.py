# SPDX-License-Identifier: MIT
"""qkv_rope_kv: one launch for few tokens, otherwise the product and rope_kv."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FP8, as_rows
from oss_fused.kernels.gemm.triton import fp8_gemm
from oss_fused.kernels.levels import levels_of
from oss_fused.kernels.qkv.stream import fits_projection, launch
from oss_fused.kernels.rope.rope_kv import rope_kv


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
    levels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotated q of the projection of ``x``; see kernels/qkv for the contract."""
    no_norms = q_norm is None and k_norm is None
    cache_scaled = key_cache.dtype != FP8 or (k_scale is not None and v_scale is not None)
    operands = (x, weight, x_scale, weight_scale)
    both = levels_of(x, levels)
    per_token = 1 if both is None else 2
    joined = operands if both is None else (as_rows(both), *operands[1:])
    rotary = (cos_sin_cache, is_neox, key_cache)
    if no_norms and cache_scaled and fits_projection(*joined, *rotary, per_token):
        return launch(
            *joined,
            bias,
            out_dtype,
            positions,
            cos_sin_cache,
            num_heads,
            key_cache,
            value_cache,
            slot_mapping,
            k_scale,
            v_scale,
            q_scale,
            prefetch_weights,
            per_token,
        )
    qkv = fp8_gemm(*operands, bias, out_dtype, prefetch_weights, levels)
    return rope_kv(
        qkv,
        positions,
        cos_sin_cache,
        num_heads,
        is_neox,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        q_norm,
        k_norm,
        eps,
        q_scale,
    )
