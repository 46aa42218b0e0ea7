# SPDX-License-Identifier: MIT
"""Attention of few query tokens per sequence over a paged KV cache, one launch.

out[t, h] = softmax([q . k * scale, sink]) @ [v, 0] over the last ``window`` positions (all, where
window is 0). query [T, Hq, D]; caches [pages, page_size, Hkv, D] of any stride with unit stride
along D, bf16, fp16 or e4m3. The Hq / Hkv query heads of several tokens share a program, padded to a
tensor-core tile: all of them read keys and values once.

A tile's positions belong to the program's warps in equal parts (a product of three dimensions, the
first of which is the warp): each warp has a maximum, a weight and a sum of its own until the end,
so that tiles need no exchange between warps. With more than 16 rows such sums exceed the registers;
then the warps share them. The pages of a tile are read one tile ahead: its keys and values are then
loads without a load before them, which the compiler starts early.

Split over the context: several programs a head take equal runs of tiles. A split that is alone
writes the result; otherwise each leaves its sum, maximum and weight in a scratch buffer, and the
one that arrives last adds them up in order: one launch, no float atomics, the same bits each run.

Keys and values are loaded after the wait for the kernel ahead: it writes the newest position of
every sequence of the step, and a sequence that shares a full block may read another's. Those of a
program's first tile come into L2 before it, ahead of the next kernel's weights.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.attention.launches import (
    launch_for,
    stream_for,
    streams,
    tokens_per_program,
)
from oss_fused.kernels.attention.pages import load_pages, positions_in_a_page
from oss_fused.kernels.attention.splits import Splits, gather, leave
from oss_fused.kernels.attention.tiles import LEAST, attend, prefetch_tile
from oss_fused.kernels.cache import Heads, paged_cache
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import (
    pdl_options,
    runs_gluon,
    shared_memory,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.numerics import INTERPRETED, round_to

_LOG2E = tl.constexpr(1.4426950408889634)
# sums that fit the registers of one warp: of 16 rows of 128 columns
_WARP_SUMS = 16 * 128
# splits that are read together: each is code of its own, of which 128 took minutes to compile
_MOST_AT_ONCE = 16
# shared memory beside keys and values: queries and weights of a tile of 64 rows
_OTHER_BYTES = 32 * 1024


class Rows(NamedTuple):
    """A tensor [T, Hq, D] with unit stride along D, as one kernel argument."""

    data: Any
    row_stride: Any
    head_stride: Any


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
def head_pointers(tensor, rows, heads, columns):
    offsets = rows * tensor.row_stride + heads * tensor.head_stride
    return tensor.data + (offsets[:, None] + columns[None])


@triton.jit
def logit_scale(softmax_scale, scales):
    """What the products of codes are multiplied with; logits are powers of two."""
    scale = softmax_scale * _LOG2E
    if scales.q is not None:
        scale *= tl.load(scales.q)
    if scales.k is not None:
        scale *= tl.load(scales.k)
    return scale


@triton.jit
def _sinks_of(sinks, head, tokens, LANES: tl.constexpr, GROUP: tl.constexpr):
    """The sink of each row of a program's tile [LANES], 0 for padding; None without sinks."""
    sink = None
    if sinks is not None:
        lanes = tl.arange(0, LANES)
        sink = tl.load(sinks + head * GROUP + lanes % GROUP, mask=lanes < tokens * GROUP, other=0.0)
    return sink


@triton.jit
def _normalize(best, total, acc, sink, v_scale):
    """The weighted mean; a sink takes its share of the weight."""
    if sink is not None:
        sink = sink.to(tl.float32) * _LOG2E
        new_best = tl.maximum(best, sink, propagate_nan=tl.PropagateNan.ALL)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.exp2(sink - new_best)
        acc = acc * shrink[:, None]
    # a padding row has no position: its result is 0, not 0 / 0
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= v_scale
    return result


