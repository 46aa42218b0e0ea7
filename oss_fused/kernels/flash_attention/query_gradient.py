# SPDX-License-Identifier: MIT
"""dQ = scale dS K: a CTA holds queries and walks over the keys that they see, as forward does."""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.flash_attention.tile import (
    LOG2E,
    as_operand,
    bias_and_hide,
    head_strips,
    kept_tile,
    key_range,
    load_tile,
    scores,
)
from oss_fused.kernels.numerics import round_to


@triton.jit
def _dq_part(
    acc,
    held,
    strips,
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
    """Adds dS K over keys [begin, end); ``at`` as in forward's ``_attend``."""
    x, d_out, log_sum, delta = held
    q, k, v, grad = strips
    first, column, row0 = at
    scale, slope = scaling
    sizes = (q[1], k[1])
    m = first + tl.arange(0, P.block_m)[:, None]
    for start in tl.range(begin, end, P.block_n, num_stages=P.stages):
        n = start + tl.arange(0, P.block_n)[None, :]
        logits, tile = scores(
            x, q, first, k, start, P.dim, P.block_d, P.block_m, P.block_n, EDGE, DTYPE
        )
        logits = bias_and_hide(logits, m, n, sizes, slope, hidden, EDGE, P)
        weights = tl.exp2(logits * scale - log_sum[:, None])
        d_weights, _ = scores(
            d_out, grad, first, v, start, P.dim_v, P.block_dv, P.block_m, P.block_n, EDGE, DTYPE
        )
        if P.dropout:
            keep = kept_tile(drop, row0 + m, n)
            d_weights = tl.where(keep, d_weights * drop.factor, 0.0)
        d_logits = as_operand(weights * (d_weights - delta[:, None]), ROUND, DTYPE)
        if P.dim > P.block_d:
            tile = load_tile(k, start, column, P.dim, P.block_n, P.block_d, EDGE, DTYPE)
        acc = tl.dot(d_logits, tile, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["window", "drop"])
def dq_kernel(
    q,
    k,
    v,
    grad,
    mask,
    slopes,
    rows,
    dq,
    queries,
    keys,
    scale,
    window,
    drop,
    P,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``rows``: a RowTerms; the grid is forward's."""
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1) if P.causal else tl.program_id(1)
    column = tl.program_id(2) * P.block_d
    first = block * P.block_m
    b, h, strips = head_strips(q, k, v, head, queries, keys, P)
    row0 = head.to(tl.int64) * queries
    strips += ((grad + row0 * P.dim_v, queries, P.dim_v),)
    hidden = (mask, b * mask.batch + h * mask.head, window)
    slope = 0.0
    if P.alibi:
        slope = tl.load(slopes + h).to(tl.float32) / scale
    x = load_tile(strips[0], first, 0, P.dim, P.block_m, P.block_d, True, DTYPE)
    d_out = load_tile(strips[3], first, 0, P.dim_v, P.block_m, P.block_dv, True, DTYPE)
    m = first + tl.arange(0, P.block_m)
    row_log = tl.load(rows.log_sum + row0 + m, mask=m < queries, other=float("inf"))
    row_delta = tl.load(rows.delta + row0 + m, mask=m < queries, other=0.0)
    held = (x, d_out, row_log, row_delta)
    acc = tl.zeros([P.block_m, P.block_d], tl.float32)
    scaling = (scale * LOG2E, slope)
    at = (first, column, row0)
    begin, full_begin, full_end, end = key_range(first, keys, window, P)
    if P.left:
        acc = _dq_part(
            acc, held, strips, hidden, begin, full_begin, at, scaling, drop, True, P, ROUND, DTYPE
        )
    acc = _dq_part(
        acc, held, strips, hidden, full_begin, full_end, at, scaling, drop, False, P, ROUND, DTYPE
    )
    if P.causal or P.right or P.left or not P.even:
        acc = _dq_part(
            acc, held, strips, hidden, full_end, end, at, scaling, drop, True, P, ROUND, DTYPE
        )
    cols = column + tl.arange(0, P.block_d)
    inside = (m < queries)[:, None] & (cols < P.dim)[None, :]
    target = dq + (row0 + m)[:, None] * P.dim + cols[None, :]
    tl.store(target, round_to(acc * scale, dq.dtype.element_ty), mask=inside)
