# SPDX-License-Identifier: MIT
"""Attention forward in one kernel; see kernels/flash_attention.

Axis 0 of the grid counts batch times heads, axis 1 blocks of queries, axis 2 tiles of the result
where a head of v is larger than 128. A CTA holds its queries and walks over the keys that they
see: a block at the edge of what they see is masked, those between are not. Exponentials are powers
of two: log2(e) is folded into the scale. Every option is a constexpr: what is off is not compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.flash_attention.reference import product_dtype
from oss_fused.kernels.flash_attention.tile import (
    LN2,
    LOG2E,
    Tiles,
    as_operand,
    bias_and_hide,
    dot_dtype,
    head_block,
    head_tiles,
    kept_tile,
    key_range,
    load_tile,
    mask_bytes,
    scores,
    shared_memory,
    triton_dtype,
    unit_stride,
)
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import quantize_static, round_to
from oss_fused.kernels.random_mask import drop_threshold, fold_seed


@triton.jit
def _attend(
    acc,
    total,
    best,
    x,
    q,
    k,
    v,
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
    """The online softmax over keys [begin, end); EDGE: not every query sees every one of them."""
    m = first + tl.arange(0, BLOCK_M)[:, None]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)[None, :]
        logits, _ = scores(
            x, q, first, queries, stride_qm, k, start, keys, stride_kn,
            DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, EDGE, DTYPE,
        )  # fmt: skip
        logits = bias_and_hide(
            logits, m, n, queries, keys, slope, mask, stride_mm, window_left, window_right,
            EDGE, CAUSAL, LEFT, RIGHT, ALIBI, MASK,
        )  # fmt: skip
        new_best = tl.maximum(best, tl.max(logits, 1) * scale)
        safe = new_best
        if EDGE or MASK:
            # a row that has seen nothing yet: any finite number keeps its weights at 0
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(logits * scale - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
        if DROPOUT:
            weights = tl.where(kept_tile(seed, row0 + m, n, threshold), weights, 0.0)
        values = load_tile(
            v, start, keys, stride_vn, column, DIM_V, BLOCK_N, BLOCK_DV, EDGE, DTYPE
        )  # fmt: skip
        acc = acc * shrink[:, None]
        acc = tl.dot(as_operand(weights, ROUND, DTYPE), values, acc, input_precision="ieee")
    return acc, total, best


@triton.jit
def _queries(q, q_scale, k_scale, first, queries, stride_qm, DIM, BLOCK_M, BLOCK_D, ROUND, DTYPE):
    """The tile of queries; FP8 scales of q and of k are multiplied in and rounded once."""
    x = load_tile(q, first, queries, stride_qm, 0, DIM, BLOCK_M, BLOCK_D, True, DTYPE)
    if (q_scale is not None) or (k_scale is not None):
        cols = tl.arange(0, BLOCK_D)
        factor = tl.full([BLOCK_D], 1.0, tl.float32)
        if q_scale is not None:
            factor *= tl.load(q_scale + cols, mask=cols < DIM, other=0.0)
        if k_scale is not None:
            wide = x.to(tl.float32) * factor[None, :]
            x = wide * tl.load(k_scale + cols, mask=cols < DIM, other=0.0)[None, :]
        else:
            x = x.to(tl.float32) * factor[None, :]
        x = as_operand(x, ROUND, DTYPE)
    return x


@triton.jit(do_not_specialize=["window_left", "window_right", "seed", "threshold"])
def _flash_attention_kernel(
    q,
    k,
    v,
    mask,
    sinks,
    slopes,
    q_scale,
    k_scale,
    v_scale,
    out_scale,
    out,
    row_max,
    row_sum,
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
    ROUND_Q: tl.constexpr,
    ROUND_V: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    # causal: the blocks with most keys come first
    block = tl.num_programs(1) - 1 - tl.program_id(1) if CAUSAL else tl.program_id(1)
    column = tl.program_id(2) * BLOCK_DV
    first = block * BLOCK_M
    b = (head // HEADS).to(tl.int64)
    h = (head % HEADS).to(tl.int64)
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h // GROUP * stride_kh
    v += b * stride_vb + h // GROUP * stride_vh
    MASK: tl.constexpr = mask is not None
    if MASK:
        mask += b * stride_mb + h * stride_mh
    ALIBI: tl.constexpr = slopes is not None
    slope = 0.0
    if ALIBI:
        # logits are scaled after it
        slope = tl.load(slopes + h).to(tl.float32) / scale
    row0 = head.to(tl.int64) * queries
    x = _queries(
        q, q_scale, k_scale, first, queries, stride_qm, DIM, BLOCK_M, BLOCK_D, ROUND_Q, DTYPE
    )
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        best = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        total += 1.0
    scale *= LOG2E
    begin, full_begin, full_end, end = key_range(
        first, keys, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, LEFT, RIGHT
    )
    if LEFT:
        acc, total, best = _attend(
            acc, total, best, x, q, k, v, mask, begin, full_begin, first, column, queries, keys,
            row0, stride_qm, stride_kn, stride_vn, stride_mm, scale, slope, window_left,
            window_right, seed, threshold, True, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND_V, DTYPE, STAGES,
        )  # fmt: skip
    acc, total, best = _attend(
        acc, total, best, x, q, k, v, mask, full_begin, full_end, first, column, queries, keys,
        row0, stride_qm, stride_kn, stride_vn, stride_mm, scale, slope, window_left,
        window_right, seed, threshold, False, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND_V, DTYPE, STAGES,
    )  # fmt: skip
    if CAUSAL or RIGHT or LEFT or not EVEN:
        acc, total, best = _attend(
            acc, total, best, x, q, k, v, mask, full_end, end, first, column, queries, keys,
            row0, stride_qm, stride_kn, stride_vn, stride_mm, scale, slope, window_left,
            window_right, seed, threshold, True, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            CAUSAL, LEFT, RIGHT, ALIBI, MASK, DROPOUT, ROUND_V, DTYPE, STAGES,
        )  # fmt: skip
    m = first + tl.arange(0, BLOCK_M)
    cols = column + tl.arange(0, BLOCK_DV)
    in_rows = m < queries
    # a row that sees nothing is 0
    inverse = tl.where(total == 0.0, 0.0, keep_factor / total)
    acc = acc * inverse[:, None]
    if v_scale is not None:
        acc *= tl.load(v_scale + cols, mask=cols < DIM_V, other=0.0)[None, :]
    if out_scale is not None:
        step = tl.load(out_scale + cols, mask=cols < DIM_V, other=1.0)
        y = quantize_static(acc, tl.div_rn(1.0, step)[None, :])
    else:
        y = round_to(acc, out.dtype.element_ty)
    rows = row0 + m
    inside = in_rows[:, None] & (cols < DIM_V)[None, :]
    tl.store(out + rows[:, None] * DIM_V + cols[None, :], y, mask=inside)
    if column == 0:
        best = tl.where(best == float("-inf"), 0.0, best * LN2)
        tl.store(row_max + rows, best, mask=in_rows)
        tl.store(row_sum + rows, total, mask=in_rows)


def _tiles(device: torch.device, dtype: torch.dtype, dim: int, dim_v: int) -> Tiles:
    """The tile of a head size: as many keys in flight as shared memory holds, up to three."""
    if device.type != "cuda":
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32:
        # no tensor cores: registers hold the products
        return Tiles(32, 32, 4, 1)
    if head_tiles(dim) > 1:
        # Further tiles of queries and keys pass through shared memory. One stage of 64 keys or more
        # is what Triton 3.6 compiles wrongly for sm_90.
        return Tiles(64, 32, 4, 1)
    columns = head_block(dim) + head_block(dim_v)
    held = 128 * head_block(dim) * dtype.itemsize
    block_n = 128
    stages = (shared_memory(device) - held) // (block_n * columns * 2)
    if stages < 2:
        block_n = 64
        stages = (shared_memory(device) - held) // (block_n * columns * 2)
    if stages < 2:
        return Tiles(64, 32, 4, 1)
    return Tiles(128, block_n, 8, min(3, stages))


def _operand(t: torch.Tensor) -> torch.Tensor:
    """``t`` with unit stride along the last dimension; on a GPU FP8 codes as bfloat16, exact.

    Triton 3.6 compiles the kernel's own conversion of codes wrongly for sm_90: with tiles of keys
    in FP8 results are off by a third, or reads leave the tensor.
    """
    if t.is_cuda and t.dtype.itemsize == 1:
        t = t.to(torch.bfloat16)
    return unit_stride(t)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
    config: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result, row maxima and row sums; see kernels/flash_attention for the contract.

    ``config`` is the tuner's: what ``_tiles`` would return.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys, dim_v = v.shape[1:]
    dtype = product_dtype(q)
    out = torch.empty(
        (batch, heads, queries, dim_v),
        dtype=dtype if out_scale is None else FP8,
        device=q.device,
    )
    row_max, row_sum = (
        torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device) for _ in "ml"
    )
    if row_max.numel() == 0:
        return out, row_max, row_sum
    q, k, v = (_operand(t) for t in (q, k, v))
    mask, mask_strides = mask_bytes(mask, heads)
    tiles = config or _tiles(q.device, dtype, dim, dim_v)
    grid = (batch * heads, cdiv(queries, tiles.block_m), head_tiles(dim_v))
    _flash_attention_kernel[grid](
        q,
        k,
        v,
        mask,
        sinks,
        slopes,
        q_scale,
        k_scale,
        v_scale,
        out_scale,
        out,
        row_max,
        row_sum,
        queries,
        keys,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask_strides,
        scale,
        window_left,
        window_right,
        fold_seed(seed),
        drop_threshold(dropout_p),
        1.0 / (1.0 - dropout_p),
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        DIM_V=dim_v,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=head_block(dim),
        BLOCK_DV=head_block(dim_v),
        CAUSAL=causal,
        LEFT=window_left >= 0,
        RIGHT=window_right >= 0,
        EVEN=keys % tiles.block_n == 0,
        DROPOUT=dropout_p > 0,
        ROUND_Q=triton_dtype(dtype),
        ROUND_V=triton_dtype(product_dtype(v)),
        DTYPE=dot_dtype(dtype),
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )
    return out, row_max, row_sum
