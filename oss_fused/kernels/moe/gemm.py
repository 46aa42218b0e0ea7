# SPDX-License-Identifier: MIT
"""Grouped products of the experts: tokens sorted by expert times MXFP4 or FP8 weights.

One program computes ``64 * groups`` weight rows for up to ``rows`` tokens of one expert.
Activations are e4m3 codes [rows, levels, KP], KP being K rounded up to 128. With two levels a value
is ``(first + second / 16) * scale``, which is exact for bfloat16 (8 significant bits) over 14
octaves below the row's largest value, so the FP8 tensor cores give bfloat16 x MXFP4 products; with
one level it is FP8.

MXFP4 weights are packed as moe/mxfp4.py says, and the codes lie in the order of moe/tile.py. FP8
weights [E, N, K] have a scale for each row; weights and codes lie in the order of their columns.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from oss_fused.kernels.launch import start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.moe.choice import load_tile
from oss_fused.kernels.moe.group import (
    first_group,
    group_of_next_wave,
    of_group,
    prefetch_first,
    prefetch_group,
)
from oss_fused.kernels.moe.tile import (
    activation_position,
    dot_tile,
    dot_unpacked,
    group_row,
    row_scale,
    unpack_weights,
)
from oss_fused.kernels.numerics import from_fp8, round_to, to_fp8


class Product(NamedTuple):
    """What a product's kernel is compiled for.

    Rows N and columns K of an expert's weight; tokens of a tile; levels of a code; 64-row groups
    of a program; 128-column chunks of a step; shares of K; steps on their way; warpgroups of the
    groups; whether a step's sum is promoted; the weight's format; eviction policy of the result.
    """

    n: int
    k: int
    rows: int
    levels: int = 1
    groups: int = 1
    depth: int = 1
    shares: int = 1
    stages: int = 4
    warpgroups: int = 1
    promote: bool = False
    mxfp4: bool = False
    policy: str = ""


@triton.jit
def _weight_pointers(weight, weight_scale, width, P: tl.constexpr):
    """Pointers of a tile's packed bytes (``width`` a row) and scale words, as unpack_weights
    wants them."""
    q = tl.arange(0, 64 * P.groups * P.depth)
    row = q // (32 * P.groups * P.depth) * 32 + q % 32
    turn = q // (32 * P.warpgroups * P.depth) % (P.groups // P.warpgroups)
    group = turn * P.warpgroups + q // 32 % P.warpgroups
    chunk = q // (32 * P.warpgroups) % P.depth
    base = weight + group.to(tl.int64) * (64 * (P.k // 2)) + chunk * 4096 + row * width
    words = weight_scale + group * (64 * ((P.k + 127) // 128)) + chunk * 64 + row
    return base[:, None] + tl.arange(0, 64)[None, :], words


@triton.jit
def _token_rows(x, rows, mask, P: tl.constexpr):
    """Pointers and mask of a tile's columns: column 2r + l is level l of token r."""
    KP: tl.constexpr = (P.k + 127) // 128 * 128
    column = tl.arange(0, P.rows * P.levels)
    rows = rows[:, None].broadcast_to(P.rows, P.levels).reshape(P.rows * P.levels)
    mask = mask[:, None].broadcast_to(P.rows, P.levels).reshape(P.rows * P.levels)
    return x + (rows.to(tl.int64) * P.levels + column % P.levels) * KP, mask


@triton.jit
def _add_levels(acc, P: tl.constexpr):
    """Products [M, rows * levels] with the levels' columns -> [M, rows]."""
    if P.levels == 2:
        first, second = acc.reshape(acc.shape[0], P.rows, 2).split()
        acc = first + second * 0.0625
    return acc


@triton.jit
def _load_step(weight, weight_scale, begin, P: tl.constexpr):
    """Weights and scale words of a step that may reach beyond K: what is not there is zero."""
    CHUNKS: tl.constexpr = (P.k + 127) // 128
    LAST: tl.constexpr = (P.k - (CHUNKS - 1) * 128) // 2
    q = tl.arange(0, 64 * P.groups * P.depth)
    chunk = begin + q // (32 * P.warpgroups) % P.depth
    width = tl.where(chunk < CHUNKS - 1, 64, tl.where(chunk == CHUNKS - 1, LAST, 0))
    w_ptrs, s_ptrs = _weight_pointers(weight, weight_scale, width, P)
    mask = tl.arange(0, 64)[None, :] < width[:, None]
    # few tokens: no other program reads these weights
    policy: tl.constexpr = "evict_first" if P.rows <= 32 else ""
    w = tl.load(w_ptrs + begin * 4096, mask=mask, other=0, eviction_policy=policy)
    s = tl.load(s_ptrs + begin * 64, mask=chunk < CHUNKS, other=0)
    return w, s


