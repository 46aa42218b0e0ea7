# SPDX-License-Identifier: MIT
"""Rotary embedding of q and k, optional norm per head before it, and the write to the paged cache.

qkv [T, (Hq + 2 Hkv) * D] as the projection leaves it; cos_sin_cache [P, R] holds cos | sin of
R / 2 angles; caches [blocks, block_size, Hkv, D] of any strides, in qkv's dtype or FP8
(x * (1 / scale), saturated). Slot -1 marks padding: its k and v are dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.cache import Heads, cache_row, paged_cache, reciprocal, store_values
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import round_to

# up to so many tokens, heads are spread over CTAs in small groups to fill the machine
_FEW_TOKENS = 64
# from so many on, a CTA has four warps: a thread then holds 16 values instead of 64
_MANY_TOKENS = 512


class _Columns(NamedTuple):
    """The first and second values of the rotation's pairs, and what is not rotated."""

    left: Any
    right: Any
    rest: Any


@triton.jit
def _load(source, columns, masks):
    """The values of all heads, float32."""
    left = tl.load(source + columns.left, mask=masks.left, other=0.0).to(tl.float32)
    right = tl.load(source + columns.right, mask=masks.right, other=0.0).to(tl.float32)
    rest = tl.load(source + columns.rest, mask=masks.rest, other=0.0).to(tl.float32)
    return _Columns(left, right, rest)


@triton.jit
def _apply_gain(x, rstd, columns, mask, heads, gains, dtype: tl.constexpr):
    """``x * rstd * gain``, rounded after each product; heads that have no gain stay as they are."""
    gain = tl.zeros(mask.shape, tl.float32) + 1.0
    if gains.q is not None:
        q_gain = tl.load(gains.q + columns, mask=mask & heads.q, other=1.0).to(tl.float32)
        gain = tl.where(heads.q, q_gain, gain)
    if gains.k is not None:
        k_gain = tl.load(gains.k + columns, mask=mask & heads.k, other=1.0).to(tl.float32)
        gain = tl.where(heads.k, k_gain, gain)
    normed = heads.q if gains.k is None else (heads.k if gains.q is None else heads.q | heads.k)
    y = round_to(round_to(x * rstd, dtype).to(tl.float32) * gain, dtype)
    return tl.where(normed, y.to(tl.float32), x)


