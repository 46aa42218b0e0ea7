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

from oss_fused.kernels.launch import start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.moe.tile import (
    activation_position,
    dot_unpacked,
    group_row,
    row_scale,
    unpack_weights,
)
from oss_fused.kernels.numerics import from_fp8, round_to, to_fp8


@triton.jit
def _weight_pointers(weight, weight_scale, K: tl.constexpr, GROUPS: tl.constexpr,
                     DEPTH: tl.constexpr, width,
                     WARPGROUPS: tl.constexpr):  # fmt: skip
    """Pointers of a tile's packed bytes (``width`` a row) and scale words, as unpack_weights
    wants them."""
    q = tl.arange(0, 64 * GROUPS * DEPTH)
    row = q // (32 * GROUPS * DEPTH) * 32 + q % 32
    turn = q // (32 * WARPGROUPS * DEPTH) % (GROUPS // WARPGROUPS)
    group = turn * WARPGROUPS + q // 32 % WARPGROUPS
    chunk = q // (32 * WARPGROUPS) % DEPTH
    base = weight + group.to(tl.int64) * (64 * (K // 2)) + chunk * 4096 + row * width
    words = weight_scale + group * (64 * ((K + 127) // 128)) + chunk * 64 + row
    return base[:, None] + tl.arange(0, 64)[None, :], words


@triton.jit
def _token_rows(x, rows, mask, KP: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Pointers and mask of a tile's columns: column 2r + l is level l of token r."""
    column = tl.arange(0, ROWS * LEVELS)
    rows = rows[:, None].broadcast_to(ROWS, LEVELS).reshape(ROWS * LEVELS)
    mask = mask[:, None].broadcast_to(ROWS, LEVELS).reshape(ROWS * LEVELS)
    return x + (rows.to(tl.int64) * LEVELS + column % LEVELS) * KP, mask


@triton.jit
def _add_levels(acc, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Products [M, ROWS * LEVELS] with the levels' columns -> [M, ROWS]."""
    if LEVELS == 2:
        first, second = acc.reshape(acc.shape[0], ROWS, 2).split()
        acc = first + second * 0.0625
    return acc


@triton.jit
def _load_step(
    weight, weight_scale, begin, K: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    DEPTH: tl.constexpr, WARPGROUPS: tl.constexpr,
):  # fmt: skip
    """Weights and scale words of a step that may reach beyond K: what is not there is zero."""
    CHUNKS: tl.constexpr = (K + 127) // 128
    LAST: tl.constexpr = (K - (CHUNKS - 1) * 128) // 2
    q = tl.arange(0, 64 * GROUPS * DEPTH)
    chunk = begin + q // (32 * WARPGROUPS) % DEPTH
    width = tl.where(chunk < CHUNKS - 1, 64, tl.where(chunk == CHUNKS - 1, LAST, 0))
    w_ptrs, s_ptrs = _weight_pointers(weight, weight_scale, K, GROUPS, DEPTH, width, WARPGROUPS)
    mask = tl.arange(0, 64)[None, :] < width[:, None]
    # few tokens: no other program reads these weights
    policy: tl.constexpr = "evict_first" if ROWS <= 32 else ""
    w = tl.load(w_ptrs + begin * 4096, mask=mask, other=0, eviction_policy=policy)
    s = tl.load(s_ptrs + begin * 64, mask=chunk < CHUNKS, other=0)
    return w, s


@triton.jit
def _add_step(
    acc, w, s, x_base, x_mask, begin, KP: tl.constexpr, GROUPS: tl.constexpr,
    DEPTH: tl.constexpr, PROMOTE: tl.constexpr, WARPGROUPS: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the product of what _load_step loaded."""
    k = begin * 128 + tl.arange(0, 128 * DEPTH)
    tokens = tl.load(
        x_base[:, None] + k[None, :], mask=x_mask[:, None] & (k < KP)[None, :], other=0.0
    )
    return dot_unpacked(unpack_weights(w, s, GROUPS, DEPTH, WARPGROUPS), tokens.T, acc, PROMOTE)


@triton.jit
def _only_step(
    x, weight, weight_scale, x_rows, x_mask, share,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, PROMOTE: tl.constexpr, WARPGROUPS: tl.constexpr,
):  # fmt: skip
    """``_products`` of a share that is one step: its weights may come before the wait."""
    begin = share * DEPTH
    w, s = _load_step(weight, weight_scale, begin, K, ROWS, GROUPS, DEPTH, WARPGROUPS)
    wait_for_inputs()
    start_next()
    x_base, x_mask = _token_rows(x, x_rows, x_mask, KP, ROWS, LEVELS)
    acc = tl.zeros((64 * GROUPS, ROWS * LEVELS), tl.float32)
    acc = _add_step(acc, w, s, x_base, x_mask, begin, KP, GROUPS, DEPTH, PROMOTE, WARPGROUPS)
    return _add_levels(acc, ROWS, LEVELS)


@triton.jit
def _products(
    x, weight, weight_scale, x_rows, x_mask, share,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, SHARES: tl.constexpr, PROMOTE: tl.constexpr,
    STAGES: tl.constexpr, WARPGROUPS: tl.constexpr,
):  # fmt: skip
    """Weight rows x tokens [64 * GROUPS, ROWS] over one share of K; no scales applied yet."""
    WHOLE: tl.constexpr = K // 128
    CHUNKS: tl.constexpr = (K + 127) // 128
    # chunks of a share, a multiple of DEPTH: what does not divide is left to the last share
    STEP: tl.constexpr = (CHUNKS + SHARES * DEPTH - 1) // (SHARES * DEPTH) * DEPTH
    TAIL: tl.constexpr = WHOLE // DEPTH * DEPTH
    begin = share * STEP
    steps = WHOLE // DEPTH if SHARES == 1 else tl.minimum(STEP, WHOLE - begin) // DEPTH
    if TAIL < CHUNKS:
        # on their way while the others are multiplied: loads behind the loop would wait for memory
        last = tl.where(share == SHARES - 1, TAIL, CHUNKS)
        tail_w, tail_s = _load_step(weight, weight_scale, last, K, ROWS, GROUPS, DEPTH, WARPGROUPS)
    w_ptrs, s_ptrs = _weight_pointers(weight, weight_scale, K, GROUPS, DEPTH, 64, WARPGROUPS)
    w_ptrs += begin * 4096
    s_ptrs += begin * 64
    x_base, x_mask = _token_rows(x, x_rows, x_mask, KP, ROWS, LEVELS)
    x_ptrs = x_base[:, None] + begin * 128 + tl.arange(0, 128 * DEPTH)[None, :]
    acc = tl.zeros((64 * GROUPS, ROWS * LEVELS), tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(w_ptrs, eviction_policy="evict_first" if ROWS <= 32 else "")
        s = tl.load(s_ptrs)
        tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
        acc = dot_unpacked(unpack_weights(w, s, GROUPS, DEPTH, WARPGROUPS), tokens.T, acc, PROMOTE)
        w_ptrs += 4096 * DEPTH
        s_ptrs += 64 * DEPTH
        x_ptrs += 128 * DEPTH
    # the outer branch is decided when the kernel is compiled
    if TAIL < CHUNKS:  # noqa: SIM102
        if share == SHARES - 1:
            acc = _add_step(
                acc, tail_w, tail_s, x_base, x_mask, TAIL, KP, GROUPS, DEPTH, PROMOTE, WARPGROUPS
            )
    return _add_levels(acc, ROWS, LEVELS)


@triton.jit
def _gate_up_kernel(
    x, x_scale, weight, weight_scale, bias, out, order, tiles,
    top_k: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, OP: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr,
    SILU: tl.constexpr, STAGES: tl.constexpr, PROMOTE: tl.constexpr, DTYPE: tl.constexpr,
    WARPGROUPS: tl.constexpr,
):  # fmt: skip
    """act(w13 @ x + bias) of sorted rows: e4m3 codes [P, LEVELS, OP], or DTYPE [P, N/2] (SILU)."""
    SPAN: tl.constexpr = 32 * GROUPS
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs()
    # not before: the kernel that follows reads the tiles ahead of its own wait
    start_next()
    expert = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    if (expert < 0) | (count <= 0) | (begin < 0):
        return
    expert = expert.to(tl.int64)
    # the last program of an odd number of groups repeats one: same inputs, same values
    group = tl.minimum(unit * GROUPS, N // 64 - GROUPS)
    weight += expert * (N * (K // 2)) + group * (64 * (K // 2))
    weight_scale += (expert * (N // 64) + group) * (64 * ((K + 127) // 128))
    position = begin + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < count
    token = tl.load(order + position, mask=mask, other=0) // top_k
    # what the sums will be multiplied with and moved by comes along with the first weights
    row = tl.arange(0, SPAN)
    column = group * 32 + row
    words = weight_scale + row // 32 * (64 * ((K + 127) // 128)) + row % 32
    gate_words, up_words = tl.load(words), tl.load(words + 32)
    if bias is not None:
        gate_shift = tl.load(bias + expert * N + 2 * column).to(tl.float32)
        up_shift = tl.load(bias + expert * N + 2 * column + 1).to(tl.float32)
    acc = _products(
        x, weight, weight_scale, token, mask, 0, K, KP, ROWS, LEVELS, GROUPS,
        DEPTH, 1, PROMOTE, STAGES, WARPGROUPS,
    )  # fmt: skip
    # tile rows (w, pair, r): pair 0 are gates, pair 1 the ups of the same intermediate columns
    pairs = acc.reshape(GROUPS, 4, 2, 8, ROWS).permute(0, 1, 3, 4, 2).reshape(SPAN, ROWS, 2)
    gate, up = pairs.split()
    scale = tl.load(x_scale + token, mask=mask, other=0.0)[None, :]
    gate = gate * row_scale(gate_words)[:, None] * scale
    up = up * row_scale(up_words)[:, None] * scale
    if bias is not None:
        gate += gate_shift[:, None]
        up += up_shift[:, None]
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


@triton.jit(do_not_specialize=["n_pairs"])
def _down_kernel(
    x, x_scale, weight, weight_scale, bias, out, tiles, n_pairs,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    LEVELS: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr, SHARES: tl.constexpr,
    STAGES: tl.constexpr, PROMOTE: tl.constexpr, WARPGROUPS: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """w2 @ x + bias of sorted rows, by shares of K: [SHARES, P, N] in out's dtype.

    x_scale None is the static 1/8; the bias goes with the first share.
    """
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    share = 0 if SHARES == 1 else tl.program_id(2)
    wait_unless(PREFETCH)
    # the routing kernels have finished: gate_up waited for them before it let others start
    expert = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    if (expert < 0) | (count <= 0) | (begin < 0):
        # the end of this grid must say that gate_up has ended, even where no expert is here
        wait_for_inputs()
        return
    expert = expert.to(tl.int64)
    group = tl.minimum(unit * GROUPS, N // 64 - GROUPS)
    weight += expert * (N * (K // 2)) + group * (64 * (K // 2))
    weight_scale += (expert * (N // 64) + group) * (64 * ((K + 127) // 128))
    # what the sums will be multiplied with and moved by comes with the weights
    row = group_row(tl.arange(0, 64 * GROUPS))
    words = tl.load(weight_scale + row // 64 * (64 * ((K + 127) // 128)) + row % 64)
    column = group * 64 + row
    if bias is not None:
        shift = tl.load(bias + expert * N + column).to(tl.float32)
        if SHARES > 1:
            shift = tl.where(share == 0, shift, 0.0)
    position = begin + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < count
    if SHARES * DEPTH >= (K + 127) // 128:
        acc = _only_step(
            x, weight, weight_scale, position, mask, share, K, KP, ROWS, LEVELS, GROUPS, DEPTH,
            PROMOTE, WARPGROUPS,
        )  # fmt: skip
    else:
        wait_for_inputs()
        start_next()
        acc = _products(
            x, weight, weight_scale, position, mask, share, K, KP, ROWS, LEVELS, GROUPS, DEPTH,
            SHARES, PROMOTE, STAGES, WARPGROUPS,
        )  # fmt: skip
    acc *= row_scale(words)[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + position, mask=mask, other=0.0)[None, :]
    else:
        acc *= 0.125
    if bias is not None:
        acc += shift[:, None]
    o_ptrs = out + (share * n_pairs + position).to(tl.int64)[None, :] * N + column[:, None]
    tl.store(o_ptrs, round_to(acc, out.dtype.element_ty), mask=mask[None, :])
