# SPDX-License-Identifier: MIT
"""dQ = scale dS K: a CTA holds queries and walks over the keys that they see, as forward does."""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.flash_attention.tile import (
    LOG2E,
    as_operand,
    bias_and_hide,
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
    q,
    k,
    v,
    grad,
    mask,
    mask_head,
    begin,
    end,
    first,
    column,
    row0,
    scaling,
    window,
    drop,
    EDGE: tl.constexpr,
    P,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Adds dS K over keys [begin, end)."""
    x, d_out, log_sum, delta = held
    scale, slope = scaling
    sizes = (q[1], k[1])
    m = first + tl.arange(0, P.block_m)[:, None]
    for start in tl.range(begin, end, P.block_n, num_stages=P.stages):
        n = start + tl.arange(0, P.block_n)[None, :]
        logits, tile = scores(
            x, q, first, k, start, P.dim, P.block_d, P.block_m, P.block_n, EDGE, DTYPE
        )
        logits = bias_and_hide(logits, m, n, sizes, slope, mask, mask_head, window, EDGE, P)
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
    b = (head // P.heads).to(tl.int64)
    h = (head % P.heads).to(tl.int64)
    row0 = head.to(tl.int64) * queries
    q = (q.data + b * q.batch + h * q.head, queries, q.row)
    k = (k.data + b * k.batch + h // P.group * k.head, keys, k.row)
    v = (v.data + b * v.batch + h // P.group * v.head, keys, v.row)
    grad = (grad + row0 * P.dim_v, queries, P.dim_v)
    mask_head = b * mask.batch + h * mask.head
    slope = 0.0
    if P.alibi:
        slope = tl.load(slopes + h).to(tl.float32) / scale
    x = load_tile(q, first, 0, P.dim, P.block_m, P.block_d, True, DTYPE)
    d_out = load_tile(grad, first, 0, P.dim_v, P.block_m, P.block_dv, True, DTYPE)
    m = first + tl.arange(0, P.block_m)
    row_log = tl.load(rows.log_sum + row0 + m, mask=m < queries, other=float("inf"))
    row_delta = tl.load(rows.delta + row0 + m, mask=m < queries, other=0.0)
    held = (x, d_out, row_log, row_delta)
    acc = tl.zeros([P.block_m, P.block_d], tl.float32)
    scaling = (scale * LOG2E, slope)
    begin, full_begin, full_end, end = key_range(first, keys, window, P)
    if P.left:
        acc = _dq_part(
            acc, held, q, k, v, grad, mask, mask_head, begin, full_begin, first, column, row0,
            scaling, window, drop, True, P, ROUND, DTYPE,
        )  # fmt: skip
    acc = _dq_part(
        acc, held, q, k, v, grad, mask, mask_head, full_begin, full_end, first, column, row0,
        scaling, window, drop, False, P, ROUND, DTYPE,
    )  # fmt: skip
    if P.causal or P.right or P.left or not P.even:
        acc = _dq_part(
            acc, held, q, k, v, grad, mask, mask_head, full_end, end, first, column, row0,
            scaling, window, drop, True, P, ROUND, DTYPE,
        )  # fmt: skip
    cols = column + tl.arange(0, P.block_d)
    inside = (m < queries)[:, None] & (cols < P.dim)[None, :]
    place = (row0 + m)[:, None] * P.dim + cols[None, :]
    tl.store(dq + place, round_to(acc * scale, dq.dtype.element_ty), mask=inside)
