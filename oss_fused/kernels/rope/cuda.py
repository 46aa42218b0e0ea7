# SPDX-License-Identifier: MIT
"""Rotary embedding with RMSNorm before it or the KV cache behind it, by vLLM's kernels."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FP8, check_dtype
from oss_fused.kernels.norm.cuda import rms_norm
from oss_fused.kernels.vllm_ops import vllm_ops

_ops = vllm_ops()


def rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm, then the rotation in place: two launches, and the rows cross memory twice.

    Raises:
        ShapeMismatchError: also where the halves of ``cos`` or ``sin`` differ: the compiled
            rotation has one angle for both elements of a pair.
    """
    check_dtype("weight", weight, (x.dtype,))
    batch, sequence, hidden = x.shape
    half = cos.shape[1] // 2
    # looking at values waits for the GPU, which a graph that is being captured must not
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    for name, table in () if capturing else (("cos", cos), ("sin", sin)):
        if not torch.equal(table[:, :half], table[:, half:]):
            raise ShapeMismatchError(f"{name}: backend 'cuda' expects two equal halves")
    rows = x.reshape(batch * sequence, hidden).contiguous()
    y = rms_norm(rows, weight, eps)
    if y.numel():
        cache = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).to(x.dtype)
        positions = torch.arange(sequence, device=x.device).repeat(batch)
        _ops.rotary_embedding(positions, y, None, 2 * half, cache, True)
    return y.view(batch, sequence, hidden)


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
    kv_heads, head_dim = key_cache.shape[2:]
    sizes = [heads * head_dim for heads in (num_heads, kv_heads, kv_heads)]
    q, k, v = (part.contiguous() for part in qkv.split(sizes, dim=-1))
    if q_norm is not None:
        q = rms_norm(q.view(-1, head_dim), q_norm, eps).view(tokens, -1)
    if k_norm is not None:
        k = rms_norm(k.view(-1, head_dim), k_norm, eps).view(tokens, -1)
    # the rotation is in place, and a slice that is contiguous already still belongs to qkv
    q, k = q.clone(), k.clone()
    if tokens:
        cache = cos_sin_cache.to(qkv.dtype)
        _ops.rotary_embedding(positions, q, k, head_dim, cache, is_neox)
    stored = slot_mapping.shape[0]
    if stored:
        one = torch.ones(1, device=qkv.device)
        heads = (stored, kv_heads, head_dim)
        quantized = key_cache.dtype == FP8
        caches = (key_cache, value_cache)
        torch.ops._C_cache_ops.reshape_and_cache_flash(
            k[:stored].view(heads),
            v[:stored].view(heads),
            *(cache.view(torch.uint8) if quantized else cache for cache in caches),
            slot_mapping,
            "fp8" if quantized else "auto",
            one if k_scale is None else k_scale,
            one if v_scale is None else v_scale,
        )
    return torch.cat([q, k], dim=1) if with_keys else q
