# SPDX-License-Identifier: MIT
"""Decode attention of large batches in Gluon: one warp loads, four others multiply.

For batches that fill the GPU with whole sequences. A persistent program takes pairs of a sequence
and a KV head, one after the other. One warp copies queries, keys and values by TMA into a ring of
shared memory, tile after tile and beyond the end of a sequence, so that memory never waits for a
product or for a page number. The other four compute

    logits [positions, 8] = keys @ queries^T,    sums [D, 8] += values^T @ weights [positions, 8]

The few query heads of a KV head are the narrow side, so that no tile is padded to 64 rows of them.

A box has the 16 positions of a run, which lies in one page. The first run that a window sees and
the last one of a sequence are shifted, so that the positions that do not count lie outside of the
run: TMA reads nothing there and writes zeros. A run behind the end is shifted out altogether. So
every tile has the same bytes, and whatever the cache holds in free slots never enters the product.
A run that is cut off at both ends would need two shifts: windows have at least 16 positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.attention.launches import MOST_GROUP, RUN, Stream, registers_of
from oss_fused.kernels.launch import (
    multiprocessors,
    pdl_options,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.pipeline import (
    barriers_of,
    boxes_of,
    copy_box,
    meet,
    next_slot,
    sums_layout,
    view_as,
)

_LOG2E = gl.constexpr(1.4426950408889634)
# below every logit; finite, because a sequence may have no position
_LEAST = gl.constexpr(-3.4028234663852886e38)
# positions above which a program has one tile less under way: memory reads up to 1.5 % faster then
_LONG = gl.constexpr(512)
# 16-bit columns of 128 bytes, the widest box that TMA swizzles
_COLUMNS = 64


class _Shape(NamedTuple):
    """What the kernel is compiled for; positions of a tile and a page, heads of a sequence."""

    heads: int
    group: int
    head_dim: int
    window: int
    page_size: int
    tile: int
    run: int
    columns: int


@gluon.jit
def _length_of(seq_lens, item, items, SHAPE: gl.constexpr):
    """Positions of the sequence of ``item``; 0 behind the last one."""
    return gl.load(seq_lens + item // SHAPE.heads, mask=item < items, other=0)


@gluon.jit
def _span(length, SHAPE: gl.constexpr):
    """First position that counts, and the first one of its run."""
    begin = gl.maximum(length - SHAPE.window, 0) if SHAPE.window > 0 else length * 0
    return begin, begin // SHAPE.run * SHAPE.run


@gluon.jit
def _shift(start, begin, end, SHAPE: gl.constexpr):
    """By how much the box of the run from ``start`` on leaves out what is not in [begin, end)."""
    return gl.maximum(begin - start, 0) + gl.minimum(end - SHAPE.run - start, 0)


@gluon.jit
def _pages_of(row, start, end, SHAPE: gl.constexpr, COUNT: gl.constexpr):
    """Pages of the COUNT runs from ``start`` on; 0 from ``end`` on. ``row`` of the block table."""
    page = gl.load(row + start // SHAPE.page_size, mask=start < end, other=0)
    if COUNT == 1:
        return (page,)
    else:
        # Triton knows no starred expression
        return (page,) + _pages_of(row, start + SHAPE.run, end, SHAPE, COUNT - 1)  # noqa: RUF005


@gluon.jit
def _request(descs, ring, slot, place, pages, start, begin, end, SHAPE: gl.constexpr):
    """Queries, keys and values of the tile from ``start`` on, into ``slot``."""
    q_desc, k_desc, v_desc = descs
    q_boxes, k_boxes, v_boxes, full, _empty = ring
    sequence, head = place
    RUNS: gl.constexpr = SHAPE.tile // SHAPE.run
    HALVES: gl.constexpr = SHAPE.head_dim // SHAPE.columns
    OF_RUN: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    ready = full.index(slot)
    mbarrier.expect(ready, HALVES * (q_desc.block_type.nbytes + RUNS * OF_RUN))
    for half in gl.static_range(HALVES):
        at = slot * HALVES + half
        column = half * SHAPE.columns
        copy_box(q_desc, [sequence, head * SHAPE.group, column], ready, q_boxes.index(at))
    for run in gl.static_range(RUNS):
        first = start + run * SHAPE.run
        part = first % SHAPE.page_size // SHAPE.run
        row = _shift(first, begin, end, SHAPE)
        for half in gl.static_range(HALVES):
            at = (slot * HALVES + half) * RUNS + run
            corner = [pages[run], head, part, row, half * SHAPE.columns]
            copy_box(k_desc, corner, ready, k_boxes.index(at))
            copy_box(v_desc, corner, ready, v_boxes.index(at))


@gluon.jit
def _warm(descs, ring, warm, SHAPE: gl.constexpr):
    """Have the descriptors in their cache: boxes outside of the tensors read no input."""
    q_desc, k_desc, v_desc = descs
    q_boxes, k_boxes, v_boxes, _full, _empty = ring
    OF_RUN: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    mbarrier.expect(warm, q_desc.block_type.nbytes + OF_RUN)
    copy_box(q_desc, [0, 0, SHAPE.head_dim], warm, q_boxes.index(0))
    copy_box(k_desc, [0, 0, 0, SHAPE.run, 0], warm, k_boxes.index(0))
    copy_box(v_desc, [0, 0, 0, SHAPE.run, 0], warm, v_boxes.index(0))
    mbarrier.wait(warm, 0)


@gluon.jit
def _load(descs, ring, warm, table, work, SHAPE: gl.constexpr, PREFETCH: gl.constexpr):
    """The loading warp: every tile of every item of this program, as soon as a slot is free.

    Page numbers and lengths are read one tile and one item ahead.
    """
    RUNS: gl.constexpr = SHAPE.tile // SHAPE.run
    block_table, table_stride = table
    seq_lens, items = work
    empty = ring[4]
    STAGES: gl.constexpr = empty.type.shape[0]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    wait_unless(PREFETCH)
    end = _length_of(seq_lens, gl.program_id(0), items, SHAPE)
    begin, first = _span(end, SHAPE)
    row = block_table + (gl.program_id(0) // SHAPE.heads).to(gl.int64) * table_stride
    pages = _pages_of(row, first, end, SHAPE, RUNS)
    _warm(descs, ring, warm, SHAPE)
    if SHAPE.head_dim <= 64:
        start_next()
    wait_for_inputs()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        behind = item + gl.num_programs(0)
        next_end = _length_of(seq_lens, behind, items, SHAPE)
        sequence = item // SHAPE.heads
        row = block_table + sequence.to(gl.int64) * table_stride
        begin, first = _span(end, SHAPE)
        for start in range(first, end, SHAPE.tile):
            free, free_phase = slot, phase
            if STAGES > 2 and end - first > _LONG:
                free, free_phase = next_slot(slot, phase, STAGES)
            mbarrier.wait(empty.index(free), free_phase)
            place = (sequence, item % SHAPE.heads)
            _request(descs, ring, slot, place, pages, start, begin, end, SHAPE)
            if SHAPE.head_dim > 64:
                # behind the first request: the next kernels' weights would come before it
                start_next()
            pages = _pages_of(row, start + SHAPE.tile, end, SHAPE, RUNS)
            slot, phase = next_slot(slot, phase, STAGES)
        end = next_end
        _begin, first = _span(end, SHAPE)
        row = block_table + (behind // SHAPE.heads).to(gl.int64) * table_stride
        pages = _pages_of(row, first, end, SHAPE, RUNS)


@gluon.jit
def _weigh(logits, best, sums, start, begin, end, SHAPE: gl.constexpr):
    """Weights of a tile, what earlier ones shrink by, the new maximum and sums of weights."""
    rows = gl.arange(0, SHAPE.tile, gl.SliceLayout(1, logits.type.layout))
    inside = rows % SHAPE.run
    # where the loading warp's box has this row, in its run
    place = inside + _shift(start + rows - inside, begin, end, SHAPE)
    seen = (place >= 0) & (place < SHAPE.run)
    logits = gl.where(seen[:, None], logits, float("-inf"))
    new_best = gl.maximum(best, gl.max(logits, 0))
    weights = gl.exp2(logits - new_best[None, :])
    shrink = gl.exp2(best - new_best)
    return weights, shrink, new_best, sums * shrink[None, :] + weights


@gluon.jit
def _attend(ring, views, weights_buffer, slot, phase, span, scale, SHAPE: gl.constexpr):
    """Maximum, weights and weighted sums of an item's positions; the ring's next slot, phase."""
    queries, keys, values = views
    begin, first, end = span
    full, empty = ring[3], ring[4]
    STAGES: gl.constexpr = full.type.shape[0]
    TILE: gl.constexpr = SHAPE.tile
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    HEADS: gl.constexpr = queries.type.shape[1]
    layout: gl.constexpr = sums_layout(HEADS, 16)
    best = gl.full([HEADS], _LEAST, gl.float32, layout=gl.SliceLayout(0, layout))
    sums = gl.zeros([TILE, HEADS], gl.float32, layout=layout)
    acc = gl.zeros([HEAD_DIM, HEADS], gl.float32, layout=layout)
    zeros = gl.zeros([TILE, HEADS], gl.float32, layout=layout)
    for start in range(first, end, TILE):
        mbarrier.wait(full.index(slot), phase)
        q = queries.index(slot).permute((1, 0))
        logits = warpgroup_mma(keys.index(slot), q, zeros, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits]) * scale
        weights, shrink, best, sums = _weigh(logits, best, sums, start, begin, end, SHAPE)
        weights_buffer.permute((1, 0)).store(weights.to(weights_buffer.dtype))
        fence_async_shared()
        # the tensor cores read what all four warps have stored
        meet()
        v = values.index(slot).permute((1, 0))
        acc = acc * shrink[None, :]
        acc = warpgroup_mma(v, weights_buffer.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    return best, gl.sum(sums, 0), acc, slot, phase


@gluon.jit
def _consume(ring, views, weights_buffer, out, sinks, work, softmax_scale, SHAPE: gl.constexpr):
    """The multiplying warps: every item of this program, from its first tile to its result."""
    seq_lens, items = work
    data, row_stride, head_stride = out
    HEADS: gl.constexpr = weights_buffer.type.shape[0]
    layout: gl.constexpr = sums_layout(HEADS, 16)
    lanes = gl.arange(0, HEADS, gl.SliceLayout(0, layout))
    columns = gl.arange(0, SHAPE.head_dim, gl.SliceLayout(1, layout))
    in_group = lanes < SHAPE.group
    scale = softmax_scale * _LOG2E
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    end = _length_of(seq_lens, gl.program_id(0), items, SHAPE)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # read before they are needed: the next item's length, this one's sinks
        next_end = _length_of(seq_lens, item + gl.num_programs(0), items, SHAPE)
        sequence = (item // SHAPE.heads).to(gl.int64)
        heads = item % SHAPE.heads * SHAPE.group + lanes
        if sinks is not None:
            sink = gl.load(sinks + heads, mask=in_group, other=0.0).to(gl.float32) * _LOG2E
        begin, first = _span(end, SHAPE)
        best, total, acc, slot, phase = _attend(
            ring, views, weights_buffer, slot, phase, (begin, first, end), scale, SHAPE
        )
        if sinks is not None:
            new_best = gl.maximum(best, sink)
            shrink = gl.exp2(best - new_best)
            total = total * shrink + gl.exp2(sink - new_best)
            acc = acc * shrink[None, :]
        # a sequence without a position: its result is 0, not 0 / 0
        result = acc / gl.where(total == 0.0, 1.0, total)[None, :]
        target = data + sequence * row_stride + heads.to(gl.int64)[None, :] * head_stride
        mask = in_group[None, :] & (columns < SHAPE.head_dim)[:, None]
        gl.store(target + columns[:, None], result.to(data.dtype.element_ty), mask=mask)
        end = next_end


@gluon.jit
def _tiles_of(boxes, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Boxes as tiles [ROWS, COLUMNS], one of each stage: 64 columns of all rows, then the next."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return view_as(boxes, boxes.dtype, [STAGES, ROWS, COLUMNS], layout)


@gluon.jit(do_not_specialize=["table_stride", "items"])
def _attention_stream_kernel(
    q_desc,
    k_desc,
    v_desc,
    block_table,
    seq_lens,
    out,
    row_stride,
    head_stride,
    sinks,
    softmax_scale,
    table_stride,
    items,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    HEADS: gl.constexpr = q_desc.block_type.shape[1]
    HALVES: gl.constexpr = SHAPE.head_dim // SHAPE.columns
    RUNS: gl.constexpr = SHAPE.tile // SHAPE.run
    q_boxes = boxes_of(q_desc, STAGES * HALVES)
    k_boxes = boxes_of(k_desc, STAGES * HALVES * RUNS)
    v_boxes = boxes_of(v_desc, STAGES * HALVES * RUNS)
    views = (
        _tiles_of(q_boxes, STAGES, HEADS, SHAPE.head_dim),
        _tiles_of(k_boxes, STAGES, SHAPE.tile, SHAPE.head_dim),
        _tiles_of(v_boxes, STAGES, SHAPE.tile, SHAPE.head_dim),
    )
    weights = gl.allocate_shared_memory(
        v_desc.dtype, [HEADS, SHAPE.tile], gl.NVMMASharedLayout(128, 16)
    )
    ring = (q_boxes, k_boxes, v_boxes, barriers_of(STAGES, 1), barriers_of(STAGES, 1))
    target = (out, row_stride, head_stride)
    warm = barriers_of(1, 1).index(0)
    descs = (q_desc, k_desc, v_desc)
    table, work = (block_table, table_stride), (seq_lens, items)
    gl.warp_specialize(
        [
            (_consume, (ring, views, weights, target, sinks, work, softmax_scale, SHAPE)),
            (_load, (descs, ring, warm, table, work, SHAPE, PREFETCH)),
        ],
        [1],
        [64],
    )


def _cache_descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """Boxes of a run of one head of a cache [pages, page_size, Hkv, D]; zeros outside the run."""
    pages, page_size, heads, dim = cache.shape
    of_page, of_position, of_head, _ = cache.stride()
    layout = gl.NVMMASharedLayout(128, 16, rank=5)
    shape = [pages, heads, page_size // RUN, RUN, dim]
    strides = [of_page, of_head, RUN * of_position, of_position, 1]
    return TensorDescriptor(cache, shape, strides, [1, 1, 1, RUN, _COLUMNS], layout)


def _query_descriptor(query: torch.Tensor) -> TensorDescriptor:
    """Boxes of the query heads of one KV head, and some of the next where it has fewer."""
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    box = [1, MOST_GROUP, _COLUMNS]
    return TensorDescriptor(query, list(query.shape), list(query.stride()), box, layout)


def decode_stream(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: torch.Tensor | None,
    prefetch_table: bool,
    launch: Stream,
) -> None:
    """Attention of one query per sequence into ``out``, of arguments that triton.py chooses."""
    rows, q_heads, head_dim = query.shape
    _, page_size, heads, _ = key_cache.shape
    items = rows * heads
    shape = _Shape(heads, q_heads // heads, head_dim, window, page_size, launch.tile, RUN, _COLUMNS)
    _attention_stream_kernel[(min(items, multiprocessors(query.device) * launch.ctas),)](
        _query_descriptor(query),
        _cache_descriptor(key_cache),
        _cache_descriptor(value_cache),
        block_table,
        seq_lens,
        out,
        out.stride(0),
        out.stride(1),
        sinks,
        softmax_scale,
        block_table.stride(0),
        items,
        SHAPE=shape,
        STAGES=launch.stages,
        PREFETCH=prefetch_table,
        num_warps=4,
        maxnreg=registers_of(head_dim, launch),
        **pdl_options(query.device),
    )
