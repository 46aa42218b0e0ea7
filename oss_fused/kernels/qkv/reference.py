# SPDX-License-Identifier: MIT
"""Decode projection: QKV product, then rotary embedding and cache write."""

from __future__ import annotations

import torch

from oss_fused.kernels.gemm.reference import fp8_gemm
from oss_fused.kernels.rope.reference import rope_kv


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
    qkv = fp8_gemm(x, weight, x_scale, weight_scale, bias, out_dtype, False, levels)
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
