# SPDX-License-Identifier: MIT
"""Attention forward in one kernel; see kernels/flash_attention.

Axis 0 of the grid counts batch times heads, axis 1 blocks of queries, axis 2 tiles of the result
where a head of v is larger than 128. A CTA holds its queries and walks over the keys that they
see: a block at the edge of what they see is masked, those between are not. Exponentials are powers
of two: log2(e) is folded into the scale. Every option is a constexpr: what is off is not compiled.
FP8 values are read as codes, and become numbers of the product's dtype in registers.

On Hopper hopper.py takes halves without options; ``_for_hopper`` is the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    dropout,
    for_hopper,
    head_block,
    head_strips,
    head_tiles,
    kept_tile,
    key_range,
    load_tile,
    mask_rows,
    program,
    rows_of,
    scores,
    shared_memory,
    triton_dtype,
    window_of,
    with_tiles,
)
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import quantize_static, round_to


class _Scales(NamedTuple):
    """Multipliers of the operands' columns, and the quantisation steps of the result's, or None."""

    q: Any
    k: Any
    v: Any
    out: Any


class _Result(NamedTuple):
    """What a row of the result is, contiguous: [rows, Dv] and, float32 [rows], maximum and sum."""

    data: Any
    row_max: Any
    row_sum: Any


@triton.jit
def _attend(
    sums,
    x,
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
    """The online softmax over keys [begin, end); EDGE: not every query sees every one of them.

    ``at``: the first query of the tile, the first column of v, the head's first row.
    """
    acc, total, best = sums
    q, k, v = strips
    first, column, row0 = at
    scale, slope = scaling
    sizes = (q[1], k[1])
    m = first + tl.arange(0, P.block_m)[:, None]
    for start in tl.range(begin, end, P.block_n, num_stages=P.stages):
        n = start + tl.arange(0, P.block_n)[None, :]
        logits, _ = scores(
            x, q, first, k, start, P.dim, P.block_d, P.block_m, P.block_n, EDGE, DTYPE
        )
        logits = bias_and_hide(logits, m, n, sizes, slope, hidden, EDGE, P)
        new_best = tl.maximum(best, tl.max(logits, 1) * scale)
        safe = new_best
        if EDGE or P.masked:
            # a row that has seen nothing yet: any finite number keeps its weights at 0
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(logits * scale - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
        if P.dropout:
            weights = tl.where(kept_tile(drop, row0 + m, n), weights, 0.0)
        values = load_tile(v, start, column, P.dim_v, P.block_n, P.block_dv, EDGE, DTYPE)
        acc = acc * shrink[:, None]
        acc = tl.dot(as_operand(weights, ROUND, DTYPE), values, acc, input_precision="ieee")
    return acc, total, best


@triton.jit
def _queries(q, scales, first, P, ROUND: tl.constexpr, DTYPE: tl.constexpr):
    """The tile of queries; FP8 scales of q and of k are multiplied in and rounded once."""
    x = load_tile(q, first, 0, P.dim, P.block_m, P.block_d, True, DTYPE)
    if (scales.q is not None) or (scales.k is not None):
        cols = tl.arange(0, P.block_d)
        factor = tl.full([P.block_d], 1.0, tl.float32)
        if scales.q is not None:
            factor *= tl.load(scales.q + cols, mask=cols < P.dim, other=0.0)
        if scales.k is not None:
            wide = x.to(tl.float32) * factor[None, :]
            x = wide * tl.load(scales.k + cols, mask=cols < P.dim, other=0.0)[None, :]
        else:
            x = x.to(tl.float32) * factor[None, :]
        x = as_operand(x, ROUND, DTYPE)
    return x


@triton.jit
def _nothing(sinks, h, P):
    """Sum of values, sum of weights and maximum of no key, or of a head's sink."""
    best = tl.full([P.block_m], float("-inf"), tl.float32)
    total = tl.zeros([P.block_m], tl.float32)
    if sinks is not None:
        best = tl.zeros([P.block_m], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        total += 1.0
    return tl.zeros([P.block_m, P.block_dv], tl.float32), total, best


@triton.jit
def _store(result, scales, sums, row0, first, queries, column, factor, P):
    acc, total, best = sums
    m = first + tl.arange(0, P.block_m)
    cols = column + tl.arange(0, P.block_dv)
    in_rows = m < queries
    # a row that sees nothing is 0
    inverse = tl.where(total == 0.0, 0.0, factor / total)
    acc = acc * inverse[:, None]
    if scales.v is not None:
        acc *= tl.load(scales.v + cols, mask=cols < P.dim_v, other=0.0)[None, :]
    if scales.out is not None:
        step = tl.load(scales.out + cols, mask=cols < P.dim_v, other=1.0)
        y = quantize_static(acc, tl.div_rn(1.0, step)[None, :])
    else:
        y = round_to(acc, result.data.dtype.element_ty)
    rows = row0 + m
    inside = in_rows[:, None] & (cols < P.dim_v)[None, :]
    tl.store(result.data + rows[:, None] * P.dim_v + cols[None, :], y, mask=inside)
    if column == 0:
        best = tl.where(best == float("-inf"), 0.0, best * LN2)
        tl.store(result.row_max + rows, best, mask=in_rows)
        tl.store(result.row_sum + rows, total, mask=in_rows)


@triton.jit(do_not_specialize=["window", "drop"])
def _flash_attention_kernel(
    q,
    k,
    v,
    mask,
    sinks,
    slopes,
    scales,
    result,
    queries,
    keys,
    scale,
    window,
    drop,
    P,
    ROUND_Q: tl.constexpr,
    ROUND_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    head = tl.program_id(0)
    # causal: the blocks with most keys come first
    block = tl.num_programs(1) - 1 - tl.program_id(1) if P.causal else tl.program_id(1)
    column = tl.program_id(2) * P.block_dv
    first = block * P.block_m
    b, h, strips = head_strips(q, k, v, head, queries, keys, P)
    hidden = (mask, b * mask.batch + h * mask.head, window)
    slope = 0.0
    if P.alibi:
        # logits are scaled after it
        slope = tl.load(slopes + h).to(tl.float32) / scale
    row0 = head.to(tl.int64) * queries
    at = (first, column, row0)
    x = _queries(strips[0], scales, first, P, ROUND_Q, DTYPE)
    sums = _nothing(sinks, h, P)
    scaling = (scale * LOG2E, slope)
    begin, full_begin, full_end, end = key_range(first, keys, window, P)
    if P.left:
        sums = _attend(
            sums, x, strips, hidden, begin, full_begin, at, scaling, drop, True, P, ROUND_V, DTYPE
        )
    sums = _attend(
        sums, x, strips, hidden, full_begin, full_end, at, scaling, drop, False, P, ROUND_V, DTYPE
    )
    if P.causal or P.right or P.left or not P.even:
        sums = _attend(
            sums, x, strips, hidden, full_end, end, at, scaling, drop, True, P, ROUND_V, DTYPE
        )
    _store(result, scales, sums, row0, first, queries, column, drop.factor, P)


def _tiles(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    dim_v: int,
    masked: bool = False,
    codes: bool = False,
) -> Tiles:
    """The tile of a head size: as many keys in flight as shared memory holds, up to three.

    A mask's bytes are in flight with the keys. ``codes``: v is FP8; its tiles pass registers,
    which 128 keys of 128 values would spill.
    """
    if device.type != "cuda":
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32:
        # no tensor cores: registers hold the products
        return Tiles(32, 32, 4, 1)
    if head_tiles(dim) > 1:
        # Further tiles of queries and keys pass through shared memory. One stage of 64 keys or more
        # is what Triton 3.6 compiles wrongly for sm_90.
        return Tiles(64, 32, 4, 1)
    key = 2 * (head_block(dim) + head_block(dim_v)) + 128 * masked
    held = 128 * head_block(dim) * dtype.itemsize
    # heads of 64: 439 TFLOPS on an H200, 370 with 128 keys
    block_n = 128 if key > 256 and not codes else 64
    stages = (shared_memory(device) - held) // (block_n * key)
    if stages < 2:
        block_n = 64
        stages = (shared_memory(device) - held) // (block_n * key)
    if stages < 2:
        return Tiles(64, 32, 4, 1)
    return Tiles(128, block_n, 8, min(3, stages))


def _without_codes(t: torch.Tensor) -> torch.Tensor:
    """``t``, queries or keys; on a GPU FP8 codes as bfloat16, exact.

    There a kernel that converts keys is slower at every size (docs/results/notes/kernels.md), and
    with heads of 32 and 16 values Triton 3.6 reads beyond the tensor.
    """
    return t.to(torch.bfloat16) if t.is_cuda and t.dtype.itemsize == 1 else t


_Scale = torch.Tensor | None


def _scaled(
    q: torch.Tensor, q_scale: _Scale, k_scale: _Scale
) -> tuple[torch.Tensor, _Scale, _Scale]:
    """``q`` and its scales; where a head takes several tiles, ``q`` times them and no scale.

    The kernel scales the tile of queries that it holds, and reads the others again for each key.
    """
    if head_tiles(q.shape[3]) == 1 or q_scale is k_scale is None:
        return q, q_scale, k_scale
    wide = q.float()
    for scale in (q_scale, k_scale):
        wide = wide if scale is None else wide * scale
    return wide.to(product_dtype(q)), None, None


# queries from which on heads of 64 values take hopper.py: its tiles have 192 queries for them, and
# below the Triton kernel is faster (docs/results/h200/attention-forward.json)
_LONG = 2048


def _for_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether hopper.py takes these operands where no option but causality is on."""
    return (max(q.shape[3], v.shape[3]) > 64 or q.shape[2] >= _LONG) and for_hopper(q, k, v)


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
    (batch, heads, queries, dim), (keys, dim_v) = q.shape, v.shape[2:]
    dtype = product_dtype(q)
    out = q.new_empty((*q.shape[:3], dim_v), dtype=dtype if out_scale is None else FP8)
    row_max, row_sum = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    if row_max.numel() == 0:
        return out, row_max, row_sum
    window = window_of(window_left, window_right, max(queries, keys))
    plain = config is mask is sinks is slopes is out_scale is None and not dropout_p
    if plain and window == (-1, -1) and _for_hopper(q, k, v):
        # Gluon is experimental: another Triton may lack it
        from oss_fused.kernels.flash_attention.hopper import attend

        attend(q, k, v, out, row_max, row_sum, scale, causal)
        return out, row_max, row_sum
    q, q_scale, k_scale = _scaled(q, q_scale, k_scale)
    tiles = config or _tiles(q.device, dtype, dim, dim_v, mask is not None, v.dtype.itemsize == 1)
    columns = (head_block(dim), head_block(dim_v))
    shape = program(q, v, mask, slopes, causal, window, dropout_p, columns)
    _flash_attention_kernel[(batch * heads, cdiv(queries, tiles.block_m), head_tiles(dim_v))](
        *map(rows_of, (_without_codes(q), _without_codes(k), v)),
        mask_rows(mask, heads),
        sinks,
        slopes,
        _Scales(q_scale, k_scale, v_scale, out_scale),
        _Result(out, row_max, row_sum),
        queries,
        keys,
        scale,
        window,
        dropout(dropout_p, seed),
        with_tiles(shape, tiles, keys % tiles.block_n == 0),
        triton_dtype(dtype),
        triton_dtype(product_dtype(v)),
        dot_dtype(dtype),
        num_warps=tiles.warps,
    )
    return out, row_max, row_sum
