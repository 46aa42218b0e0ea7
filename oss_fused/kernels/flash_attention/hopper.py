# SPDX-License-Identifier: MIT
"""Attention forward for Hopper in Gluon: one warp loads keys and values, others multiply.

A CTA has a block of queries of one head. Each consumer (four warps) keeps 64 of its rows in the
tensor cores' registers and walks over all keys of the block. It asks for the logits of the next
keys and for the product with the last values at once, and computes exponentials while the second
runs. The consumers take turns at asking, so that the exponentials of one lie beside the products
of another (https://arxiv.org/abs/2407.08608). Sums of weights stay apart for eight columns until
the end: they need no exchange between threads.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.flash_attention.hopper_tile import (
    OTHER_BYTES,
    ROWS_EACH,
    box_descriptor,
    buffers_of,
    columns_of,
    flat,
    key_blocks,
    make_turns,
)
from oss_fused.kernels.flash_attention.tile import LN2, LOG2E
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.pipeline import (
    barriers_of,
    copy_box,
    next_slot,
    ring_stages,
    store_tile,
    sums_layout,
)

# keys of a block
_KEYS = 128
# columns whose sums of weights stay apart: those of a thread and of its three neighbours
_APART = gl.constexpr(8)


@gluon.jit
def _load(
    q_desc,
    k_desc,
    v_desc,
    ring,
    place,
    keys,
    CAUSAL: gl.constexpr,
):
    """The loading warp: the queries, then keys and values of each block once a slot is free."""
    rows, key_ring, value_ring, ready, k_full, k_empty, v_full, v_empty = ring
    b, h, group, first = place
    CONSUMERS: gl.constexpr = rows.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[3]
    STAGES: gl.constexpr = key_ring.type.shape[0]
    BLOCK_N: gl.constexpr = key_ring.type.shape[3]
    _full, blocks = key_blocks(first, keys, CAUSAL, CONSUMERS * ROWS, BLOCK_N)
    for part in gl.static_range(CONSUMERS):
        mbarrier.expect(ready.index(part), q_desc.block_type.nbytes)
        copy_box(q_desc, [b, h, first + part * ROWS, 0], ready.index(part), rows.index(part))
    kv = h // group
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for block in range(blocks):
        at = block * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        copy_box(k_desc, [b, kv, at, 0], k_full.index(slot), key_ring.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        copy_box(v_desc, [b, kv, at, 0], v_full.index(slot), value_ring.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _weigh(logits, best, scale, row, start, keys, EDGE: gl.constexpr, CAUSAL: gl.constexpr):
    """Weights of a tile of logits, their sums of every eighth column, the new maximum."""
    layout: gl.constexpr = logits.type.layout
    ROWS: gl.constexpr = logits.type.shape[0]
    BLOCK_N: gl.constexpr = logits.type.shape[1]
    if EDGE:
        n = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        seen = (n < keys)[None, :]
        if CAUSAL:
            m = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            seen = seen & (n[None, :] <= m[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_best = gl.maximum(best, gl.max(logits, 1) * scale)
    weights = gl.exp2(logits * scale - new_best[:, None])
    sums = gl.sum(weights.reshape([ROWS, BLOCK_N // _APART, _APART]), 1)
    return weights, sums, new_best


@gluon.jit
def _step(
    state,
    block,
    ring,
    turn,
    scale,
    row,
    keys,
    EDGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    PART: gl.constexpr,
    HOLD: gl.constexpr,
):
    """Logits of block ``block`` beside the product with the values of the block before."""
    acc, weights, sums, best, slot, phase = state
    rows, key_ring, value_ring, ready, k_full, k_empty, v_full, v_empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0]
    STAGES: gl.constexpr = key_ring.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[3]
    BLOCK_N: gl.constexpr = key_ring.type.shape[3]
    layout: gl.constexpr = sums_layout(BLOCK_N, 16)
    before = slot
    before_phase = phase
    slot, phase = next_slot(slot, phase, STAGES)
    logits = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    mbarrier.wait(k_full.index(slot), phase)
    mbarrier.wait(turn.index(PART), block & 1 ^ 1)
    x = flat(rows.index(PART))
    logits = warpgroup_mma(
        x, flat(key_ring.index(slot)).permute((1, 0)), logits, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma(weights, flat(value_ring.index(before)), acc, is_async=True)
    mbarrier.arrive(turn.index((PART + 1) % CONSUMERS), count=1)
    logits = warpgroup_mma_wait(1, deps=[logits])
    mbarrier.arrive(k_empty.index(slot), count=1)
    weights_32, more, new_best = _weigh(
        logits, best, scale, row, block * BLOCK_N, keys, EDGE, CAUSAL
    )
    shrink = gl.exp2(best - new_best)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + more
    others = gl.convert_layout(weights_32.to(weights.dtype), weights.type.layout)
    # Exponentials come before the wait: it takes the weights, and a barrier that has long been
    # passed keeps the assembler from moving it up.
    if HOLD:
        mbarrier.wait(ready.index(PART), 0)
    acc, weights, others = warpgroup_mma_wait(0, deps=[acc, weights, others])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc_layout: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    return acc, others, sums, new_best, slot, phase


@gluon.jit
def _store(acc, sums, best, target, sizes, row):
    """Divide by the sums of weights and write a head's rows ``row`` and on."""
    out, row_max, row_sum = target
    head, queries, _keys, dim_v, _scale = sizes
    layout: gl.constexpr = best.type.layout
    total = gl.convert_layout(gl.sum(sums, 1), layout)
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))
    row0 = head.to(gl.int64) * queries
    store_tile(acc * inverse[:, None], out + row0 * dim_v, row, 0, queries, dim_v)
    m = row + gl.arange(0, acc.type.shape[0], layout)
    gl.store(row_max + row0 + m, best * LN2, mask=m < queries)
    gl.store(row_sum + row0 + m, total, mask=m < queries)


