# SPDX-License-Identifier: MIT
"""Attention of prompts in layers with a short sliding window, over a paged KV cache; one launch.

A program takes TOKENS queries in a row of one sequence and all query heads of a KV head. They see
WINDOW + TOKENS - 1 positions in a row, which the program reads once, in two tiles: logits of both
are in registers before the one softmax. Positions are counted from the first one that the first
query sees, rounded down to a multiple of ALIGN, so that ALIGN positions in a row have one page.
Which tile needs a comparison with the window's begin, and which with the query's own position, is
then known when the kernel is compiled. Positions before the sequence's begin or behind the last
query are not read.

The grid counts blocks of TOKENS queries over all sequences, one more per sequence than needed at
most; a program finds its sequence in ``query_starts``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.attention.pages import load_as
from oss_fused.kernels.attention.tiles import LEAST
from oss_fused.kernels.attention.triton import Rows, dot_dtype, head_pointers, logit_scale
from oss_fused.kernels.cache import Heads, paged_cache
from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import round_to

_LOG2E = tl.constexpr(1.4426950408889634)


class WindowTile(NamedTuple):
    """Query rows of a program (tokens times heads of a group), its warps, a thread's registers.

    With 128 registers a multiprocessor holds four programs: some compute while others load. The
    limit holds for up to 64 rows and heads of up to 128 values.
    """

    rows: int = 64
    warps: int = 4
    registers: int | None = 128


@triton.jit
def _find_sequence(query_starts, sequences, block, TOKENS: tl.constexpr):
    """The sequence of a block: the last whose first block is not behind it."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle) // TOKENS + middle
        low = tl.where(first <= block, middle, low)
        high = tl.where(first <= block, high, middle)
    return low


