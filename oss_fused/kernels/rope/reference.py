# SPDX-License-Identifier: MIT
"""Rotary embedding with RMSNorm before it or the KV cache behind it, in float32."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.norm.reference import rms_norm
from oss_fused.kernels.quantize.reference import quantize_rows


def rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """``y * cos + rotate_half(y) * sin`` of ``y = rms_norm(x)``; see kernels/rope."""
    batch, sequence, hidden = x.shape
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    y = y.view(batch, sequence, hidden // cos.shape[1], cos.shape[1])
    left, right = y.chunk(2, dim=-1)
    rotated = torch.cat([-right, left], dim=-1)
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    return (y * cos + rotated * sin).to(x.dtype).view(batch, sequence, hidden)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate the leading 2 * cos.shape[-1] elements of x [T, heads, D], float32, rounded once."""
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    if is_neox:
        left, right = head[..., :half], head[..., half:]
        out = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    else:
        left, right = head[..., 0::2], head[..., 1::2]
        out = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(-2)
    return torch.cat([out.to(x.dtype), rest], dim=-1)


def rope_kv(
    qkv: torch.Tensor,
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
    with_keys: bool = False,
) -> torch.Tensor:
    """Rotated q; k and v go to the cache; see kernels/rope for the contract."""
    tokens = qkv.shape[0]
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = qkv.view(tokens, num_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split([num_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    q, k = rotate(q, cos, sin, is_neox), rotate(k, cos, sin, is_neox)
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    for cache, values, scale in ((key_cache, k, k_scale), (value_cache, v, v_scale)):
        rows = values[: used.shape[0]][used]
        if cache.dtype == FP8:
            if scale is None:
                scale = torch.ones(1, device=qkv.device)
            rows = quantize_rows(rows.reshape(-1, head_dim), scale.view(1, 1))[0].view(rows.shape)
            cache.view(torch.uint8)[slots // block_size, slots % block_size] = rows.view(
                torch.uint8
            )
        else:
            cache[slots // block_size, slots % block_size] = rows
    q = (torch.cat([q, k], 1) if with_keys else q).flatten(1)
    return q if q_scale is None else quantize_rows(q, q_scale.view(1, 1))[0]


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


def rmsnorm_rope_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight."""
    heads = (*x.shape[:-1], x.shape[-1] // cos.shape[-1], cos.shape[-1])
    g = _wide(grad).reshape(heads)
    left, right = (g * _wide(sin)[:, None, :]).chunk(2, dim=-1)
    g = (g * _wide(cos)[:, None, :] + torch.cat([right, -left], dim=-1)).reshape(x.shape)
    x_wide = _wide(x)
    r = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = x_wide * r
    weighted = g * _wide(weight)
    dx = r * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    dw = (g * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)
