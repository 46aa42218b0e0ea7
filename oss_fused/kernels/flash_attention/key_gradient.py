# SPDX-License-Identifier: MIT
"""dK = scale dS' Q and dV = P' dO: a CTA holds keys and values and walks over the queries that see
them, of every head that shares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.flash_attention.tile import (
    LOG2E,
    as_operand,
    bias_and_hide,
    kept_tile,
    load_tile,
    query_range,
    scores,
)
from oss_fused.kernels.numerics import round_to


@triton.jit
def _dkv_part(
    sums,
    held,
    strips,
    rows,
    hidden,
    begin,
    end,
    at,
    scaling,
    drop,
    EDGE: tl.constexpr,
    P,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Adds dS' Q and P' dO over queries [begin, end); tiles are transposed, [keys, queries].

    ``at``: the first key of the tile, the first column of k and v, the head's first row of q.
    """
    dk, dv = sums
    x, values = held
    q, k, v, grad = strips
    first, column, row0 = at
    log_sum, delta = rows
    scale, slope = scaling
    queries = q[1]
    sizes = (queries, k[1])
    n = first + tl.arange(0, P.block_n)[:, None]
    for start in tl.range(begin, end, P.block_m, num_stages=P.stages):
        m = start + tl.arange(0, P.block_m)[None, :]
        row = start + tl.arange(0, P.block_m)
        row_log = tl.load(log_sum + row, mask=row < queries, other=float("inf"))
        logits, q_tile = scores(
            x, k, first, q, start, P.dim, P.block_d, P.block_n, P.block_m, EDGE, DTYPE
        )
        logits = bias_and_hide(logits, m, n, sizes, slope, hidden, EDGE, P)
        weights = tl.exp2(logits * scale - row_log[None, :])
        d_weights, do_tile = scores(
            values, v, first, grad, start, P.dim_v, P.block_dv, P.block_n, P.block_m, EDGE, DTYPE
        )
        dropped = weights
        if P.dropout:
            keep = kept_tile(drop, row0 + m, n)
            dropped = tl.where(keep, weights * drop.factor, 0.0)
            d_weights = tl.where(keep, d_weights * drop.factor, 0.0)
        if P.dim_v > P.block_dv:
            do_tile = load_tile(grad, start, column, P.dim_v, P.block_m, P.block_dv, EDGE, DTYPE)
        dv = tl.dot(as_operand(dropped, ROUND, DTYPE), do_tile, dv, input_precision="ieee")
        row_delta = tl.load(delta + row, mask=row < queries, other=0.0)
        d_logits = as_operand(weights * (d_weights - row_delta[None, :]), ROUND, DTYPE)
        if P.dim > P.block_d:
            q_tile = load_tile(q, start, column, P.dim, P.block_m, P.block_d, EDGE, DTYPE)
        dk = tl.dot(d_logits, q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _dkv_of_head(
    sums,
    held,
    strips,
    rows,
    hidden,
    span,
    at,
    scaling,
    drop,
    P,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Adds what the queries of one head give; ``span`` is a ``query_range``."""
    begin, full_begin, full_end, end = span
    if P.causal or P.right:
        sums = _dkv_part(
            sums, held, strips, rows, hidden, begin, full_begin, at, scaling, drop, True,
            P, ROUND, DTYPE,
        )  # fmt: skip
    sums = _dkv_part(
        sums, held, strips, rows, hidden, full_begin, full_end, at, scaling, drop, False,
        P, ROUND, DTYPE,
    )  # fmt: skip
    if P.left or not P.even:
        sums = _dkv_part(
            sums, held, strips, rows, hidden, full_end, end, at, scaling, drop, True,
            P, ROUND, DTYPE,
        )  # fmt: skip
    return sums


@triton.jit
def _store(base, acc, head, first, keys, column, DIM: tl.constexpr):
    n = first + tl.arange(0, acc.shape[0])
    cols = column + tl.arange(0, acc.shape[1])
    inside = (n < keys)[:, None] & (cols < DIM)[None, :]
    at = (head.to(tl.int64) * keys + n)[:, None] * DIM + cols[None, :]
    tl.store(base + at, round_to(acc, base.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window", "drop"])
def dkv_kernel(
    q,
    k,
    v,
    grad,
    mask,
    slopes,
    rows,
    dk,
    dv,
    queries,
    keys,
    scale,
    window,
    drop,
    P,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``rows``: a RowTerms. Grid: batch times KV heads, blocks of keys, tiles of dK and of dV."""
    KV_HEADS: tl.constexpr = P.heads // P.group
    head = tl.program_id(0)
    first = tl.program_id(1) * P.block_n
    column = tl.program_id(2) * P.block_d
    b = (head // KV_HEADS).to(tl.int64)
    kv = (head % KV_HEADS).to(tl.int64)
    k = (k.data + b * k.batch + kv * k.head, keys, k.row)
    v = (v.data + b * v.batch + kv * v.head, keys, v.row)
    x = load_tile(k, first, 0, P.dim, P.block_n, P.block_d, True, DTYPE)
    values = load_tile(v, first, 0, P.dim_v, P.block_n, P.block_dv, True, DTYPE)
    held = (x, values)
    acc_k = tl.zeros([P.block_n, P.block_d], tl.float32)
    acc_v = tl.zeros([P.block_n, P.block_dv], tl.float32)
    sums = (acc_k, acc_v)
    span = query_range(first, (queries, keys), window, P)
    for member in range(0, P.group):
        h = kv * P.group + member
        row0 = (b * P.heads + h) * queries
        q_head = (q.data + b * q.batch + h * q.head, queries, q.row)
        strips = (q_head, k, v, (grad + row0 * P.dim_v, queries, P.dim_v))
        terms = (rows.log_sum + row0, rows.delta + row0)
        hidden = (mask, b * mask.batch + h * mask.head, window)
        at = (first, column, row0)
        slope = 0.0
        if P.alibi:
            slope = tl.load(slopes + h).to(tl.float32) / scale
        scaling = (scale * LOG2E, slope)
        sums = _dkv_of_head(
            sums, held, strips, terms, hidden, span, at, scaling, drop, P, ROUND, DTYPE
        )
    acc_k, acc_v = sums
    _store(dk, acc_k * scale, head, first, keys, column, P.dim)
    _store(dv, acc_v, head, first, keys, column, P.dim_v)