@gluon.jit
def _consume(
    ring,
    turn,
    target,
    place,
    sizes,
    CAUSAL: gl.constexpr,
    PART: gl.constexpr,
    HOLD: gl.constexpr,
):
    """ROWS queries against all keys that the CTA's queries see."""
    _b, _h, _group, first = place
    _head, _queries, keys, _dim_v, scale = sizes
    rows, key_ring, value_ring, ready, k_full, k_empty, v_full, _v_empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[3]
    BLOCK_N: gl.constexpr = key_ring.type.shape[3]
    BLOCK_D: gl.constexpr = value_ring.type.shape[4]
    layout: gl.constexpr = sums_layout(BLOCK_N, 16)
    acc_layout: gl.constexpr = sums_layout(BLOCK_D, 16)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    DTYPE: gl.constexpr = rows.dtype
    full, blocks = key_blocks(first, keys, CAUSAL, CONSUMERS * ROWS, BLOCK_N)
    row = first + PART * ROWS
    scale = scale * LOG2E
    mbarrier.wait(ready.index(PART), 0)
    mbarrier.wait(k_full.index(0), 0)
    logits = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    logits = warpgroup_mma(
        flat(rows.index(PART)),
        flat(key_ring.index(0)).permute((1, 0)),
        logits,
        use_acc=False,
        is_async=True,
    )
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(k_empty.index(0), count=1)
    best = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    weights_32, sums, best = _weigh(logits, best, scale, row, 0, keys, True, CAUSAL)
    weights = gl.convert_layout(weights_32.to(DTYPE), weight_layout)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=acc_layout)
    state = (acc, weights, sums, best, gl.to_tensor(0), gl.to_tensor(0))
    for block in range(1, full):
        state = _step(state, block, ring, turn, scale, row, keys, False, CAUSAL, PART, HOLD)
    for block in range(gl.maximum(full, 1), blocks):
        state = _step(state, block, ring, turn, scale, row, keys, True, CAUSAL, PART, HOLD)
    acc, weights, sums, best, slot, phase = state
    mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma(weights, flat(value_ring.index(slot)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _store(acc, sums, best, target, sizes, row)


@gluon.jit
def _make_ring(q_desc, k_desc, v_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers of queries, keys and values; barriers between the loading warp and the consumers."""
    rows = buffers_of(q_desc, CONSUMERS)
    keys = buffers_of(k_desc, STAGES)
    values = buffers_of(v_desc, STAGES)
    ready = barriers_of(CONSUMERS, 1)
    k_full = barriers_of(STAGES, 1)
    k_empty = barriers_of(STAGES, CONSUMERS)
    v_full = barriers_of(STAGES, 1)
    v_empty = barriers_of(STAGES, CONSUMERS)
    return rows, keys, values, ready, k_full, k_empty, v_full, v_empty


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def _flash_attention_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out,
    row_max,
    row_sum,
    heads,
    group,
    queries,
    keys,
    dim_v,
    scale,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HOLD: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    ring = _make_ring(q_desc, k_desc, v_desc, STAGES, CONSUMERS)
    turn = make_turns(CONSUMERS)
    head = gl.program_id(0)
    # causal: the blocks with most keys come first
    block = gl.num_programs(1) - 1 - gl.program_id(1) if CAUSAL else gl.program_id(1)
    place = (head // heads, head % heads, group, block * (CONSUMERS * ROWS))
    sizes = (head, queries, keys, dim_v, scale)
    target = (out, row_max, row_sum)
    loads = (q_desc, k_desc, v_desc, ring, place, keys, CAUSAL)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, turn, target, place, sizes, CAUSAL, 0, HOLD)),
                (_consume, (ring, turn, target, place, sizes, CAUSAL, 1, HOLD)),
                (_load, loads),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, turn, target, place, sizes, CAUSAL, 0, HOLD)),
                (_consume, (ring, turn, target, place, sizes, CAUSAL, 1, HOLD)),
                (_consume, (ring, turn, target, place, sizes, CAUSAL, 2, HOLD)),
                (_load, loads),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Fill ``out``, ``row_max`` and ``row_sum``; see kernels/flash_attention."""
    batch, heads, queries, _ = q.shape
    keys, dim_v = v.shape[2:]
    columns, columns_v = columns_of(q), columns_of(v)
    # sums of three consumers fit the registers for heads of 64
    consumers = 3 if columns == columns_v == 64 else 2
    held = consumers * ROWS_EACH * columns * 2
    stages = ring_stages(2 * _KEYS * (columns + columns_v), held + OTHER_BYTES, 4)
    grid = (batch * heads, cdiv(queries, consumers * ROWS_EACH))
    _flash_attention_hopper_kernel[grid](
        box_descriptor(q, ROWS_EACH),
        box_descriptor(k, _KEYS),
        box_descriptor(v, _KEYS),
        out,
        row_max,
        row_sum,
        heads,
        heads // k.shape[1],
        queries,
        keys,
        dim_v,
        scale,
        CAUSAL=causal,
        STAGES=stages,
        CONSUMERS=consumers,
        # with less room for registers it spills
        HOLD=consumers == 2,
        REGISTERS=240 if consumers == 2 else 160,
        num_warps=4,
    )