@triton.jit
def _norm(x, columns, masks, heads, gains, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of every head that has a gain."""
    total = tl.sum(x.left * x.left + x.right * x.right, 1) + tl.sum(x.rest * x.rest, 1)
    rstd = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
    left = _apply_gain(x.left, rstd, columns.left, masks.left, heads, gains, dtype)
    right = _apply_gain(x.right, rstd, columns.right, masks.right, heads, gains, dtype)
    rest = _apply_gain(x.rest, rstd, columns.rest, masks.rest, heads, gains, dtype)
    return _Columns(left, right, rest)


@triton.jit
def _store(values, columns, mask, heads, targets, inverses, dtype: tl.constexpr):
    """Round the values of all heads; store them in q and in the caches."""
    rounded = round_to(values, dtype)
    store_values(targets.q + columns, rounded, mask & heads.q, inverses.q)
    store_values(targets.k + columns, rounded, mask & heads.k, inverses.k)
    store_values(targets.v + columns, rounded, mask & heads.v, inverses.v)


@triton.jit(do_not_specialize=["slots"])
def _rope_kv_kernel(
    qkv,
    positions,
    cos_sin,
    q_out,
    key_cache,
    value_cache,
    slot_mapping,
    scales,
    gains,
    slots,
    stride_qkv,
    stride_table,
    eps,
    Q_HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    dtype: tl.constexpr = qkv.dtype.element_ty
    half: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    heads = Heads(head < Q_HEADS, is_k, head >= Q_HEADS + KV_HEADS)
    pair = tl.arange(0, PAIRS)[None, :]
    rest = ROTARY + tl.arange(0, REST)[None, :]
    columns = _Columns(pair if NEOX else 2 * pair, pair + half if NEOX else 2 * pair + 1, rest)
    in_heads = head < Q_HEADS + 2 * KV_HEADS
    mask = in_heads & (pair < half)
    masks = _Columns(mask, mask, in_heads & (rest < HEAD_DIM))
    wait_for_inputs()
    start_next()
    slot = tl.load(slot_mapping + token, mask=token < slots, other=-1).to(tl.int64)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * stride_table
    cos = tl.load(table + pair, mask=pair < half, other=1.0).to(tl.float32)
    sin = tl.load(table + half + pair, mask=pair < half, other=0.0).to(tl.float32)
    x = _load(qkv + token * stride_qkv + head * HEAD_DIM, columns, masks)
    if gains.q is not None or gains.k is not None:
        x = _norm(x, columns, masks, heads, gains, eps, HEAD_DIM, dtype)
    left = tl.where(heads.v, x.left, x.left * cos - x.right * sin)
    right = tl.where(heads.v, x.right, x.right * cos + x.left * sin)
    inverses = Heads(reciprocal(scales.q), reciprocal(scales.k), reciprocal(scales.v))
    q = q_out + token * (OUT_HEADS * HEAD_DIM) + head * HEAD_DIM
    k = cache_row(key_cache, slot, head - Q_HEADS)
    targets = Heads(q, k, cache_row(value_cache, slot, head - Q_HEADS - KV_HEADS))
    # a tensor, not a scalar: the interpreter takes no scalar in a mask
    write = (slot + tl.zeros_like(head)) >= 0
    heads = Heads(head < OUT_HEADS, heads.k & write, heads.v & write)
    _store(left, columns.left, mask, heads, targets, inverses, dtype)
    _store(right, columns.right, mask, heads, targets, inverses, dtype)
    if ROTARY < HEAD_DIM:
        _store(x.rest, rest, masks.rest, heads, targets, inverses, dtype)


def _config(tokens: int, pairs: int) -> tuple[int, int]:
    """Heads of a CTA, and its warps: 1024 pairs where tokens fill the machine."""
    if tokens <= _FEW_TOKENS:
        return 4, 1
    return max(1024 // pairs, 1), 4 if tokens >= _MANY_TOKENS else 1


def _scale_of(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The scale that an FP8 ``cache`` takes; another one takes none."""
    if cache.dtype != FP8:
        return None
    return torch.ones(1, dtype=torch.float32, device=cache.device) if scale is None else scale


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
    q_dtype = qkv.dtype if q_scale is None else FP8
    out_heads = num_heads + kv_heads if with_keys else num_heads
    q = torch.empty(tokens, out_heads * head_dim, dtype=q_dtype, device=qkv.device)
    if tokens == 0:
        return q
    rotary = cos_sin_cache.shape[1]
    pairs = next_power_of_2(rotary // 2)
    heads, num_warps = _config(tokens, pairs)
    _rope_kv_kernel[(tokens, cdiv(num_heads + 2 * kv_heads, heads))](
        qkv,
        positions,
        cos_sin_cache,
        q,
        paged_cache(key_cache, constant=True),
        paged_cache(value_cache, constant=True),
        slot_mapping,
        Heads(q_scale, _scale_of(key_cache, k_scale), _scale_of(value_cache, v_scale)),
        Heads(q_norm, k_norm, None),
        slot_mapping.shape[0],
        qkv.stride(0),
        cos_sin_cache.stride(0),
        eps,
        Q_HEADS=num_heads,
        OUT_HEADS=out_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        NEOX=is_neox,
        HEADS=heads,
        PAIRS=pairs,
        REST=next_power_of_2(max(head_dim - rotary, 1)),
        num_warps=num_warps,
        **pdl_options(qkv.device),
    )
    return q
