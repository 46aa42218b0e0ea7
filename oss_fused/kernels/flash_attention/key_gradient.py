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
    dk,
    dv,
    x,
    values,
    q,
    k,
    v,
    grad,
    log_sum,
    delta,
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
    """Adds dS' Q and P' dO over queries [begin, end); tiles are transposed, [keys, queries]."""
    n = first + tl.arange(0, BLOCK_N)[:, None]
    for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        m = start + tl.arange(0, BLOCK_M)[None, :]
        row = start + tl.arange(0, BLOCK_M)
        row_log = tl.load(log_sum + row, mask=row < queries, other=float("inf"))
        logits, q_tile = scores(
            x, k, first, keys, stride_kn, q, start, queries, stride_qm,
            DIM, BLOCK_D, BLOCK_N, BLOCK_M, True, EDGE, DTYPE,
        )  # fmt: skip
        logits = bias_and_hide(
            logits, m, n, queries, keys, slope, mask, stride_mm, window_left, window_right,
            EDGE, CAUSAL, LEFT, RIGHT, ALIBI, MASK,
        )  # fmt: skip
        weights = tl.exp2(logits * scale - row_log[None, :])
        d_weights, do_tile = scores(
            values, v, first, keys, stride_vn, grad, start, queries, DIM_V,
            DIM_V, BLOCK_DV, BLOCK_N, BLOCK_M, True, EDGE, DTYPE,
        )  # fmt: skip
        dropped = weights
        if DROPOUT:
            keep = kept_tile(seed, row0 + m, n, threshold)
            dropped = tl.where(keep, weights * keep_factor, 0.0)
            d_weights = tl.where(keep, d_weights * keep_factor, 0.0)
        if DIM_V > BLOCK_DV:
            do_tile = load_tile(
                grad, start, queries, DIM_V, column, DIM_V, BLOCK_M, BLOCK_DV, EDGE, DTYPE
            )
        dv = tl.dot(as_operand(dropped, ROUND, DTYPE), do_tile, dv, input_precision="ieee")
        row_delta = tl.load(delta + row, mask=row < queries, other=0.0)
        d_logits = as_operand(weights * (d_weights - row_delta[None, :]), ROUND, DTYPE)
        if DIM > BLOCK_D:
            q_tile = load_tile(
                q, start, queries, stride_qm, column, DIM, BLOCK_M, BLOCK_D, EDGE, DTYPE
            )
        dk = tl.dot(d_logits, q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["window_left", "window_right", "seed", "threshold"])
def dkv_kernel(
    q,
    k,
    v,
    grad,
    mask,
    slopes,
    log_sum,
    delta,
    dk,
    dv,
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
    KV_HEADS: tl.constexpr = HEADS // GROUP
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    column = tl.program_id(2) * BLOCK_D
    b = (head // KV_HEADS).to(tl.int64)
    kv = (head % KV_HEADS).to(tl.int64)
    k += b * stride_kb + kv * stride_kh
    v += b * stride_vb + kv * stride_vh
    MASK: tl.constexpr = mask is not None
    ALIBI: tl.constexpr = slopes is not None
    x = load_tile(k, first, keys, stride_kn, 0, DIM, BLOCK_N, BLOCK_D, True, DTYPE)
    values = load_tile(v, first, keys, stride_vn, 0, DIM_V, BLOCK_N, BLOCK_DV, True, DTYPE)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    log2_scale = scale * LOG2E
    begin, full_begin, full_end, end = query_range(
        first, queries, keys, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, LEFT, RIGHT
    )
    for member in range(0, GROUP):
        h = kv * GROUP + member
        row0 = (b * HEADS + h) * queries
        q_head = q + b * stride_qb + h * stride_qh
        grad_head = grad + row0 * DIM_V
        mask_head = mask
        if MASK:
            mask_head = mask + b * stride_mb + h * stride_mh
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + h).to(tl.float32) / scale
        if CAUSAL or RIGHT:
            acc_k, acc_v = _dkv_part(
                acc_k, acc_v, x, values, q_head, k, v, grad_head, log_sum + row0, delta + row0,
                mask_head, begin, full_begin, first, column, queries, keys, row0, stride_qm,
                stride_kn, stride_vn, stride_mm, log2_scale, slope, window_left, window_right,
                seed, threshold, keep_factor, True, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D,
                BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND, DTYPE, STAGES,
            )  # fmt: skip
        acc_k, acc_v = _dkv_part(
            acc_k, acc_v, x, values, q_head, k, v, grad_head, log_sum + row0, delta + row0,
            mask_head, full_begin, full_end, first, column, queries, keys, row0, stride_qm,
            stride_kn, stride_vn, stride_mm, log2_scale, slope, window_left, window_right,
            seed, threshold, keep_factor, False, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D,
            BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND, DTYPE, STAGES,
        )  # fmt: skip
        if LEFT or not EVEN:
            acc_k, acc_v = _dkv_part(
                acc_k, acc_v, x, values, q_head, k, v, grad_head, log_sum + row0, delta + row0,
                mask_head, full_end, end, first, column, queries, keys, row0, stride_qm,
                stride_kn, stride_vn, stride_mm, log2_scale, slope, window_left, window_right,
                seed, threshold, keep_factor, True, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D,
                BLOCK_DV, CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND, DTYPE, STAGES,
            )  # fmt: skip
    row = head.to(tl.int64) * keys + first + tl.arange(0, BLOCK_N)
    in_rows = (first + tl.arange(0, BLOCK_N) < keys)[:, None]
    cols = column + tl.arange(0, BLOCK_D)
    acc_k = round_to(acc_k * scale, dk.dtype.element_ty)
    inside = in_rows & (cols < DIM)[None, :]
    tl.store(dk + row[:, None] * DIM + cols[None, :], acc_k, mask=inside)
    cols = column + tl.arange(0, BLOCK_DV)
    inside = in_rows & (cols < DIM_V)[None, :]
    acc_v = round_to(acc_v, dv.dtype.element_ty)
    tl.store(dv + row[:, None] * DIM_V + cols[None, :], acc_v, mask=inside)
