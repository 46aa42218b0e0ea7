# SPDX-License-Identifier: MIT
"""Online softmax over the tiles of one program: weights of positions, sums of weighted values."""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.attention.pages import (
    find_rows,
    load_as,
    load_pages,
    tile_positions,
    unpack_pairs,
)
from oss_fused.kernels.launch import prefetch_line, start_next
from oss_fused.kernels.numerics import round_to, used_from_here

# below every logit; finite, because a warp may see no position: -inf less itself would be NaN
LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _seen(begin, end, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Which positions from ``begin`` on each row sees; ``last`` [rows, 1], None for all to end."""
    positions = tl.expand_dims(tile_positions(begin, BLOCK_N, WARPS, 1), -2)
    seen = positions < end
    if last is not None:
        seen &= positions <= last
        if WINDOW > 0:
            seen &= positions > last - WINDOW
    return seen


@triton.jit
def _nothing(BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """Maximum, weight and weighted sum of no position; of each warp, where there are WARPS."""
    if WARPS > 1:
        best = tl.full([WARPS, BLOCK_G], LEAST, tl.float32)
        acc = tl.zeros([WARPS, BLOCK_G, BLOCK_D], tl.float32)
    else:
        best = tl.full([BLOCK_G], LEAST, tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    return best, best * 0.0, acc


@triton.jit
def _weigh(q, k, seen, scale, best, total, DTYPE: tl.constexpr):
    """Weights of a tile's positions, what earlier ones shrink by, and the new ``best, total``."""
    LAST: tl.constexpr = len(q.shape) - 1
    logits = tl.dot(q, tl.permute(k, (0, 2, 1)) if LAST == 2 else tl.trans(k)) * scale
    logits = tl.where(seen, logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, LAST))
    weights = tl.exp2(logits - tl.expand_dims(new_best, LAST))
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, LAST)
    return round_to(weights, DTYPE), tl.expand_dims(shrink, LAST), new_best, total


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def _halves(x):
    """Pairs of the last dimension, a power of two, as two blocks."""
    WARPS: tl.constexpr = x.shape[-1]
    if len(x.shape) == 3:
        first, second = tl.split(tl.reshape(x, x.shape[0], x.shape[1], WARPS // 2, 2))
    else:
        first, second = tl.split(tl.reshape(x, x.shape[0], WARPS // 2, 2))
    return first, second


@triton.jit
def _sum_warps(best, total, acc):
    """Maximum, weight and weighted sum of all warps.

    By halves, which whole vectors of registers are exchanged for: a reduction over a dimension of
    warps takes an access to shared memory and shuffles per number.
    """
    STEPS: tl.constexpr = _log2(best.shape[0])
    most = tl.permute(best, (1, 0))
    for _ in tl.static_range(STEPS):
        first, second = _halves(most)
        most = tl.maximum(first, second)
    most = tl.reshape(most, best.shape[1])
    grow = tl.exp2(best - most[None])
    total, acc = tl.permute(total * grow, (1, 0)), tl.permute(acc * grow[:, :, None], (1, 2, 0))
    for _ in tl.static_range(STEPS):
        first, second = _halves(total)
        total = first + second
        first, second = _halves(acc)
        acc = first + second
    return most, tl.reshape(total, best.shape[1]), tl.reshape(acc, best.shape[1], acc.shape[1])


@triton.jit
def _load_tile(
    keys,
    values,
    head,
    pages,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys and values of a tile, values as even and odd columns with PAIRS; zeros from ``end``."""
    WORDS: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    columns, words = tl.arange(0, BLOCK_D), tl.arange(0, WORDS)
    k_head = keys.data + head.to(tl.int64) * keys.head_stride + columns
    v_head = values.data + head.to(tl.int64) * values.head_stride
    v_head = (v_head.to(tl.pointer_type(tl.int16)) if PAIRS else v_head) + words
    in_k, in_v = columns < HEAD_DIM, words < (HEAD_DIM // 2 if PAIRS else HEAD_DIM)
    k_rows, v_rows, valid = find_rows(keys, values, pages, start, end, BLOCK_N, WARPS, RUN)
    k = load_as(k_head + k_rows, valid & in_k, DTYPE)
    if PAIRS:
        codes = tl.load(v_head + v_rows // 2, mask=valid & in_v, other=0)
        v, odd = unpack_pairs(codes, DTYPE)
    else:
        v = load_as(v_head + v_rows, valid & in_v, DTYPE)
        odd = v
    return k, v, odd


@triton.jit
def prefetch_tile(
    keys,
    values,
    head,
    pages,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Ask for a tile: it comes into L2 while queries are on their way."""
    k_rows, v_rows, _ = find_rows(keys, values, pages, start, end, BLOCK_N, WARPS, RUN)
    # a line has 128 bytes; rows behind the last one that counts are of the same page or of page 0
    LINE: tl.constexpr = 1024 // keys.data.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE)
    lines = tl.arange(0, LINES) * LINE
    head = head.to(tl.int64)
    prefetch_line(keys.data + head * keys.head_stride + k_rows + lines)
    prefetch_line(values.data + head * values.head_stride + v_rows + lines)


@triton.jit
def _load_queries(query, mask, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Queries; lets the next kernel start."""
    q = load_as(query, mask, DTYPE)
    if HEAD_DIM > 64:
        # behind the request for the first tile: the next kernels' weights would come before it
        start_next()
    return q


@triton.jit
def _of_warps(q, WARPS: tl.constexpr, FROM_HERE: tl.constexpr):
    """Queries as an operand, of each warp where there are WARPS; exchanged here if FROM_HERE."""
    if FROM_HERE:
        q = used_from_here(q)
    if WARPS > 1:
        q = tl.broadcast_to(q[None], WARPS, q.shape[0], q.shape[1])
    return q


@triton.jit
def attend(
    query,
    mask_q,
    keys,
    values,
    head,
    table,
    pages,
    begin,
    end,
    last,
    scale,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
    SINGLE: tl.constexpr,
    TILES_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Maximum, weight and weighted sum of the positions up to ``end``; ``pages`` of the first tile.

    SINGLE: there is one tile at most. It is then asked for before the queries.
    TILES_FIRST: nothing is used before a tile has been asked for. That takes registers: queries are
    exchanged in the loop over tiles, or keys and values are all there at once.
    PAIRS: two columns of e4m3 values are read as one word; their sums are apart until the end.
    """
    BLOCK_G: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    best, total, acc = _nothing(BLOCK_G, BLOCK_D // 2 if PAIRS else BLOCK_D, WARPS)
    odd = acc
    if SINGLE:
        k, v, v_odd = _load_tile(
            keys,
            values,
            head,
            pages,
            begin,
            end,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            WARPS,
            RUN,
            PAIRS,
            DTYPE,
        )
        q = _load_queries(query, mask_q, HEAD_DIM, DTYPE)
        if TILES_FIRST:
            # all are on their way before one is waited for
            k, v, v_odd = used_from_here(k), used_from_here(v), used_from_here(v_odd)
            q = used_from_here(q)
        seen = _seen(begin, end, last, WINDOW, BLOCK_N, WARPS)
        weights, _, best, total = _weigh(q, k, seen, scale, best, total, DTYPE)
        acc = tl.dot(weights, v)
        if PAIRS:
            odd = tl.dot(weights, v_odd)
    else:
        q = _load_queries(query, mask_q, HEAD_DIM, DTYPE)
        # else Triton exchanges queries above the loop, where the first tile waits for them
        IN_LOOP: tl.constexpr = TILES_FIRST and WARPS > 1
        for start in range(begin, end, BLOCK_N):
            k, v, v_odd = _load_tile(
                keys,
                values,
                head,
                pages,
                start,
                end,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
                WARPS,
                RUN,
                PAIRS,
                DTYPE,
            )
            pages = load_pages(table, start + BLOCK_N, end, keys.page_size, BLOCK_N, WARPS, RUN)
            seen = _seen(start, end, last, WINDOW, BLOCK_N, WARPS)
            of_warps = _of_warps(q, WARPS, IN_LOOP)
            weights, shrink, best, total = _weigh(of_warps, k, seen, scale, best, total, DTYPE)
            acc = tl.dot(weights, v, acc * shrink)
            if PAIRS:
                odd = tl.dot(weights, v_odd, odd * shrink)
    if PAIRS:
        acc = tl.join(acc, odd)
        if WARPS > 1:
            acc = tl.reshape(acc, WARPS, BLOCK_G, BLOCK_D)
        else:
            acc = tl.reshape(acc, BLOCK_G, BLOCK_D)
    if WARPS > 1:
        best, total, acc = _sum_warps(best, total, acc)
    return best, total, acc
