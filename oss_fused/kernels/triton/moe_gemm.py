# SPDX-License-Identifier: MIT
"""Grouped products of the experts: tokens sorted by expert times MXFP4 weights.

One program computes ``64 * GROUPS`` weight rows for up to ROWS tokens of one expert. Activations
are e4m3 codes [rows, LEVELS, KP] in the order of moe_tile. With LEVELS = 2 a value is
``(first + second / 16) * scale``, which is exact for bfloat16 (8 significant bits) over 14
octaves below the row's largest value, so the FP8 tensor cores give bfloat16 x MXFP4 products;
with LEVELS = 1 it is FP8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.triton.launch import start_next, wait_for_inputs
from oss_fused.kernels.triton.moe_tile import (
    activation_position,
    dot_tile,
    group_row,
    prefetch_bytes,
    row_scale,
    unpack_weights,
)
from oss_fused.kernels.triton.numerics import from_fp8, round_to, to_fp8


@triton.jit
def _products(
    x, weight, weight_scale, x_rows, x_mask,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    GROUPS: tl.constexpr, SPLIT: tl.constexpr, PROMOTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight rows x tokens [64 * GROUPS, ROWS], scales of rows and tokens not yet applied.

    SPLIT > 1 (with GROUPS = 1) gives each of SPLIT parts of the tile the same weight rows but a
    share of K of its own, to shorten the chain of steps where there are few tokens. The tokens'
    columns come SPLIT times, once per share; products of a part with another's share are dropped.
    """
    PARTS: tl.constexpr = GROUPS * SPLIT
    COLUMNS: tl.constexpr = SPLIT * ROWS * LEVELS
    CHUNKS: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = CHUNKS // SPLIT if K % (128 * SPLIT) == 0 else CHUNKS // SPLIT + 1
    WHOLE: tl.constexpr = K // 128 if SPLIT == 1 else 0
    q = tl.arange(0, 64 * PARTS)
    part = q // 32 % PARTS
    row = q // (32 * PARTS) * 32 + q % 32
    group = part // SPLIT
    share = part % SPLIT
    byte = tl.arange(0, 64)
    k = tl.arange(0, 128)
    w_rows = weight + group.to(tl.int64) * (64 * (K // 2))
    s_rows = weight_scale + group * (64 * CHUNKS) + row
    # column (share, r, l) of the tile is level l of token r
    column = tl.arange(0, COLUMNS)
    x_share = column // (ROWS * LEVELS)
    x_rows = x_rows[None, :, None].broadcast_to(SPLIT, ROWS, LEVELS).reshape(COLUMNS)
    x_mask = x_mask[None, :, None].broadcast_to(SPLIT, ROWS, LEVELS).reshape(COLUMNS)
    x_base = x + (x_rows.to(tl.int64) * LEVELS + column % LEVELS) * KP + x_share * (STEPS * 128)
    x_ptrs = x_base[:, None] + k[None, :]
    acc = tl.zeros((64 * PARTS, COLUMNS), tl.float32)
    if SPLIT == 1:
        w_ptrs = (w_rows + row * 64)[:, None] + byte[None, :]
        for _ in tl.range(0, WHOLE, num_stages=STAGES):
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            s = tl.load(s_rows)
            tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
            acc = dot_tile(unpack_weights(w, s, PARTS), tokens.T, acc, PROMOTE)
            w_ptrs += 4096
            s_rows += 64
            x_ptrs += 128
        if WHOLE < CHUNKS:
            # the last chunk's rows are shorter; the blocks it lacks count as zeros
            w_ptrs = (w_rows + WHOLE * 4096 + row * (K % 128 // 2))[:, None] + byte[None, :]
            w = tl.load(w_ptrs, mask=(byte < K % 128 // 2)[None, :], other=0)
            tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
            acc = dot_tile(unpack_weights(w, tl.load(s_rows), PARTS), tokens.T, acc, PROMOTE)
    else:
        for step in tl.range(0, STEPS, num_stages=STAGES):
            chunk = share * STEPS + step
            width = tl.minimum(tl.maximum(K - chunk * 128, 0), 128) // 32 * 16
            w_ptrs = (w_rows + chunk * 4096 + row * width)[:, None] + byte[None, :]
            w = tl.load(w_ptrs, mask=byte[None, :] < width[:, None], other=0)
            s = tl.load(s_rows + chunk * 64, mask=chunk < CHUNKS, other=0)
            live = x_mask & (x_share * STEPS + step < CHUNKS)
            tokens = tl.load(x_ptrs, mask=live[:, None], other=0.0)
            acc = dot_tile(unpack_weights(w, s, PARTS), tokens.T, acc, PROMOTE)
            x_ptrs += 128
        own = tl.arange(0, SPLIT)
        parts = acc.reshape(SPLIT, 64, SPLIT, ROWS * LEVELS)
        diagonal = own[:, None, None, None] == own[None, None, :, None]
        acc = tl.sum(tl.sum(tl.where(diagonal, parts, 0.0), 2), 0)
    if LEVELS == 2:
        first, second = acc.reshape(64 * GROUPS, ROWS, 2).split()
        acc = first + second * 0.0625
    return acc


@triton.jit
def _gate_up_kernel(
    x, x_scale, weight, weight_scale, bias, out, order, tiles,
    top_k: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, OP: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    SILU: tl.constexpr, STAGES: tl.constexpr, PROMOTE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """act(w13 @ x + bias) of sorted rows: e4m3 codes [P, LEVELS, OP], or DTYPE [P, N/2] (SILU)."""
    SPAN: tl.constexpr = 32 * GROUPS
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs()
    # only now, so that the next kernel may read the tiles before its own wait
    start_next()
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    begin = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    expert = expert.to(tl.int64)
    # the last program of an odd number of groups repeats one: same inputs, same values
    group = tl.minimum(unit * GROUPS, N // 64 - GROUPS)
    weight += expert * (N * (K // 2)) + group * (64 * (K // 2))
    weight_scale += (expert * (N // 64) + group) * (64 * ((K + 127) // 128))
    position = begin + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < count
    token = tl.load(order + position, mask=mask, other=0) // top_k
    acc = _products(
        x, weight, weight_scale, token, mask, K, KP, ROWS, LEVELS, GROUPS, SPLIT, PROMOTE, STAGES
    )
    # tile rows (w, pair, r): pair 0 are gates, pair 1 the ups of the same intermediate columns
    pairs = acc.reshape(GROUPS, 4, 2, 8, ROWS).permute(0, 1, 3, 4, 2).reshape(SPAN, ROWS, 2)
    gate, up = pairs.split()
    row = tl.arange(0, SPAN)
    s_ptrs = weight_scale + row // 32 * (64 * ((K + 127) // 128)) + row % 32
    scale = tl.load(x_scale + token, mask=mask, other=0.0)[None, :]
    gate = gate * row_scale(tl.load(s_ptrs))[:, None] * scale
    up = up * row_scale(tl.load(s_ptrs + 32))[:, None] * scale
    column = group * 32 + row
    if bias is not None:
        b_ptrs = bias + expert * N + 2 * column
        gate += tl.load(b_ptrs).to(tl.float32)[:, None]
        up += tl.load(b_ptrs + 1).to(tl.float32)[:, None]
    if SILU:
        act = gate * tl.sigmoid(gate) * up
        o_ptrs = out + position.to(tl.int64)[None, :] * (N // 2) + column[:, None]
        tl.store(o_ptrs, round_to(act, DTYPE), mask=mask[None, :])
    else:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        act = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
        if LEVELS == 2:
            act = round_to(act, DTYPE).to(tl.float32)
        act *= 8.0
        row_base = out + position.to(tl.int64) * (LEVELS * OP)
        o_ptrs = row_base[None, :] + activation_position(column)[:, None]
        first = to_fp8(act)
        tl.store(o_ptrs, first, mask=mask[None, :])
        if LEVELS == 2:
            tl.store(o_ptrs + OP, to_fp8((act - from_fp8(first)) * 16.0), mask=mask[None, :])
        # the last program fills the chunk: what is not written could hold NaN codes
        if (OP != N // 2) & (group == N // 64 - GROUPS):
            pad = tl.arange(0, 128)
            p_ptrs = row_base[None, :] + activation_position(N // 2 + pad)[:, None]
            p_mask = (N // 2 + pad < OP)[:, None] & mask[None, :]
            zero = tl.zeros((128, ROWS), tl.uint8).to(tl.float8e4nv, bitcast=True)
            for level in tl.static_range(LEVELS):
                tl.store(p_ptrs + level * OP, zero, mask=p_mask)


@triton.jit
def _down_kernel(
    x, x_scale, weight, weight_scale, bias, out, tiles,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    LEVELS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PROMOTE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """w2 @ x + bias of sorted rows: [P, N] in out's dtype; x_scale None is the static 1/8."""
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    # routing was complete before the kernel ahead of this one let it start
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    begin = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    expert = expert.to(tl.int64)
    group = tl.minimum(unit * GROUPS, N // 64 - GROUPS)
    weight += expert * (N * (K // 2)) + group * (64 * (K // 2))
    weight_scale += (expert * (N // 64) + group) * (64 * ((K + 127) // 128))
    if PREFETCH:
        piece = tl.arange(0, 4 * GROUPS)
        prefetch_bytes(weight + piece * (8 * K), tl.full((4 * GROUPS,), 8 * K, tl.int32))
    start_next()
    wait_for_inputs()
    position = begin + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < count
    acc = _products(
        x, weight, weight_scale, position, mask, K, KP, ROWS, LEVELS, GROUPS, SPLIT, PROMOTE, STAGES
    )
    row = group_row(tl.arange(0, 64 * GROUPS))
    s_ptrs = weight_scale + row // 64 * (64 * ((K + 127) // 128)) + row % 64
    acc *= row_scale(tl.load(s_ptrs))[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + position, mask=mask, other=0.0)[None, :]
    else:
        acc *= 0.125
    column = group * 64 + row
    if bias is not None:
        acc += tl.load(bias + expert * N + column).to(tl.float32)[:, None]
    o_ptrs = out + position.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(o_ptrs, round_to(acc, out.dtype.element_ty), mask=mask[None, :])