@triton.jit
def _load_positions(
    cache,
    head,
    table,
    start,
    end,
    POSITIONS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows [POSITIONS, BLOCK_D] of a cache from position ``start``; 0 outside of [0, end)."""
    runs = start + tl.arange(0, POSITIONS // ALIGN) * ALIGN
    held = (runs >= 0) & (runs < end)
    pages = tl.load(table + runs // cache.page_size, mask=held, other=0)
    pages = tl.broadcast_to(pages[:, None], POSITIONS // ALIGN, ALIGN)
    # reshaped before strides multiply it: the compiler then knows that rows are aligned
    pages = tl.reshape(pages, POSITIONS).to(tl.int64)
    positions = start + tl.arange(0, POSITIONS)
    rows = pages * cache.block_stride + positions % cache.page_size * cache.page_stride
    columns = tl.arange(0, BLOCK_D)
    first = cache.data + head.to(tl.int64) * cache.head_stride
    pointers = first + columns[None, :] + rows[:, None]
    inside = ((positions >= 0) & (positions < end))[:, None] & (columns < HEAD_DIM)[None, :]
    return load_as(pointers, inside, DTYPE)


@triton.jit
def _logits(
    q,
    k,
    start,
    last,
    FIRST: tl.constexpr,
    SLACK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Products of queries and keys of a tile; -inf where a query does not see the position.

    A query sees WINDOW positions up to ``last``. FIRST: of the tile, counted from the program's
    first position, behind which the last query's window begins by SLACK at most.
    """
    logits = tl.dot(q, tl.trans(k))
    position = (start + tl.arange(0, k.shape[0]))[None, :]
    if FIRST < SLACK:
        logits = tl.where(position > last - WINDOW, logits, float("-inf"))
    if FIRST + k.shape[0] > WINDOW:
        logits = tl.where(position <= last, logits, float("-inf"))
    if start < 0:
        # before the begin of the sequence
        logits = tl.where(position >= 0, logits, float("-inf"))
    return logits


@triton.jit
def _softmax(logits0, logits1, scale, sinks, heads, in_group):
    """Weights of both tiles before they are divided, and their sums per query, with its sink."""
    # finite, because a row of padding may see nothing
    best = tl.maximum(tl.maximum(tl.max(logits0, 1), tl.max(logits1, 1)) * scale, LEAST)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * _LOG2E
        best = tl.maximum(best, sink, propagate_nan=tl.PropagateNan.ALL)
    weights0 = tl.exp2(logits0 * scale - best[:, None])
    weights1 = tl.exp2(logits1 * scale - best[:, None])
    total = tl.sum(weights0, 1) + tl.sum(weights1, 1)
    if sinks is not None:
        total += tl.exp2(sink - best)
    return weights0, weights1, total


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def _window_attention_kernel(
    query,
    keys,
    values,
    block_table,
    seq_lens,
    query_starts,
    out,
    sinks,
    scales,
    softmax_scale,
    sequences,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """EARLY and LATE: positions of the two tiles."""
    SLACK: tl.constexpr = TOKENS + ALIGN - 2
    start_next()
    wait_for_inputs()
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = _find_sequence(query_starts, sequences, block, TOKENS)
    begin = tl.load(query_starts + sequence)
    before = (block - (begin // TOKENS + sequence)) * TOKENS
    count = tl.load(query_starts + sequence + 1) - begin
    if before >= count:
        return
    tokens = tl.minimum(count - before, TOKENS)
    position = tl.load(seq_lens + sequence) - count + before
    lanes, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_group = lanes < tokens * GROUP
    heads = head * GROUP + lanes % GROUP
    rows = (begin + before).to(tl.int64) + lanes // GROUP
    mask_q = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    q = load_as(head_pointers(query, rows, heads, columns), mask_q, DTYPE)
    table = block_table + sequence.to(tl.int64) * table_stride
    end, last = position + tokens, (position + lanes // GROUP)[:, None]
    # ALIGN is a power of two: rounded down also below 0
    first = (position + 1 - WINDOW) & -ALIGN
    late = first + EARLY
    k0 = _load_positions(keys, head, table, first, end, EARLY, BLOCK_D, HEAD_DIM, ALIGN, DTYPE)
    k1 = _load_positions(keys, head, table, late, end, LATE, BLOCK_D, HEAD_DIM, ALIGN, DTYPE)
    v0 = _load_positions(values, head, table, first, end, EARLY, BLOCK_D, HEAD_DIM, ALIGN, DTYPE)
    v1 = _load_positions(values, head, table, late, end, LATE, BLOCK_D, HEAD_DIM, ALIGN, DTYPE)
    logits0 = _logits(q, k0, first, last, 0, SLACK, WINDOW)
    logits1 = _logits(q, k1, late, last, EARLY, SLACK, WINDOW)
    scale = logit_scale(softmax_scale, scales)
    weights0, weights1, total = _softmax(logits0, logits1, scale, sinks, heads, in_group)
    acc = tl.dot(round_to(weights0, DTYPE), v0)
    acc = tl.dot(round_to(weights1, DTYPE), v1, acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if scales.v is not None:
        result *= tl.load(scales.v)
    pointers = head_pointers(out, rows, heads, columns)
    tl.store(pointers, round_to(result, pointers.dtype.element_ty), mask=mask_q)


def window_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    config: WindowTile | None = None,
) -> None:
    """Softmax attention into ``out``; see kernels/attention for the contract."""
    rows, q_heads, head_dim = query.shape
    sequences, heads = query_starts.shape[0] - 1, key_cache.shape[2]
    if rows == 0 or sequences == 0:
        return
    tile = config or WindowTile()
    group, page_size = q_heads // heads, key_cache.shape[1]
    width = max(16, next_power_of_2(head_dim))
    tokens = max(1, tile.rows // next_power_of_2(group))
    if width > 128:
        # shared memory does not hold the keys and values that more tokens see
        tokens = min(tokens, 32)
    align = math.gcd(page_size, 16)
    lanes = max(16, next_power_of_2(tokens * group))
    # products of more rows or wider heads need more registers than the limit leaves
    limited = lanes <= 64 and width <= 128
    _window_attention_kernel[(rows // tokens + sequences, heads)](
        Rows(query, query.stride(0), query.stride(1)),
        paged_cache(key_cache, constant=True),
        paged_cache(value_cache, constant=True),
        block_table,
        seq_lens,
        query_starts,
        Rows(out, out.stride(0), out.stride(1)),
        sinks,
        Heads(q_scale, k_scale, v_scale),
        softmax_scale,
        sequences,
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=window,
        TOKENS=tokens,
        ALIGN=align,
        # together WINDOW + TOKENS + ALIGN - 2 positions or more
        EARLY=max(16, next_power_of_2(window)),
        LATE=max(16, next_power_of_2(tokens + align - 2)),
        BLOCK_M=lanes,
        BLOCK_D=width,
        DTYPE=dot_dtype(query, out),
        num_warps=tile.warps,
        maxnreg=tile.registers if limited else None,
        **pdl_options(query.device),
    )