@triton.jit
def _finish(
    out,
    best,
    total,
    acc,
    sink,
    v_scale,
    head,
    row,
    tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Divide by the weights and store the rows of a program's tokens."""
    lanes, columns = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    in_group = lanes < tokens * GROUP
    heads, rows = head * GROUP + lanes % GROUP, row + lanes // GROUP
    result = _normalize(best, total, acc, sink, v_scale)
    mask = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    pointers = head_pointers(out, rows, heads, columns)
    tl.store(pointers, round_to(result, pointers.dtype.element_ty), mask=mask)


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
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
    SINGLE: tl.constexpr,
    TILES_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
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
    table = block_table + sequence * table_stride
    pages = load_pages(table, begin, end, keys.page_size, BLOCK_N, WARPS, RUN)
    # L2 misses no write: the kernel ahead may still write keys and values that come into it
    prefetch_tile(keys, values, head, pages, begin, end, HEAD_DIM, BLOCK_N, WARPS, RUN)
    scale = logit_scale(softmax_scale, scales)
    sink = _sinks_of(sinks, head, tokens, BLOCK_G, GROUP)
    v_scale = None if scales.v is None else tl.load(scales.v)
    if HEAD_DIM <= 64:
        start_next()
    wait_for_inputs()
    mask_q = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    best, total, acc = attend(
        head_pointers(query, rows, heads, columns),
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
        HEAD_DIM,
        WINDOW,
        BLOCK_N,
        WARPS,
        RUN,
        SINGLE,
        TILES_FIRST,
        PAIRS,
        DTYPE,
    )
    if active == 1:
        _finish(out, best, total, acc, sink, v_scale, head, row, tokens, GROUP, HEAD_DIM)
    else:
        slot = tl.program_id(0).to(tl.int64) * HEADS + head
        of_rows = _sinks_of(sinks, head, tokens, ROWS, GROUP)
        if leave(splits, slot, best, total, acc, in_group, ROWS) == active - 1:
            used = tl.arange(0, ROWS) < tokens * GROUP
            most, whole, sums = gather(splits, slot, active, used, BLOCK_D, AT_ONCE, LEAST)
            _finish(out, most, whole, sums, of_rows, v_scale, head, row, tokens, GROUP, HEAD_DIM)


def dot_dtype(query: torch.Tensor, out: torch.Tensor) -> tl.dtype:
    # the interpreter multiplies bf16 tiles as if they were integers
    if INTERPRETED.value:
        return tl.float32
    # float16 holds every e4m3 number, and weights up to 1 with more bits than bfloat16
    return tl.float16 if query.dtype == FP8 or out.dtype == torch.float16 else tl.bfloat16


def _stages(wanted: int, tile_bytes: int, device: torch.device) -> int:
    """As many stages as fit; a tile of keys and values is ready while others are on their way."""
    return min(wanted, 1 + (shared_memory(device) - _OTHER_BYTES) // tile_bytes)


def _has_pairs(values: torch.Tensor) -> bool:
    """Whether two columns of an e4m3 cache are always one aligned word."""
    numbers = (values.shape[3], *values.stride()[:3], values.data_ptr())
    return values.dtype == FP8 and not any(number % 2 for number in numbers)


def _scratch(arrivals: torch.Tensor, grid: tuple[int, int, int], rows: int, block_d: int) -> Splits:
    """Room for what the splits of ``grid`` leave; none where a split is alone."""
    shape = (math.prod(grid) if grid[2] > 1 else 0, rows)
    sums = arrivals.new_empty((*shape, block_d), dtype=torch.float32)
    stats = arrivals.new_empty((*shape, 2), dtype=torch.float32)
    return Splits(arrivals, sums, stats)


def _fits_tma(tensor: torch.Tensor) -> bool:
    """Whether TMA copies 16-bit boxes of ``tensor``: it and its strides begin on 16 bytes."""
    strides = tensor.stride()[:-1]
    return tensor.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides)


def _streams(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, window: int
) -> bool:
    """Whether stream.py takes one query per sequence, of a cache without scales."""
    rows, q_heads, head_dim = query.shape
    pages, page_size, heads, _ = keys.shape
    return (
        runs_gluon(query.device)
        and query.dtype == keys.dtype == out.dtype
        and pages > 0
        and streams(rows, heads, q_heads // heads, head_dim, window, page_size)
        and all(_fits_tma(tensor) for tensor in (query, keys, values))
    )


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
    one_each = query_starts is None and q_scale is k_scale is v_scale is None
    if one_each and _streams(query, key_cache, value_cache, out, window):
        # late: another Triton may lack Gluon
        from oss_fused.kernels.attention.stream import decode_stream

        cache = (query, key_cache, value_cache, block_table, seq_lens, out)
        how = stream_for(head_dim, rows * key_cache.shape[2])
        decode_stream(*cache, softmax_scale, window, sinks, prefetch_table, how)
        return
    heads, group = key_cache.shape[2], q_heads // key_cache.shape[2]
    tokens = tokens_per_program(max_query_len, group, head_dim)
    chunks = cdiv(max_query_len, tokens)
    positions = block_table.shape[1] * key_cache.shape[1]
    fp8 = key_cache.dtype == FP8
    launch = launch_for(sequences * chunks, heads, head_dim, fp8, window, positions)
    in_tile = next_power_of_2(tokens * group)
    block_g, block_d = max(16, in_tile), max(16, next_power_of_2(head_dim))
    # the only tile of a short window belongs to all warps: nothing is exchanged but its logits
    single = 0 < window <= launch.block_n - tokens + 1
    apart = not single and block_g * block_d <= _WARP_SUMS
    warps = launch.warps if apart else 1
    if not apart:
        # 64 rows of queries are a warpgroup's
        launch = launch._replace(block_n=max(64, launch.block_n), warps=max(4, launch.warps))
    tile_bytes = 2 * launch.block_n * block_d * key_cache.element_size()
    grid = (sequences * chunks, heads, launch.splits)
    _decode_attention_kernel[grid](
        Rows(query, query.stride(0), query.stride(1)),
        paged_cache(key_cache, constant=True),
        paged_cache(value_cache, constant=True),
        block_table,
        seq_lens,
        query_starts,
        Rows(out, out.stride(0), out.stride(1)),
        _scratch(arrivals, grid, in_tile, block_d),
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
        ROWS=in_tile,
        # 64 values of each thread
        AT_ONCE=max(1, min(_MOST_AT_ONCE, 2048 * launch.warps // (in_tile * block_d))),
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_N=launch.block_n,
        WARPS=warps,
        RUN=positions_in_a_page(window, key_cache.shape[1], launch.block_n // warps),
        SINGLE=single,
        TILES_FIRST=launch.tiles_first and tokens == 1,
        PAIRS=_has_pairs(value_cache),
        DTYPE=dot_dtype(query, out),
        PREFETCH=prefetch_table,
        num_warps=launch.warps,
        num_stages=_stages(launch.stages, tile_bytes, query.device),
        **pdl_options(query.device),
    )
