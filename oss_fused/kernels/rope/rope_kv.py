# SPDX-License-Identifier: MIT
"""Rotary embedding of q and k, optional norm per head before it, and the write to the paged cache.

qkv [T, (Hq + 2 Hkv) * D] as the projection leaves it; cos_sin_cache [P, R] holds cos | sin of
R / 2 angles; caches [blocks, block_size, Hkv, D] of any strides, in qkv's dtype or FP8
(x * (1 / scale), saturated). Slot -1 marks padding: its k and v are dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import quantize_static, round_to

# up to so many tokens, heads are spread over CTAs in small groups to fill the machine
_FEW_TOKENS = 64


@triton.jit
def _norm_gain(q_norm, k_norm, cols, mask, is_q, is_k):
    """Gain [heads, cols] of q and k heads, 1 elsewhere."""
    gain = tl.zeros(mask.shape, tl.float32) + 1.0
    if q_norm is not None:
        q_gain = tl.load(q_norm + cols, mask=mask & is_q, other=1.0).to(tl.float32)
        gain = tl.where(is_q, q_gain, gain)
    if k_norm is not None:
        k_gain = tl.load(k_norm + cols, mask=mask & is_k, other=1.0).to(tl.float32)
        gain = tl.where(is_k, k_gain, gain)
    return gain


@triton.jit
def _store_heads(
    values,
    cols,
    mask,
    q_out,
    key_slot,
    value_slot,
    q_inv,
    k_inv,
    v_inv,
    dtype: tl.constexpr,
    q_cols,
    k_cols,
    v_cols,
    is_q,
    is_k,
    is_v,
    write,
):
    rounded = round_to(values, dtype)
    if q_inv is not None:
        codes = quantize_static(rounded.to(tl.float32), q_inv)
        tl.store(q_out + q_cols + cols, codes, mask=mask & is_q)
    else:
        tl.store(q_out + q_cols + cols, rounded, mask=mask & is_q)
    if k_inv is not None:
        exact = rounded.to(tl.float32)
        tl.store(key_slot + k_cols + cols, quantize_static(exact, k_inv), mask=mask & is_k & write)
        tl.store(
            value_slot + v_cols + cols, quantize_static(exact, v_inv), mask=mask & is_v & write
        )
    else:
        tl.store(key_slot + k_cols + cols, rounded, mask=mask & is_k & write)
        tl.store(value_slot + v_cols + cols, rounded, mask=mask & is_v & write)


@triton.jit(do_not_specialize=["slots"])
def _rope_kv_kernel(
    qkv,
    positions,
    cos_sin,
    q_out,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    q_norm,
    k_norm,
    q_scale,
    slots,
    block_size,
    stride_qkv,
    stride_table,
    key_block,
    key_page,
    key_head,
    value_block,
    value_page,
    value_head,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    in_heads = head < Q_HEADS + 2 * KV_HEADS
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    half: tl.constexpr = ROTARY // 2
    pair = tl.arange(0, PAIRS)[None, :]
    in_pair = pair < half
    mask = in_heads & in_pair
    left = pair if NEOX else 2 * pair
    right = pair + half if NEOX else 2 * pair + 1
    wait_for_inputs()
    start_next()
    slot = tl.load(slot_mapping + token, mask=token < slots, other=-1).to(tl.int64)
    # a tensor, not a scalar: the interpreter takes no scalar in a mask
    write = (slot + tl.zeros_like(head)) >= 0
    position = tl.load(positions + token).to(tl.int64)
    table = cos_sin + position * stride_table
    cos = tl.load(table + pair, mask=in_pair, other=1.0).to(tl.float32)
    sin = tl.load(table + half + pair, mask=in_pair, other=0.0).to(tl.float32)
    source = qkv + token * stride_qkv + head * HEAD_DIM
    x_left = tl.load(source + left, mask=mask, other=0.0).to(tl.float32)
    x_right = tl.load(source + right, mask=mask, other=0.0).to(tl.float32)
    rest = ROTARY + tl.arange(0, REST)[None, :]
    rest_mask = in_heads & (rest < HEAD_DIM)
    x_rest = tl.load(source + rest, mask=rest_mask, other=0.0).to(tl.float32)

    if q_norm is not None or k_norm is not None:
        total = tl.sum(x_left * x_left + x_right * x_right, 1) + tl.sum(x_rest * x_rest, 1)
        rstd = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        normed = is_q if k_norm is None else (is_k if q_norm is None else is_q | is_k)
        gain = _norm_gain(q_norm, k_norm, left, mask, is_q, is_k)
        y = round_to(round_to(x_left * rstd, dtype).to(tl.float32) * gain, dtype)
        x_left = tl.where(normed, y.to(tl.float32), x_left)
        gain = _norm_gain(q_norm, k_norm, right, mask, is_q, is_k)
        y = round_to(round_to(x_right * rstd, dtype).to(tl.float32) * gain, dtype)
        x_right = tl.where(normed, y.to(tl.float32), x_right)
        gain = _norm_gain(q_norm, k_norm, rest, rest_mask, is_q, is_k)
        y = round_to(round_to(x_rest * rstd, dtype).to(tl.float32) * gain, dtype)
        x_rest = tl.where(normed, y.to(tl.float32), x_rest)

    out_left = tl.where(is_v, x_left, x_left * cos - x_right * sin)
    out_right = tl.where(is_v, x_right, x_right * cos + x_left * sin)
    q_inv, k_inv, v_inv = None, None, None
    if q_scale is not None:
        q_inv = tl.div_rn(1.0, tl.load(q_scale))
    if FP8_CACHE:
        k_inv = tl.div_rn(1.0, tl.load(k_scale))
        v_inv = tl.div_rn(1.0, tl.load(v_scale))
    block = slot // block_size
    page = slot % block_size
    key_slot = key_cache + block * key_block + page * key_page
    value_slot = value_cache + block * value_block + page * value_page
    q_out += token * (Q_HEADS * HEAD_DIM)
    q_cols = head * HEAD_DIM
    k_cols = (head - Q_HEADS).to(tl.int64) * key_head
    v_cols = (head - Q_HEADS - KV_HEADS).to(tl.int64) * value_head
    _store_heads(
        out_left,
        left,
        mask,
        q_out,
        key_slot,
        value_slot,
        q_inv,
        k_inv,
        v_inv,
        dtype,
        q_cols,
        k_cols,
        v_cols,
        is_q,
        is_k,
        is_v,
        write,
    )
    _store_heads(
        out_right,
        right,
        mask,
        q_out,
        key_slot,
        value_slot,
        q_inv,
        k_inv,
        v_inv,
        dtype,
        q_cols,
        k_cols,
        v_cols,
        is_q,
        is_k,
        is_v,
        write,
    )
    if ROTARY < HEAD_DIM:
        _store_heads(
            x_rest,
            rest,
            rest_mask,
            q_out,
            key_slot,
            value_slot,
            q_inv,
            k_inv,
            v_inv,
            dtype,
            q_cols,
            k_cols,
            v_cols,
            is_q,
            is_k,
            is_v,
            write,
        )


def _config(tokens: int, pairs: int) -> tuple[int, int]:
    """Heads of a CTA, and its warps: one warp with 1024 pairs where tokens fill the machine."""
    return (4, 1) if tokens <= _FEW_TOKENS else (max(1024 // pairs, 1), 1)


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
) -> torch.Tensor:
    """Rotated q; k and v go to the cache; see kernels/rope for the contract."""
    tokens = qkv.shape[0]
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    q_dtype = qkv.dtype if q_scale is None else FP8
    q = torch.empty(tokens, num_heads * head_dim, dtype=q_dtype, device=qkv.device)
    if tokens == 0:
        return q
    fp8_cache = key_cache.dtype == FP8
    if fp8_cache and (k_scale is None or v_scale is None):
        one = torch.ones(1, dtype=torch.float32, device=qkv.device)
        k_scale, v_scale = (
            k_scale if k_scale is not None else one,
            (v_scale if v_scale is not None else one),
        )
    rotary = cos_sin_cache.shape[1]
    pairs = next_power_of_2(rotary // 2)
    total_heads = num_heads + 2 * kv_heads
    heads, num_warps = _config(tokens, pairs)
    _rope_kv_kernel[(tokens, cdiv(total_heads, heads))](
        qkv,
        positions,
        cos_sin_cache,
        q,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        q_norm,
        k_norm,
        q_scale,
        slot_mapping.shape[0],
        block_size,
        qkv.stride(0),
        cos_sin_cache.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        eps,
        Q_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        NEOX=is_neox,
        FP8_CACHE=fp8_cache,
        HEADS=heads,
        PAIRS=pairs,
        REST=next_power_of_2(max(head_dim - rotary, 1)),
        num_warps=num_warps,
        **pdl_options(qkv.device),
    )
    return q
