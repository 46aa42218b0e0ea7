# SPDX-License-Identifier: MIT
"""qkv_rope_kv of at most 128 tokens in one Gluon kernel.

A CTA takes 32 rotation pairs of one head. These are 64 rows of the weight, in two boxes of 32
rows, so that both halves of a pair meet in its accumulator.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.cache import Heads, cache_row, paged_cache, reciprocal, store_values
from oss_fused.kernels.checks import FP8, has_aligned_rows
from oss_fused.kernels.gemm.stream import stream_stages
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import (
    pdl_options,
    runs_gluon,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.pipeline import descriptor, token_descriptor
from oss_fused.kernels.ring import WIDTH, load_ring, make_ring, make_tiles, sum_ring
from oss_fused.kernels.tiles import row_bucket

# rows of codes that a CTA holds at most: with more, the two launches read less through L2
MAX_ROWS = 128
# rows of the weight in one box; two are a tile of wgmma
BOX_ROWS = 32
# columns of which the ring holds nearly all
_SHORT = 3072


@gluon.constexpr_function
def paired_layout(pairs, tokens, warps):
    """Layout of [pairs, tokens, 2]: one thread has both halves of a pair."""
    threads = tokens // warps
    of_thread = [pairs * threads // 32, 1, 2]
    return gl.BlockedLayout(of_thread, [32 // threads, threads, 1], [1, warps, 1], [2, 0, 1])


@gluon.jit
def _load_bias(bias, at):
    """Bias of the weight's rows ``at``, float32; None where there is none."""
    shift = None
    if bias is not None:
        shift = gl.load(bias + at).to(gl.float32)
    return shift


@gluon.jit
def _finish(half, row_scale, channel, shift, dtype: gl.constexpr):
    """Scale the sums of one half of the pairs, add their bias, round."""
    half = half * row_scale[None, :] * channel[:, None]
    if shift is not None:
        half += shift[:, None]
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


@gluon.jit
def _multiply(
    ring,
    operands,
    place,
    sizes,
    HEAD_DIM: gl.constexpr,
    LEVELS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """The product of one head's pairs, rotated, into q or the cache."""
    inputs, q_out, caches, slots, scales = operands
    a_scale, b_scale, bias, positions, cos_sin, stride_table = inputs
    head, first = place
    m, k, slot_count, heads, kv_heads = sizes
    PAIRS: gl.constexpr = ring[1].type.shape[1] // 2
    TOKENS: gl.constexpr = ring[0].type.shape[1] // LEVELS
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = q_out.dtype.element_ty if scales.q is None else cos_sin.dtype.element_ty
    paired: gl.constexpr = paired_layout(PAIRS, TOKENS, gl.num_warps())
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, paired)))
    pair = first + gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, paired)))
    at = head * HEAD_DIM + pair
    wait_unless(PREFETCH)
    # everything that the epilogue needs arrives before the sums are there
    left_scale, right_scale = gl.load(b_scale + at), gl.load(b_scale + at + HALF)
    left_bias = _load_bias(bias, at)
    right_bias = _load_bias(bias, at + HALF)
    wait_for_inputs()
    start_next()
    slot = gl.load(slots + token, mask=token < slot_count, other=-1).to(gl.int64)
    cos, sin = _load_angles(positions, cos_sin, stride_table, token, pair, m, HALF)
    row_scale = gl.load(a_scale + token, mask=token < m, other=0.0)
    acc = sum_ring(ring, k)
    if LEVELS == 2:
        # both levels of a token are neighbouring columns, in one thread
        first_level, second_level = gl.split(acc.reshape([2 * PAIRS, TOKENS, 2]))
        acc = first_level + second_level * 0.0625
    acc = acc.reshape([2, PAIRS, TOKENS]).permute((1, 2, 0))
    left, right = gl.split(gl.convert_layout(acc, paired))
    left = _finish(left, row_scale, left_scale, left_bias, dtype)
    right = _finish(right, row_scale, right_scale, right_bias, dtype)
    if head < heads + kv_heads:
        left, right = _rotate(left, right, cos, sin, dtype)
    if head < heads:
        row = q_out + token.to(gl.int64) * (heads * HEAD_DIM) + head * HEAD_DIM
        _store(row, pair, token < m, left, right, scales.q, HALF)
    else:
        mask = (token < m) & (slot >= 0)
        _store_cached(caches, slot, head - heads, kv_heads, pair, mask, (left, right), scales, HALF)


@gluon.jit(do_not_specialize=["m", "slot_count", "heads"])
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
    slots,
    scales,
    m,
    k,
    slot_count,
    heads,
    kv_heads,
    stride_table,
    HEAD_DIM: gl.constexpr,
    LEVELS: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    WHOLE: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    PAIRS: gl.constexpr = b_desc.block_type.shape[0]
    HALF: gl.constexpr = HEAD_DIM // 2
    head = gl.program_id(0) // (HALF // PAIRS)
    first = gl.program_id(0) % (HALF // PAIRS) * PAIRS
    first_n = head * HEAD_DIM + first
    # both halves of the pairs
    ring = make_ring(make_tiles(a_desc, STAGES * SLABS, 1), b_desc, STAGES, SLABS, 2, WHOLE)
    warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(warm, count=1)
    inputs = (a_scale, b_scale, bias, positions, cos_sin, stride_table)
    operands = (inputs, q_out, caches, slots, scales)
    sizes = (m, k, slot_count, heads, kv_heads)
    steps = ((0, 0), (HALF, 0))
    gl.warp_specialize(
        [
            (_multiply, (ring, operands, (head, first), sizes, HEAD_DIM, LEVELS, PREFETCH)),
            (load_ring, (a_desc, b_desc, ring, warm, (0, first_n, 0), steps, k, PREFETCH)),
        ],
        [1],
        [24],
    )


def _tile(rows: int, k: int, levels: int) -> tuple[int, int, int]:
    """Rows of codes in a tile, tiles of 128 columns in a stage, stages."""
    block_m = 8 if rows <= 8 else row_bucket(rows)
    # every wait costs the whole CTA two barriers; of a longer K less would be on its way
    slabs = 4 if block_m <= 16 and k <= _SHORT else 2 if block_m <= 64 else 1
    # the sums of both halves of a pair meet through shared memory, with some padding
    exchange = 5 * 2 * BOX_ROWS * (block_m // levels)
    stages = stream_stages(k, block_m, 2 * BOX_ROWS, WIDTH * slabs, 1, exchange)
    return block_m, slabs, stages


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
        x.numel() > 0
        and x.shape[0] <= MAX_ROWS
        and x.shape[0] == levels * x_scale.numel()
        and weight_scale.numel() == weight.shape[0]
        and has_aligned_rows(x)
        and has_aligned_rows(weight)
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
    block_m, slabs, stages = _tile(rows, k, levels)
    _qkv_kernel[(cdiv(weight.shape[0], 2 * BOX_ROWS),)](
        token_descriptor(x, block_m, WIDTH),
        descriptor(weight, BOX_ROWS, WIDTH),
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
        k,
        slot_mapping.shape[0],
        num_heads,
        kv_heads,
        cos_sin_cache.stride(0),
        HEAD_DIM=head_dim,
        LEVELS=levels,
        STAGES=stages,
        SLABS=slabs,
        WHOLE=stages * slabs * WIDTH >= k,
        PREFETCH=prefetch_weights,
        # of 128 tokens, two warpgroups take half each
        num_warps=8 if block_m == MAX_ROWS else 4,
        # room for the sums of 64 tokens, and for their angles
        maxnreg=168,
        **pdl_options(x.device),
    )
    return q
