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
    x,
    d_out,
    log_sum,
    delta,
    q,
    k,
    v,
    grad,
    mask,
    begin,
    end,
    first,
    column,
    queries,
    keys,
    row0,
    stride_qm,
    stride_kn,
    stride_vn,
    stride_mm,
    scale,
    slope,
    window_left,
    window_right,
    seed,
    threshold,
    keep_factor,
    EDGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds dS K over keys [begin, end)."""
    m = first + tl.arange(0, BLOCK_M)[:, None]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)[None, :]
        logits, tile = scores(
            x, q, first, queries, stride_qm, k, start, keys, stride_kn,
            DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, EDGE, DTYPE,
        )  # fmt: skip
        logits = bias_and_hide(
            logits, m, n, queries, keys, slope, mask, stride_mm, window_left, window_right,
            EDGE, CAUSAL, LEFT, RIGHT, ALIBI, MASK,
        )  # fmt: skip
        weights = tl.exp2(logits * scale - log_sum[:, None])
        d_weights, _ = scores(
            d_out, grad, first, queries, DIM_V, v, start, keys, stride_vn,
            DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N, True, EDGE, DTYPE,
        )  # fmt: skip
        if DROPOUT:
            keep = kept_tile(seed, row0 + m, n, threshold)
            d_weights = tl.where(keep, d_weights * keep_factor, 0.0)
        d_logits = as_operand(weights * (d_weights - delta[:, None]), ROUND, DTYPE)
        if DIM > BLOCK_D:
            tile = load_tile(k, start, keys, stride_kn, column, DIM, BLOCK_N, BLOCK_D, EDGE, DTYPE)
        acc = tl.dot(d_logits, tile, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["window_left", "window_right", "seed", "threshold"])
def dq_kernel(
    q,
    k,
    v,
    grad,
    mask,
    slopes,
    log_sum,
    delta,
    dq,
    queries,
    keys,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mb,
    stride_mh,
    stride_mm,
    scale,
    window_left,
    window_right,
    seed,
    threshold,
    keep_factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1) if CAUSAL else tl.program_id(1)
    column = tl.program_id(2) * BLOCK_D
    first = block * BLOCK_M
    b = (head // HEADS).to(tl.int64)
    h = (head % HEADS).to(tl.int64)
    row0 = head.to(tl.int64) * queries
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h // GROUP * stride_kh
    v += b * stride_vb + h // GROUP * stride_vh
    grad += row0 * DIM_V
    MASK: tl.constexpr = mask is not None
    if MASK:
        mask += b * stride_mb + h * stride_mh
    ALIBI: tl.constexpr = slopes is not None
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h).to(tl.float32) / scale
    x = load_tile(q, first, queries, stride_qm, 0, DIM, BLOCK_M, BLOCK_D, True, DTYPE)
    d_out = load_tile(grad, first, queries, DIM_V, 0, DIM_V, BLOCK_M, BLOCK_DV, True, DTYPE)
    m = first + tl.arange(0, BLOCK_M)
    row_log = tl.load(log_sum + row0 + m, mask=m < queries, other=float("inf"))
    row_delta = tl.load(delta + row0 + m, mask=m < queries, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    log2_scale = scale * LOG2E
    begin, full_begin, full_end, end = key_range(
        first, keys, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, LEFT, RIGHT
    )
    if LEFT:
        acc = _dq_part(
            acc, x, d_out, row_log, row_delta, q, k, v, grad, mask, begin, full_begin, first,
            column, queries, keys, row0, stride_qm, stride_kn, stride_vn, stride_mm, log2_scale,
            slope, window_left, window_right, seed, threshold, keep_factor, True, DIM, DIM_V,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND,
            DTYPE, STAGES,
        )  # fmt: skip
    acc = _dq_part(
        acc, x, d_out, row_log, row_delta, q, k, v, grad, mask, full_begin, full_end, first,
        column, queries, keys, row0, stride_qm, stride_kn, stride_vn, stride_mm, log2_scale,
        slope, window_left, window_right, seed, threshold, keep_factor, False, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND,
        DTYPE, STAGES,
    )  # fmt: skip
    if CAUSAL or RIGHT or LEFT or not EVEN:
        acc = _dq_part(
            acc, x, d_out, row_log, row_delta, q, k, v, grad, mask, full_end, end, first,
            column, queries, keys, row0, stride_qm, stride_kn, stride_vn, stride_mm, log2_scale,
            slope, window_left, window_right, seed, threshold, keep_factor, True, DIM, DIM_V,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND,
            DTYPE, STAGES,
        )  # fmt: skip
    cols = column + tl.arange(0, BLOCK_D)
    inside = (m < queries)[:, None] & (cols < DIM)[None, :]
    place = (row0 + m)[:, None] * DIM + cols[None, :]
    tl.store(dq + place, round_to(acc * scale, dq.dtype.element_ty), mask=inside)
