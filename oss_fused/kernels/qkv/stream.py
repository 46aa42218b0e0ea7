# SPDX-License-Identifier: MIT
"""qkv_rope_kv of at most 16 tokens in one Gluon kernel.

A CTA takes 32 rotation pairs of one head. These are 64 rows of the weight, in two boxes of 32
rows, so that both halves of a pair meet in its accumulator.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.cache import Heads, cache_row, paged_cache, reciprocal, store_values
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.launch import (
    pdl_options,
    runs_gluon,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.pipeline import descriptor
from oss_fused.kernels.qkv.product import (
    BLOCK_K,
    BOX_ROWS,
    GROUP_K,
    SLABS,
    block_m,
    fits,
    groups,
    product,
    request_tokens,
    request_weights,
    stages,
    steps,
)


@gluon.constexpr_function
def paired_layout(pairs, tokens, warps):
    """Layout of [pairs, tokens, 2]: one thread has both halves of a pair."""
    threads = tokens // 4
    of_thread = [pairs * threads // 32, 1, 2]
    return gl.BlockedLayout(of_thread, [32 // threads, threads, 1], [1, warps, 1], [2, 0, 1])


@gluon.jit
def _make_buffers(
    b_desc,
    BLOCK_M: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
):
    """Tokens, tiles of weights, and a barrier for each stage and one for the tokens."""
    ROWS: gl.constexpr = 2 * b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, BLOCK_M, 4 * BLOCK_K], b_desc.layout)
    weights = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * SLABS, ROWS, BLOCK_K], b_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(slot), count=1)
    return tokens, weights, full


@gluon.jit
def _finish(half, row_scale, channel, bias, at, dtype: gl.constexpr):
    """Scale the sums of one half of the pairs, add the bias of rows ``at``, round."""
    half = half * row_scale[None, :] * channel[:, None]
    if bias is not None:
        half += gl.load(bias + at).to(gl.float32)[:, None]
    return half.to(dtype)


@gluon.jit
def _load_angles(positions, cos_sin, stride_table, token, pair, m, HALF: gl.constexpr):
    """cos and sin [pairs, tokens]."""
    position = gl.load(positions + token, mask=token < m, other=0).to(gl.int64)
    angles = cos_sin + (position * stride_table)[None, :] + pair[:, None]
    return gl.load(angles).to(gl.float32), gl.load(angles + HALF).to(gl.float32)


@gluon.jit
def _rotate(left, right, cos, sin, dtype: gl.constexpr):
    left, right = left.to(gl.float32), right.to(gl.float32)
    return (left * cos - right * sin).to(dtype), (right * cos + left * sin).to(dtype)


@gluon.jit
def _store(rows, pair, mask, left, right, scale, HALF: gl.constexpr):
    """Store both halves of the pairs at the pointers ``rows`` [tokens]."""
    target = rows[None, :] + pair[:, None]
    mask = mask[None, :] & (pair < HALF)[:, None]
    inverse = reciprocal(scale)
    store_values(target, left, mask, inverse)
    store_values(target + HALF, right, mask, inverse)


@gluon.jit
def _store_cached(caches, slot, head, kv_heads, pair, mask, halves, scales, HALF: gl.constexpr):
    """Store key head ``head``, or value head ``head - kv_heads``, in the slots [tokens]."""
    left, right = halves
    if head < kv_heads:
        rows = cache_row(caches[0], slot, head)
        _store(rows, pair, mask, left, right, scales.k, HALF)
    else:
        rows = cache_row(caches[1], slot, head - kv_heads)
        _store(rows, pair, mask, left, right, scales.v, HALF)


@gluon.jit(do_not_specialize=["m", "slots", "heads"])
def _qkv_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    bias,
    positions,
    cos_sin,
    q_out,
    caches,
    slot_mapping,
    scales,
    m,
    slots,
    heads,
    kv_heads,
    stride_table,
    HEAD_DIM: gl.constexpr,
    LEVELS: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    PAIRS: gl.constexpr = b_desc.block_type.shape[0]
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = q_out.dtype.element_ty if scales.q is None else cos_sin.dtype.element_ty
    head = gl.program_id(0) // (HALF // PAIRS)
    first = gl.program_id(0) % (HALF // PAIRS) * PAIRS
    first_n = head * HEAD_DIM + first
    tokens, weights, full = _make_buffers(b_desc, BLOCK_M, GROUPS, STAGES, SLABS)
    wait_unless(PREFETCH)
    for step in gl.static_range(STAGES):
        request_weights(b_desc, first_n, first_n + HALF, step, step, full, weights, SLABS)
    wait_for_inputs()
    start_next()
    request_tokens(a_desc, full, tokens, STAGES)
    TOKENS: gl.constexpr = BLOCK_M // LEVELS
    paired: gl.constexpr = paired_layout(PAIRS, TOKENS, gl.num_warps())
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, paired)))
    pair = first + gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, paired)))
    at = head * HEAD_DIM + pair
    left_scale, right_scale = gl.load(b_scale + at), gl.load(b_scale + at + HALF)
    slot = gl.load(slot_mapping + token, mask=token < slots, other=-1).to(gl.int64)
    cos, sin = _load_angles(positions, cos_sin, stride_table, token, pair, m, HALF)
    row_scale = gl.load(a_scale + token, mask=token < m, other=0.0)
    mbarrier.wait(full.index(STAGES), 0)
    acc = product(b_desc, first_n, first_n + HALF, full, tokens, weights, STEPS, STAGES, SLABS)
    if LEVELS == 2:
        # both levels of a token are neighbouring columns, in one thread
        first_level, second_level = gl.split(acc.reshape([2 * PAIRS, TOKENS, 2]))
        acc = first_level + second_level * 0.0625
    acc = acc.reshape([2, PAIRS, TOKENS]).permute((1, 2, 0))
    left, right = gl.split(gl.convert_layout(acc, paired))
    left = _finish(left, row_scale, left_scale, bias, at, dtype)
    right = _finish(right, row_scale, right_scale, bias, at + HALF, dtype)
    if head < heads + kv_heads:
        left, right = _rotate(left, right, cos, sin, dtype)
    if head < heads:
        row = q_out + token.to(gl.int64) * (heads * HEAD_DIM) + head * HEAD_DIM
        _store(row, pair, token < m, left, right, scales.q, HALF)
    else:
        mask = (token < m) & (slot >= 0)
        _store_cached(caches, slot, head - heads, kv_heads, pair, mask, (left, right), scales, HALF)


def joins(device: torch.device, head_dim: int, rotary_dim: int, is_neox: bool) -> bool:
    """Whether this kernel runs on ``device`` and takes that rotary embedding."""
    return (
        runs_gluon(device) and is_neox and rotary_dim == head_dim and head_dim % (2 * BOX_ROWS) == 0
    )


def fits_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    key_cache: torch.Tensor,
    levels: int,
) -> bool:
    """Whether this kernel takes the projection of ``x``, so many rows of which are a token's."""
    return (
        fits(x, weight, weight_scale)
        and x.shape[0] == levels * x_scale.numel()
        and joins(x.device, key_cache.shape[3], cos_sin_cache.shape[1], is_neox)
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    prefetch_weights: bool,
    levels: int,
) -> torch.Tensor:
    """Rotated q of arguments that ``fits_projection`` takes."""
    rows, k = x.shape
    m = rows // levels
    kv_heads, head_dim = key_cache.shape[2:]
    q_dtype = out_dtype if q_scale is None else FP8
    q = torch.empty(m, num_heads * head_dim, dtype=q_dtype, device=x.device)
    _qkv_kernel[(weight.shape[0] // (2 * BOX_ROWS),)](
        descriptor(x, block_m(rows), GROUP_K),
        descriptor(weight, BOX_ROWS, BLOCK_K),
        x_scale,
        weight_scale,
        bias,
        positions,
        cos_sin_cache,
        q,
        (paged_cache(key_cache), paged_cache(value_cache)),
        slot_mapping,
        Heads(q_scale, k_scale, v_scale),
        m,
        slot_mapping.shape[0],
        num_heads,
        kv_heads,
        cos_sin_cache.stride(0),
        HEAD_DIM=head_dim,
        LEVELS=levels,
        STAGES=stages(rows, k),
        SLABS=SLABS,
        STEPS=steps(k),
        GROUPS=groups(k),
        BLOCK_M=block_m(rows),
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(x.device),
    )
    return q