@triton.jit
def _dot(w, s, tokens, acc, P: tl.constexpr):
    unpacked = unpack_weights(w, s, P.groups, P.depth, P.warpgroups)
    return dot_unpacked(unpacked, tokens.T, acc, P.promote)


@triton.jit
def _add_step(acc, w, s, x_base, x_mask, begin, P: tl.constexpr):
    """``acc`` plus the product of what _load_step loaded."""
    k = begin * 128 + tl.arange(0, 128 * P.depth)
    in_k = (k < (P.k + 127) // 128 * 128)[None, :]
    tokens = tl.load(x_base[:, None] + k[None, :], mask=x_mask[:, None] & in_k, other=0.0)
    return _dot(w, s, tokens, acc, P)


@triton.jit
def _only_step(x, weight, weight_scale, x_rows, x_mask, share, P: tl.constexpr):
    """``_products`` of a share that is one step: its weights may come before the wait."""
    begin = share * P.depth
    w, s = _load_step(weight, weight_scale, begin, P)
    wait_for_inputs()
    # not before: combine reads the routing ahead of its own wait
    start_next()
    x_base, x_mask = _token_rows(x, x_rows, x_mask, P)
    acc = tl.zeros((64 * P.groups, P.rows * P.levels), tl.float32)
    return _add_levels(_add_step(acc, w, s, x_base, x_mask, begin, P), P)


@triton.jit
def _packed_products(x, weight, weight_scale, x_rows, x_mask, share, P: tl.constexpr):
    """Weight rows x tokens [64 * groups, rows] over one share of K; no scales applied yet."""
    WHOLE: tl.constexpr = P.k // 128
    CHUNKS: tl.constexpr = (P.k + 127) // 128
    # chunks of a share, a multiple of a step: what does not divide is left to the last share
    STEP: tl.constexpr = (CHUNKS + P.shares * P.depth - 1) // (P.shares * P.depth) * P.depth
    TAIL: tl.constexpr = WHOLE // P.depth * P.depth
    begin = share * STEP
    steps = WHOLE // P.depth if P.shares == 1 else tl.minimum(STEP, WHOLE - begin) // P.depth
    if TAIL < CHUNKS:
        # on their way while the others are multiplied: loads behind the loop would wait for memory
        last = tl.where(share == P.shares - 1, TAIL, CHUNKS)
        tail_w, tail_s = _load_step(weight, weight_scale, last, P)
    w_ptrs, s_ptrs = _weight_pointers(weight, weight_scale, 64, P)
    w_ptrs += begin * 4096
    s_ptrs += begin * 64
    x_base, x_mask = _token_rows(x, x_rows, x_mask, P)
    x_ptrs = x_base[:, None] + begin * 128 + tl.arange(0, 128 * P.depth)[None, :]
    acc = tl.zeros((64 * P.groups, P.rows * P.levels), tl.float32)
    for _ in tl.range(0, steps, num_stages=P.stages):
        w = tl.load(w_ptrs, eviction_policy="evict_first" if P.rows <= 32 else "")
        s = tl.load(s_ptrs)
        tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
        acc = _dot(w, s, tokens, acc, P)
        w_ptrs += 4096 * P.depth
        s_ptrs += 64 * P.depth
        x_ptrs += 128 * P.depth
    # the outer branch is decided when the kernel is compiled
    if TAIL < CHUNKS:  # noqa: SIM102
        if share == P.shares - 1:
            acc = _add_step(acc, tail_w, tail_s, x_base, x_mask, TAIL, P)
    return _add_levels(acc, P)


@triton.jit
def _fp8_products(x, weight, row, x_rows, x_mask, P: tl.constexpr):
    """Rows ``row`` [64] of ``weight`` [N, K] times tokens [rows], no scales applied yet."""
    KP: tl.constexpr = (P.k + 127) // 128 * 128
    k = tl.arange(0, 128)
    w_ptrs = weight + row.to(tl.int64)[:, None] * P.k + k[None, :]
    x_ptrs = x + x_rows.to(tl.int64)[:, None] * KP + k[None, :]
    ROWS: tl.constexpr = P.rows
    acc = tl.zeros((64, ROWS), tl.float32)
    for step in tl.range(0, (P.k + 127) // 128, num_stages=P.stages):
        # the columns that a row lacks are zeros, on both sides
        mask = (row < P.n)[:, None] & (k < P.k - step * 128)[None, :]
        policy: tl.constexpr = "evict_first" if P.rows <= 32 else ""
        w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy=policy)
        tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
        acc = dot_tile(w, tokens.T, acc, P.promote)
        w_ptrs += 128
        x_ptrs += 128
    return acc


@triton.jit
def _load_rows(pointer, row, P: tl.constexpr):
    """What belongs to some of the N rows; the last group of an FP8 weight may lack rows."""
    if P.n % 64 == 0:
        return tl.load(pointer + row)
    else:
        return tl.load(pointer + row, mask=row < P.n, other=0.0)


@triton.jit
def _load_scales(weight_scale, group, row, P: tl.constexpr):
    """Scale words of rows ``row`` of the program in the order of memory, or scales in FP8."""
    if P.mxfp4:
        return tl.load(weight_scale + row // 64 * (64 * ((P.k + 127) // 128)) + row % 64)
    else:
        return _load_rows(weight_scale, group * 64 + row, P)


@triton.jit
def _as_scale(loaded, P: tl.constexpr):
    return row_scale(loaded) if P.mxfp4 else loaded


@triton.jit
def _store(out, values, position, column, mask, WIDTH: tl.constexpr, P: tl.constexpr):
    """Round ``values`` [columns, tokens] to out's dtype and write them to its rows [P, WIDTH]."""
    target = out + position.to(tl.int64)[None, :] * WIDTH + column[:, None]
    mask = mask[None, :]
    if P.n % 64 != 0:
        mask &= (column < WIDTH)[:, None]
    rounded = round_to(values, out.dtype.element_ty)
    tl.store(target, rounded, mask=mask, eviction_policy=P.policy)


@triton.jit
def _store_codes(out, act, position, column, mask, last, DTYPE: tl.constexpr, P: tl.constexpr):
    """Codes of ``act`` [columns, tokens] for the static scale 1/8: out [P, levels, OP]."""
    WIDTH: tl.constexpr = P.n // 2
    OP: tl.constexpr = (WIDTH + 127) // 128 * 128
    ROWS: tl.constexpr = P.rows
    LEVELS: tl.constexpr = P.levels
    if LEVELS == 2:
        act = round_to(act, DTYPE).to(tl.float32)
    act *= 8.0
    rows = out + position.to(tl.int64) * (LEVELS * OP)
    target = rows[None, :] + activation_position(column)[:, None]
    first = to_fp8(act)
    tl.store(target, first, mask=mask[None, :], eviction_policy=P.policy)
    if LEVELS == 2:
        second = to_fp8((act - from_fp8(first)) * 16.0)
        tl.store(target + OP, second, mask=mask[None, :], eviction_policy=P.policy)
    # the last program fills the chunk: what is not written could hold NaN codes
    if (OP != WIDTH) & last:
        pad = tl.arange(0, 128)
        beyond = rows[None, :] + activation_position(WIDTH + pad)[:, None]
        p_mask = (WIDTH + pad < OP)[:, None] & mask[None, :]
        zero = tl.zeros((128, ROWS), tl.uint8).to(tl.float8e4nv, bitcast=True)
        for level in tl.static_range(LEVELS):
            tl.store(beyond + level * OP, zero, mask=p_mask)


@triton.jit
def _activate(gate, up, SILU: tl.constexpr):
    if SILU:
        return gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def _gate_up_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    order,
    tiles,
    TOP_K: tl.constexpr,
    SILU: tl.constexpr,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    EXPERTS: tl.constexpr = 0,
    PREFETCHED: tl.constexpr = 0,
    WAVE: tl.constexpr = 0,
):
    """act(w13 @ x + bias) of sorted rows: e4m3 codes [P, levels, OP], or DTYPE [P, N/2]."""
    SPAN: tl.constexpr = 32 * P.groups
    if PREFETCHED > 0:
        prefetch_group(weight, weight_scale, PREFETCHED, P)
    wait_for_inputs()
    # not before: the kernel that follows reads the tiles ahead of its own wait
    start_next()
    expert, begin, count = load_tile(tiles, EXPERTS)
    if (expert < 0) | (count <= 0) | (begin < 0):
        return
    expert = expert.to(tl.int64)
    group = first_group(P)
    if WAVE > 0:
        ahead, runs = group_of_next_wave(weight, tiles, WAVE, P)
    weight, weight_scale = of_group(weight, weight_scale, expert, group, P)
    position = begin + tl.arange(0, P.rows)
    mask = tl.arange(0, P.rows) < count
    token = position * 0
    if order is not None:
        token = tl.load(order + position, mask=mask, other=0) // TOP_K
    # what the sums will be multiplied with and moved by comes along with the first weights
    row = tl.arange(0, SPAN)
    gate_row = row // 32 * 64 + row % 32 if P.mxfp4 else 2 * row
    gate_scale = _load_scales(weight_scale, group, gate_row, P)
    up_scale = _load_scales(weight_scale, group, gate_row + (32 if P.mxfp4 else 1), P)
    column = group * 32 + row
    if bias is not None:
        gate_shift = _load_rows(bias + expert * P.n, 2 * column, P).to(tl.float32)
        up_shift = _load_rows(bias + expert * P.n, 2 * column + 1, P).to(tl.float32)
    scale = tl.load(x_scale + token, mask=mask, other=0.0)[None, :]
    if P.mxfp4:
        acc = _packed_products(x, weight, weight_scale, token, mask, 0, P)
    else:
        q = tl.arange(0, 64)
        rows = group * 64 + 2 * (q // 16 * 8 + q % 8) + q // 8 % 2
        acc = _fp8_products(x, weight, rows, token, mask, P)
    # behind the products: earlier, these bytes keep this program's own waiting
    if WAVE > 0:  # noqa: SIM102
        if runs:
            prefetch_first(ahead, P)
    # tile rows (w, pair, r): pair 0 are gates, pair 1 the ups of the same intermediate columns
    pairs = acc.reshape(P.groups, 4, 2, 8, P.rows).permute(0, 1, 3, 4, 2).reshape(SPAN, P.rows, 2)
    gate, up = pairs.split()
    gate = gate * _as_scale(gate_scale, P)[:, None] * scale
    up = up * _as_scale(up_scale, P)[:, None] * scale
    if bias is not None:
        gate += gate_shift[:, None]
        up += up_shift[:, None]
    act = _activate(gate, up, SILU)
    if out.dtype.element_ty == tl.float8e4nv:
        last = group == P.n // 64 - P.groups
        _store_codes(out, act, position, column, mask, last, DTYPE, P)
    else:
        _store(out, act, position, column, mask, P.n // 2, P)


@triton.jit(do_not_specialize=["n_pairs"])
def _down_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tiles,
    n_pairs,
    PREFETCH: tl.constexpr,
    P: tl.constexpr,
    EXPERTS: tl.constexpr = 0,
):
    """w2 @ x + bias of sorted rows, by shares of K: [SHARES, P, N] in out's dtype.

    x_scale None is the static 1/8; the bias goes with the first share.
    """
    share = 0 if P.shares == 1 else tl.program_id(2)
    wait_unless(PREFETCH)
    # the routing kernels have finished: gate_up waited for them before it let others start
    expert, begin, count = load_tile(tiles, EXPERTS)
    if (expert < 0) | (count <= 0) | (begin < 0):
        # the end of this grid must say that gate_up has ended, even where no expert is here
        wait_for_inputs()
        return
    expert = expert.to(tl.int64)
    group = first_group(P)
    weight, weight_scale = of_group(weight, weight_scale, expert, group, P)
    # what the sums will be multiplied with and moved by comes with the weights
    row = tl.arange(0, 64 * P.groups)
    if P.mxfp4:
        row = group_row(row)
    scale = _load_scales(weight_scale, group, row, P)
    column = group * 64 + row
    if bias is not None:
        shift = _load_rows(bias + expert * P.n, column, P).to(tl.float32)
        if P.shares > 1:
            shift = tl.where(share == 0, shift, 0.0)
    position = begin + tl.arange(0, P.rows)
    mask = tl.arange(0, P.rows) < count
    if P.mxfp4 and P.shares * P.depth >= (P.k + 127) // 128:
        acc = _only_step(x, weight, weight_scale, position, mask, share, P)
    else:
        wait_for_inputs()
        # not before: combine reads the routing ahead of its own wait
        start_next()
        if P.mxfp4:
            acc = _packed_products(x, weight, weight_scale, position, mask, share, P)
        else:
            acc = _fp8_products(x, weight, column, position, mask, P)
    acc *= _as_scale(scale, P)[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + position, mask=mask, other=0.0)[None, :]
    else:
        acc *= 0.125
    if bias is not None:
        acc += shift[:, None]
    _store(out, acc, share * n_pairs + position, column, mask, P.n, P)
