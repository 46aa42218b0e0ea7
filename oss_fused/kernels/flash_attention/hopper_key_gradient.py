# SPDX-License-Identifier: MIT
"""dK and dV of attention for Hopper in Gluon: one warp loads, two consumers multiply.

A consumer (four warps) has 64 keys and walks over the queries that see them, of every head that
shares them. Tiles are transposed, [keys, queries]: weights are operands in registers. The consumers
take turns as in hopper.py.
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
    load_block,
    load_held,
    make_blocks,
    make_held,
    make_turns,
)
from oss_fused.kernels.flash_attention.tile import LOG2E
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.pipeline import next_slot, ring_stages, store_tile, sums_layout

# queries of a block: the sums of both leave no registers for more
_QUERIES = 64


@gluon.jit
def _query_blocks(
    first, queries, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Blocks of queries: the first that sees any of the keys, the first that sees all, the end."""
    end = gl.cdiv(queries, BLOCK_M)
    begin = first * 0
    full = begin
    if CAUSAL:
        begin = gl.minimum(first // BLOCK_M, end)
        full = gl.minimum(gl.cdiv(first + BLOCK_N - 1, BLOCK_M), end)
    return begin, full, end


@gluon.jit
def _dkv_load(descs, held, ring, place, queries, CAUSAL: gl.constexpr):
    q_desc, grad_desc, k_desc, v_desc = descs
    b, kv, group, first = place
    STAGES: gl.constexpr = ring[0].type.shape[0]
    BLOCK_M: gl.constexpr = ring[0].type.shape[3]
    ROWS: gl.constexpr = held[0].type.shape[3]
    load_held(k_desc, v_desc, held, b, kv, first)
    begin, _full, end = _query_blocks(first, queries, CAUSAL, BLOCK_M, 2 * ROWS)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for member in range(group):
        for block in range(begin, end):
            at = block * BLOCK_M
            load_block(q_desc, grad_desc, ring, slot, phase, b, kv * group + member, at)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _dkv_step(
    state,
    block,
    held,
    ring,
    turn,
    terms,
    scale,
    row,
    queries,
    EDGE: gl.constexpr,
    PART: gl.constexpr,
):
    """Adds P' dO and dS' Q of a block of queries."""
    acc_k, acc_v, slot, phase, turn_phase = state
    log_sum, delta = terms
    ks, vs, ready = held
    qs, grads, q_full, q_empty, grad_full, grad_empty = ring
    STAGES: gl.constexpr = qs.type.shape[0]
    ROWS: gl.constexpr = ks.type.shape[3]
    BLOCK_M: gl.constexpr = qs.type.shape[3]
    layout: gl.constexpr = sums_layout(BLOCK_M, 16)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    layout_k: gl.constexpr = gl.DotOperandLayout(0, acc_k.type.layout, 2)
    layout_v: gl.constexpr = gl.DotOperandLayout(0, acc_v.type.layout, 2)
    m = block * BLOCK_M + gl.arange(0, BLOCK_M, columns)
    row_log = gl.load(log_sum + m, mask=m < queries, other=float("inf"))
    row_delta = gl.load(delta + m, mask=m < queries, other=0.0)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=layout)
    mbarrier.wait(q_full.index(slot), phase)
    mbarrier.wait(turn.index(PART), turn_phase)
    y = flat(qs.index(slot)).permute((1, 0))
    logits = warpgroup_mma(flat(ks.index(PART)), y, zeros, use_acc=False, is_async=True)
    mbarrier.wait(grad_full.index(slot), phase)
    y = flat(grads.index(slot)).permute((1, 0))
    d_weights = warpgroup_mma(flat(vs.index(PART)), y, zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turn.index(1 - PART), count=1)
    logits = warpgroup_mma_wait(1, deps=[logits])
    if EDGE:
        n = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        logits = gl.where(n[:, None] <= m[None, :], logits, float("-inf"))
    wide = gl.exp2(logits * scale - row_log[None, :])
    weights = gl.convert_layout(wide.to(ks.dtype), layout_v)
    mbarrier.wait(ready.index(PART), 0)
    acc_v = warpgroup_mma(weights, flat(grads.index(slot)), acc_v, is_async=True)
    d_weights = warpgroup_mma_wait(1, deps=[d_weights])
    wide = wide * (d_weights - row_delta[None, :])
    d_logits = gl.convert_layout(wide.to(ks.dtype), layout_k)
    acc_k = warpgroup_mma(d_logits, flat(qs.index(slot)), acc_k, is_async=True)
    acc_k, acc_v, weights, d_logits = warpgroup_mma_wait(0, deps=[acc_k, acc_v, weights, d_logits])
    mbarrier.arrive(q_empty.index(slot), count=1)
    mbarrier.arrive(grad_empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return acc_k, acc_v, slot, phase, turn_phase ^ 1


@gluon.jit
def _dkv_consume(
    held,
    ring,
    turn,
    target,
    place,
    sizes,
    CAUSAL: gl.constexpr,
    PART: gl.constexpr,
):
    """dK and dV of 64 keys."""
    dk, dv, log_sum, delta = target
    b, kv, group, first = place
    head, heads, queries, keys, dim, dim_v, scale = sizes
    ks, vs, ready = held
    qs, _grads, _q_full, _q_empty, _grad_full, _grad_empty = ring
    ROWS: gl.constexpr = ks.type.shape[3]
    BLOCK_M: gl.constexpr = qs.type.shape[3]
    BLOCK_D: gl.constexpr = ks.type.shape[4]
    BLOCK_DV: gl.constexpr = vs.type.shape[4]
    begin, full, end = _query_blocks(first, queries, CAUSAL, BLOCK_M, 2 * ROWS)
    row = first + PART * ROWS
    step = scale * LOG2E
    acc_k = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=sums_layout(BLOCK_D, 16))
    acc_v = gl.zeros([ROWS, BLOCK_DV], gl.float32, layout=sums_layout(BLOCK_DV, 16))
    state = (acc_k, acc_v, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    mbarrier.wait(ready.index(PART), 0)
    for member in range(group):
        row0 = (b * heads + kv * group + member).to(gl.int64) * queries
        terms = (log_sum + row0, delta + row0)
        for block in range(begin, full):
            state = _dkv_step(state, block, held, ring, turn, terms, step, row, queries, True, PART)
        for block in range(full, end):
            state = _dkv_step(
                state, block, held, ring, turn, terms, step, row, queries, False, PART
            )
    acc_k, acc_v, _slot, _phase, _turn_phase = state
    row0 = head.to(gl.int64) * keys
    store_tile(acc_k * scale, dk + row0 * dim, row, 0, keys, dim)
    store_tile(acc_v, dv + row0 * dim_v, row, 0, keys, dim_v)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def _dkv_hopper_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    dk,
    dv,
    log_sum,
    delta,
    heads,
    group,
    queries,
    keys,
    dim,
    dim_v,
    scale,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = k_desc.block_type.shape[2]
    held = make_held(k_desc, v_desc)
    ring = make_blocks(q_desc, grad_desc, STAGES)
    turn = make_turns(2)
    head = gl.program_id(0)
    kv_heads = heads // group
    place = (head // kv_heads, head % kv_heads, group, gl.program_id(1) * (2 * ROWS))
    sizes = (head, heads, queries, keys, dim, dim_v, scale)
    target = (dk, dv, log_sum, delta)
    descs = (q_desc, grad_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (_dkv_consume, (held, ring, turn, target, place, sizes, CAUSAL, 0)),
            (_dkv_consume, (held, ring, turn, target, place, sizes, CAUSAL, 1)),
            (_dkv_load, (descs, held, ring, place, queries, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


def key_gradient(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Fill dK and dV; ``terms``: ``log2(sum e^S)`` and ``rowsum(dO O)`` of each row."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys, dim_v = v.shape[1:]
    both = 2 * (columns_of(q) + columns_of(v))
    held = 2 * ROWS_EACH * both + OTHER_BYTES
    _dkv_hopper_kernel[(batch * kv_heads, cdiv(keys, 2 * ROWS_EACH))](
        box_descriptor(q, _QUERIES),
        box_descriptor(grad, _QUERIES),
        box_descriptor(k, ROWS_EACH),
        box_descriptor(v, ROWS_EACH),
        dk,
        dv,
        *terms,
        heads,
        heads // kv_heads,
        queries,
        keys,
        dim,
        dim_v,
        scale,
        CAUSAL=causal,
        STAGES=ring_stages(_QUERIES * both, held, 4),
        num_warps=4,
    )
