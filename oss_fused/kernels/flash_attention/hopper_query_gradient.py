# SPDX-License-Identifier: MIT
"""dQ of attention for Hopper in Gluon: one warp loads, two consumers (four warps each) multiply.

A consumer has 64 queries and walks over the keys that they see. The product of a block's dS with
its keys runs beside the logits of the next block. The consumers take turns as in hopper.py.
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
    columns_of,
    flat,
    key_blocks,
    load_block,
    load_held,
    make_blocks,
    make_held,
    make_turns,
)
from oss_fused.kernels.flash_attention.tile import LOG2E
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.pipeline import next_slot, ring_stages, store_tile, sums_layout


@gluon.jit
def _dq_load(descs, held, ring, place, keys, CAUSAL: gl.constexpr):
    q_desc, grad_desc, k_desc, v_desc = descs
    b, h, group, first = place
    STAGES: gl.constexpr = ring[0].type.shape[0]
    BLOCK_N: gl.constexpr = ring[0].type.shape[3]
    ROWS: gl.constexpr = held[0].type.shape[3]
    load_held(q_desc, grad_desc, held, b, h, first)
    _full, blocks = key_blocks(first, keys, CAUSAL, 2 * ROWS, BLOCK_N)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for block in range(blocks):
        load_block(k_desc, v_desc, ring, slot, phase, b, h // group, block * BLOCK_N)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _seen(logits, m, n, keys, CAUSAL: gl.constexpr):
    """Logits, -inf where hidden; m and n broadcast to the tile."""
    seen = n < keys
    if CAUSAL:
        seen = seen & (n <= m)
    return gl.where(seen, logits, float("-inf"))


@gluon.jit
def _dq_step(
    state,
    block,
    held,
    ring,
    turn,
    terms,
    scale,
    row,
    keys,
    FIRST: gl.constexpr,
    EDGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    PART: gl.constexpr,
):
    """dS of block ``block`` beside the product of the block before; the FIRST has none."""
    acc, d_logits, slot, phase = state
    log_sum, delta = terms
    qs, grads, ready = held
    ks, vs, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = ks.type.shape[0]
    ROWS: gl.constexpr = qs.type.shape[3]
    BLOCK_N: gl.constexpr = ks.type.shape[3]
    layout: gl.constexpr = sums_layout(BLOCK_N, 16)
    before = slot
    if not FIRST:
        slot, phase = next_slot(slot, phase, STAGES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    mbarrier.wait(k_full.index(slot), phase)
    mbarrier.wait(turn.index(PART), block & 1)
    y = flat(ks.index(slot)).permute((1, 0))
    logits = warpgroup_mma(flat(qs.index(PART)), y, zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), phase)
    y = flat(vs.index(slot)).permute((1, 0))
    d_weights = warpgroup_mma(flat(grads.index(PART)), y, zeros, use_acc=False, is_async=True)
    if not FIRST:
        acc = warpgroup_mma(d_logits, flat(ks.index(before)), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - PART), count=1)
    logits = warpgroup_mma_wait(1 if FIRST else 2, deps=[logits])
    if EDGE:
        n = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        m = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        logits = _seen(logits, m[:, None], n[None, :], keys, CAUSAL)
    weights = gl.exp2(logits * scale - log_sum[:, None])
    d_weights = warpgroup_mma_wait(0 if FIRST else 1, deps=[d_weights])
    wide = weights * (d_weights - delta[:, None])
    if not FIRST:
        mbarrier.wait(ready.index(PART), 0)
        acc, d_logits, wide = warpgroup_mma_wait(0, deps=[acc, d_logits, wide])
    others = gl.convert_layout(wide.to(d_logits.dtype), d_logits.type.layout)
    others = warpgroup_mma_wait(0, deps=[others])
    mbarrier.arrive(v_empty.index(slot), count=1)
    if not FIRST:
        mbarrier.arrive(k_empty.index(before), count=1)
    return acc, others, slot, phase


@gluon.jit
def _dq_consume(held, ring, turn, target, place, sizes, CAUSAL: gl.constexpr, PART: gl.constexpr):
    """dQ of 64 queries."""
    dq, log_sum, delta = target
    _b, _h, _group, first = place
    head, queries, keys, dim, scale = sizes
    qs, _grads, ready = held
    ks, _vs, _k_full, _k_empty, _v_full, _v_empty = ring
    ROWS: gl.constexpr = qs.type.shape[3]
    BLOCK_N: gl.constexpr = ks.type.shape[3]
    BLOCK_D: gl.constexpr = ks.type.shape[4]
    layout: gl.constexpr = sums_layout(BLOCK_N, 16)
    acc_layout: gl.constexpr = sums_layout(BLOCK_D, 16)
    full, blocks = key_blocks(first, keys, CAUSAL, 2 * ROWS, BLOCK_N)
    row = first + PART * ROWS
    row0 = head.to(gl.int64) * queries
    m = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row_log = gl.load(log_sum + row0 + m, mask=m < queries, other=float("inf"))
    row_delta = gl.load(delta + row0 + m, mask=m < queries, other=0.0)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=acc_layout)
    d_logits = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout).to(qs.dtype)
    d_logits = gl.convert_layout(d_logits, gl.DotOperandLayout(0, acc_layout, 2))
    state = (acc, d_logits, gl.to_tensor(0), gl.to_tensor(0))
    terms = (row_log, row_delta)
    step = scale * LOG2E
    mbarrier.wait(ready.index(PART), 0)
    state = _dq_step(
        state, gl.to_tensor(0), held, ring, turn, terms, step, row, keys, True, True, CAUSAL, PART
    )
    for block in range(1, full):
        state = _dq_step(
            state, block, held, ring, turn, terms, step, row, keys, False, False, CAUSAL, PART
        )
    for block in range(gl.maximum(full, 1), blocks):
        state = _dq_step(
            state, block, held, ring, turn, terms, step, row, keys, False, True, CAUSAL, PART
        )
    acc, d_logits, slot, _phase = state
    acc = warpgroup_mma(d_logits, flat(ks.index(slot)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_tile(acc * scale, dq + row0 * dim, row, 0, queries, dim)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def _dq_hopper_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    dq,
    log_sum,
    delta,
    heads,
    group,
    queries,
    keys,
    dim,
    scale,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    held = make_held(q_desc, grad_desc)
    ring = make_blocks(k_desc, v_desc, STAGES)
    turn = make_turns(2)
    head = gl.program_id(0)
    block = gl.num_programs(1) - 1 - gl.program_id(1) if CAUSAL else gl.program_id(1)
    place = (head // heads, head % heads, group, block * (2 * ROWS))
    sizes = (head, queries, keys, dim, scale)
    target = (dq, log_sum, delta)
    descs = (q_desc, grad_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (_dq_consume, (held, ring, turn, target, place, sizes, CAUSAL, 0)),
            (_dq_consume, (held, ring, turn, target, place, sizes, CAUSAL, 1)),
            (_dq_load, (descs, held, ring, place, keys, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


def query_gradient(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Fill dQ; ``terms``: ``log2(sum e^S)`` and ``rowsum(dO O)`` of each row."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = v.shape[1:3]
    both = 2 * (columns_of(q) + columns_of(v))
    # logits and their gradients of 128 keys fit the registers beside dQ of 64 columns
    block_n = 128 if both == 256 else 64
    held = 2 * ROWS_EACH * both + OTHER_BYTES
    _dq_hopper_kernel[(batch * heads, cdiv(queries, 2 * ROWS_EACH))](
        box_descriptor(q, ROWS_EACH),
        box_descriptor(grad, ROWS_EACH),
        box_descriptor(k, block_n),
        box_descriptor(v, block_n),
        dq,
        *terms,
        heads,
        heads // kv_heads,
        queries,
        keys,
        dim,
        scale,
        CAUSAL=causal,
        STAGES=ring_stages(block_n * both, held, 4),
        num_warps=4,
    )
