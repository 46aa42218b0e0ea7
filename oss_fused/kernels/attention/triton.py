# SPDX-License-Identifier: MIT
"""Attention of few query tokens per sequence over a paged KV cache, one launch.

out[t, h] = softmax([q . k * scale, sink]) @ [v, 0] over the last ``window`` positions (all, where
window is 0). query [T, Hq, D]; caches [pages, page_size, Hkv, D] of any stride with unit stride
along D, bf16, fp16 or e4m3. The Hq / Hkv query heads of several tokens share a program, padded to a
tensor-core tile: all of them read keys and values once.

Split over the context: several programs a head take equal runs of tiles. A split that is alone
writes the result; otherwise each leaves its sum, maximum and weight in a scratch buffer, and the
one that arrives last adds them up in order: one launch, no float atomics, the same bits each run.

Keys and values are loaded after the wait for the kernel ahead: it writes the newest position of
every sequence of the step, and a sequence that shares a full block may read another's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.attention.launches import launch_for, tokens_per_program
from oss_fused.kernels.cache import Heads, paged_cache
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.numerics import INTERPRETED, from_fp8, round_to

_LOG2E = tl.constexpr(1.4426950408889634)


class _Rows(NamedTuple):
    """A tensor [T, Hq, D] with unit stride along D, as one kernel argument."""

    data: Any
    row_stride: Any
    head_stride: Any


class _Splits(NamedTuple):
    """What splits of one head leave for the last of them; arrivals [programs * Hkv] counts them.

    sums [slots, BLOCK_G, BLOCK_D] and stats [slots, BLOCK_G, 2] (maximum, weight) are float32.
    """

    arrivals: Any
    sums: Any
    stats: Any


@triton.jit
def _load(pointers, mask, dtype: tl.constexpr):
    tile = tl.load(pointers, mask=mask, other=0.0)
    if tile.dtype == tl.float8e4nv:
        # e4m3 -> bf16 is exact
        return from_fp8(tile).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit
def _store(pointers, values, mask):
    tl.store(pointers, round_to(values, pointers.dtype.element_ty), mask=mask)


@triton.jit
def _tokens(seq_lens, query_starts, TOKENS: tl.constexpr, CHUNKS: tl.constexpr):
    """Sequence, first row and position, and number of the tokens of this program."""
    sequence = tl.program_id(0).to(tl.int64) // CHUNKS
    length = tl.load(seq_lens + sequence)
    row, count = sequence, 1
    if query_starts is not None:
        row = tl.load(query_starts + sequence).to(tl.int64)
        count = (tl.load(query_starts + sequence + 1) - row).to(tl.int32)
    before = tl.program_id(0) % CHUNKS * TOKENS
    return sequence, row + before, length - count + before, tl.minimum(count - before, TOKENS)


@triton.jit
def _last_seen(position, in_group, query_starts, GROUP: tl.constexpr):
    """Last position [rows, 1] that each row sees, -1 for padding; None: each sees all."""
    last = None
    if query_starts is not None:
        lanes = tl.arange(0, in_group.shape[0])
        last = tl.where(in_group, position + lanes // GROUP, -1)[:, None]
    return last


@triton.jit
def _span(position, tokens, min_tiles, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First position of this split, the one behind its last, and how many splits have work."""
    length = position + tokens
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0
    tiles = tl.maximum(tl.cdiv(length - first, BLOCK_N), 1)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), min_tiles)
    begin = first + tl.program_id(2) * tiles_per_split * BLOCK_N
    end = tl.minimum(length, begin + tiles_per_split * BLOCK_N)
    return begin, end, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def _seen(begin, end, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which positions from ``begin`` on each row sees; ``last`` [rows, 1], None for all to end."""
    positions = (begin + tl.arange(0, BLOCK_N))[None, :]
    seen = positions < end
    if last is not None:
        seen &= positions <= last
        if WINDOW > 0:
            seen &= positions > last - WINDOW
    return seen


@triton.jit
def _pointers(keys, values, table, begin, end, head, columns, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N, D] of a head's keys and values from ``begin`` on; which are before end."""
    positions = begin + tl.arange(0, BLOCK_N)
    valid = positions < end
    pages = tl.load(table + positions // keys.page_size, mask=valid, other=0).to(tl.int64)
    slots = positions % keys.page_size
    k_rows = pages * keys.block_stride + slots * keys.page_stride
    v_rows = pages * values.block_stride + slots * values.page_stride
    key_head = keys.data + head * keys.head_stride
    value_head = values.data + head * values.head_stride
    key_offsets = k_rows[:, None] + columns[None, :]
    value_offsets = v_rows[:, None] + columns[None, :]
    return key_head + key_offsets, value_head + value_offsets, valid


@triton.jit
def _head_pointers(tensor, rows, heads, columns):
    offsets = rows * tensor.row_stride + heads * tensor.head_stride
    return tensor.data + (offsets[:, None] + columns[None])


@triton.jit
def _nothing(BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr):
    """Maximum, weight and weighted sum of no position.

    LEAST is finite where a row may see no position of a tile: -inf less itself would be NaN.
    """
    best = tl.full([BLOCK_G], LEAST, tl.float32)
    return best, tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)


@triton.jit
def _logit_scale(softmax_scale, scales):
    """What the products of codes are multiplied with; logits are powers of two."""
    scale = softmax_scale * _LOG2E
    if scales.q is not None:
        scale *= tl.load(scales.q)
    if scales.k is not None:
        scale *= tl.load(scales.k)
    return scale


@triton.jit
def _add_tile(q, k, v, seen, scale, best, total, acc, DTYPE: tl.constexpr):
    """One step of the online softmax; a row that sees nothing has a finite ``best``."""
    logits = tl.dot(q, tl.trans(k)) * scale
    logits = tl.where(seen, logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, 1))
    weights = tl.exp2(logits - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(round_to(weights, DTYPE), v)
    return new_best, total, acc


@triton.jit
def _leave(splits, slot, best, total, acc):
    """Leave the result of this split; returns how many had arrived before it."""
    BLOCK_G: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[1]
    here = (slot * tl.num_programs(2) + tl.program_id(2)) * BLOCK_G + tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    tl.store(splits.sums + here[:, None] * BLOCK_D + columns[None, :], acc)
    tl.store(splits.stats + here * 2, best)
    tl.store(splits.stats + here * 2 + 1, total)
    # every thread's stores come before the arrival that announces them
    tl.debug_barrier()
    return tl.atomic_add(splits.arrivals + slot, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _gather(
    splits, slot, active, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr
):
    """Maximum, weight and weighted sum of all splits of a head, in their order; count anew."""
    tl.store(splits.arrivals + slot, 0)
    best, total, acc = _nothing(BLOCK_G, BLOCK_D, LEAST)
    columns = tl.arange(0, BLOCK_D)
    for other in range(0, active):
        there = (slot * tl.num_programs(2) + other) * BLOCK_G + tl.arange(0, BLOCK_G)
        other_best = tl.load(splits.stats + there * 2, cache_modifier=".cg")
        other_total = tl.load(splits.stats + there * 2 + 1, cache_modifier=".cg")
        other_sums = splits.sums + there[:, None] * BLOCK_D + columns[None, :]
        other_acc = tl.load(other_sums, cache_modifier=".cg")
        new_best = tl.maximum(best, other_best, propagate_nan=tl.PropagateNan.ALL)
        shrink = tl.exp2(best - new_best)
        grow = tl.exp2(other_best - new_best)
        total = total * shrink + other_total * grow
        acc = acc * shrink[:, None] + other_acc * grow[:, None]
        best = new_best
    return best, total, acc


@triton.jit
def _join(splits, head, active, best, total, acc, HEADS: tl.constexpr, LEAST: tl.constexpr):
    """Whether this split writes the result of its head; the sums of all splits where it does."""
    BLOCK_G: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[1]
    writes = active == 1
    if active > 1:
        slot = tl.program_id(0).to(tl.int64) * HEADS + head
        writes = _leave(splits, slot, best, total, acc) == active - 1
        if writes:
            best, total, acc = _gather(splits, slot, active, BLOCK_G, BLOCK_D, LEAST)
    return writes, best, total, acc


@triton.jit
def _normalize(best, total, acc, sinks, heads, in_group, v_scale):
    """The weighted mean; a sink takes its share of the weight."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * _LOG2E
        new_best = tl.maximum(best, sink, propagate_nan=tl.PropagateNan.ALL)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.exp2(sink - new_best)
        acc = acc * shrink[:, None]
    # a padding row has no position: its result is 0, not 0 / 0
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    return result


@triton.jit(do_not_specialize=["table_stride", "min_tiles"])
def _decode_attention_kernel(
    query,
    keys,
    values,
    block_table,
    seq_lens,
    query_starts,
    out,
    splits,
    sinks,
    scales,
    softmax_scale,
    table_stride,
    min_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    LEAST: tl.constexpr = float("-inf") if query_starts is None else -3.4028234663852886e38
    head = tl.program_id(1)
    wait_unless(PREFETCH)
    sequence, row, position, tokens = _tokens(seq_lens, query_starts, TOKENS, CHUNKS)
    begin, end, active = _span(position, tokens, min_tiles, WINDOW, BLOCK_N)
    if (tokens <= 0) | (tl.program_id(2) >= active):
        return
    lanes, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_group = lanes < tokens * GROUP
    heads, rows = head * GROUP + lanes % GROUP, row + lanes // GROUP
    last = _last_seen(position, in_group, query_starts, GROUP)
    in_d = (columns < HEAD_DIM)[None, :]
    mask_q = in_group[:, None] & in_d
    table = block_table + sequence * table_stride
    k, v, valid = _pointers(keys, values, table, begin, end, head, columns, BLOCK_N)
    if HEAD_DIM <= 64:
        start_next()
    wait_for_inputs()
    k, v = _load(k, valid[:, None] & in_d, DTYPE), _load(v, valid[:, None] & in_d, DTYPE)
    q = _load(_head_pointers(query, rows, heads, columns), mask_q, DTYPE)
    if HEAD_DIM > 64:
        # the next kernels' weights would come before these larger keys and values
        start_next()
    scale = _logit_scale(softmax_scale, scales)
    best, total, acc = _nothing(BLOCK_G, BLOCK_D, LEAST)
    # a padding row has no position at all
    if end > begin:
        seen = _seen(begin, end, last, WINDOW, BLOCK_N)
        best, total, acc = _add_tile(q, k, v, seen, scale, best, total, acc, DTYPE)
    for start in range(begin + BLOCK_N, end, BLOCK_N):
        k, v, valid = _pointers(keys, values, table, start, end, head, columns, BLOCK_N)
        k, v = _load(k, valid[:, None] & in_d, DTYPE), _load(v, valid[:, None] & in_d, DTYPE)
        seen = _seen(start, end, last, WINDOW, BLOCK_N)
        best, total, acc = _add_tile(q, k, v, seen, scale, best, total, acc, DTYPE)
    writes, best, total, acc = _join(splits, head, active, best, total, acc, HEADS, LEAST)
    if writes:
        result = _normalize(best, total, acc, sinks, heads, in_group, scales.v)
        _store(_head_pointers(out, rows, heads, columns), result, mask_q)


def _dot_dtype(out_dtype: torch.dtype) -> tl.dtype:
    # the interpreter multiplies bf16 tiles as if they were integers
    if INTERPRETED.value:
        return tl.float32
    return tl.float16 if out_dtype == torch.float16 else tl.bfloat16


def _scratch(
    arrivals: torch.Tensor, grid: tuple[int, int, int], block_g: int, block_d: int
) -> _Splits:
    """Room for what the splits of ``grid`` leave; none where a split is alone."""
    shape = (math.prod(grid) if grid[2] > 1 else 0, block_g)
    sums = arrivals.new_empty((*shape, block_d), dtype=torch.float32)
    stats = arrivals.new_empty((*shape, 2), dtype=torch.float32)
    return _Splits(arrivals, sums, stats)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefetch_table: bool = False,
    query_starts: torch.Tensor | None = None,
    max_query_len: int = 1,
) -> None:
    """Softmax attention into ``out``; see kernels/attention for the contract."""
    rows, q_heads, head_dim = query.shape
    sequences = rows if query_starts is None else query_starts.shape[0] - 1
    if rows == 0 or sequences == 0:
        return
    heads, group = key_cache.shape[2], q_heads // key_cache.shape[2]
    tokens = tokens_per_program(max_query_len, group)
    chunks = cdiv(max_query_len, tokens)
    positions = block_table.shape[1] * key_cache.shape[1]
    fp8 = key_cache.dtype == FP8
    launch = launch_for(sequences * chunks, heads, head_dim, fp8, window, positions)
    block_g, block_d = (max(16, next_power_of_2(n)) for n in (tokens * group, head_dim))
    grid = (sequences * chunks, heads, launch.splits)
    _decode_attention_kernel[grid](
        _Rows(query, query.stride(0), query.stride(1)),
        paged_cache(key_cache),
        paged_cache(value_cache),
        block_table,
        seq_lens,
        query_starts,
        _Rows(out, out.stride(0), out.stride(1)),
        _scratch(arrivals, grid, block_g, block_d),
        sinks,
        Heads(q_scale, k_scale, v_scale),
        softmax_scale,
        block_table.stride(0),
        launch.min_tiles,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=window,
        TOKENS=tokens,
        CHUNKS=chunks,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_N=launch.block_n,
        DTYPE=_dot_dtype(out.dtype),
        PREFETCH=prefetch_table,
        num_warps=launch.warps,
        num_stages=3,
        **pdl_options(query.device),
    )
