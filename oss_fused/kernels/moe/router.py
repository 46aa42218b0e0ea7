# SPDX-License-Identifier: MIT
"""Routing: top-k, softmax, the pairs (token, slot) sorted by expert, and the list of tiles.

Small batches take one launch of one program; larger ones two: each program finds the top-k of its
BT tokens and counts its pairs per expert, then each places its pairs, knowing everyone's counts.
Pairs of an expert keep their order (token, then slot), so nothing depends on timing.

The programs that follow the routing programs of the first launch turn the rows of x into e4m3
codes in the order of moe/tile.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.config import routing_block
from oss_fused.kernels.moe.encode import Encoded, empty_codes, encode_row


class Routing(NamedTuple):
    """Who computes what; P = T * top_k pairs.

    topk_weights [T, top_k] float32 and topk_ids [T, top_k] int32 (global); order [P] int32 is the
    pairs by expert; place [P] int32 a pair's position in order, -1 if its expert is not here;
    tiles [M, 3] int32 (local expert or -1, first position, rows); codes [T, levels, KP] e4m3 and
    scale [T] float32 are x, or None where no x was given.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    order: torch.Tensor
    place: torch.Tensor
    tiles: torch.Tensor
    codes: torch.Tensor | None
    scale: torch.Tensor | None


class _Shape(NamedTuple):
    """What the routing kernels are compiled for.

    Experts of all ranks and of a token, both also rounded up to powers of two; tokens of a
    program, pairs of a tile.
    """

    experts: int
    padded_experts: int
    top_k: int
    padded_k: int
    block: int
    rows: int


@triton.jit
def _topk(
    logits, routing, expert_map, first, n_tokens, SHAPE: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """Store weights and ids of BT tokens; return their local expert ids [BT, KP], -1 for none."""
    EXPERTS: tl.constexpr = SHAPE.experts
    K: tl.constexpr = SHAPE.top_k
    KP: tl.constexpr = SHAPE.padded_k
    BT: tl.constexpr = SHAPE.block
    token = first + tl.arange(0, BT)
    column = tl.arange(0, SHAPE.padded_experts)
    slot = tl.arange(0, KP)
    live = token < n_tokens
    mask = live[:, None] & (column < EXPERTS)[None, :]
    pointers = logits + token.to(tl.int64)[:, None] * EXPERTS + column[None, :]
    # adding 0 turns -0 into 0, so that bits order like values
    value = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(value == value, key, 0x7FFFFFFF)
    # below the key of -inf: never chosen while a real expert is left
    key = tl.where((column < EXPERTS)[None, :], key, -2147483648)
    chosen = tl.zeros((BT, KP), tl.int32)
    values = tl.full((BT, KP), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        best = tl.argmax(key, axis=1, tie_break_left=True).to(tl.int32)
        hit = column[None, :] == best[:, None]
        picked = tl.sum(tl.where(hit, value, 0.0), 1)
        chosen = tl.where((slot == i)[None, :], best[:, None], chosen)
        values = tl.where((slot == i)[None, :], picked[:, None], values)
        key = tl.where(hit, -2147483648, key)
    # max drops NaN, the differences bring it back
    top = tl.max(values, 1)[:, None]
    exps = tl.exp(values - top)
    if RENORMALIZE:
        total = tl.sum(tl.where((slot < K)[None, :], exps, 0.0), 1)
    else:
        total = tl.sum(tl.where((column < EXPERTS)[None, :], tl.exp(value - top), 0.0), 1)
    out = token.to(tl.int64)[:, None] * K + slot[None, :]
    out_mask = live[:, None] & (slot < K)[None, :]
    tl.store(routing.topk_weights + out, exps / total[:, None], mask=out_mask)
    tl.store(routing.topk_ids + out, chosen, mask=out_mask)
    if expert_map is not None:
        chosen = tl.load(expert_map + chosen, mask=out_mask, other=-1)
    return tl.where(out_mask, chosen, -1)


@triton.jit
def _place_pairs(local, base, routing, first, n_tokens, SHAPE: tl.constexpr):
    """Store order and place of a block's pairs; ``base`` [EP]: its first position per expert."""
    K: tl.constexpr = SHAPE.top_k
    KP: tl.constexpr = SHAPE.padded_k
    BT: tl.constexpr = SHAPE.block
    expert = local.reshape(BT * KP)
    pair = tl.arange(0, BT * KP)
    token = first + pair // KP
    slot = pair % KP
    hit = expert[:, None] == tl.arange(0, SHAPE.padded_experts)[None, :]
    rank = tl.cumsum(hit.to(tl.int32), 0) - 1
    position = tl.sum(tl.where(hit, rank + base[None, :], 0), 1)
    live = expert >= 0
    index = token * K + slot
    tl.store(routing.order + position, index, mask=live)
    tl.store(
        routing.place + index, tl.where(live, position, -1), mask=(slot < K) & (token < n_tokens)
    )


@triton.jit
def _list_tiles(counts, starts, tiles, n_tiles, SHAPE: tl.constexpr, BM: tl.constexpr):
    """Store (expert, first position, rows) of every tile; unused entries get expert -1."""
    EP: tl.constexpr = SHAPE.padded_experts
    ROWS: tl.constexpr = SHAPE.rows
    expert = tl.arange(0, EP)
    per_expert = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(per_expert, 0)
    for at in range(0, n_tiles, BM):
        tile = at + tl.arange(0, BM)
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        hit = expert[None, :] == owner[:, None]
        nth = tile - tl.sum(tl.where(hit, (ends - per_expert)[None, :], 0), 1)
        count = tl.sum(tl.where(hit, counts[None, :], 0), 1) - nth * ROWS
        begin = tl.sum(tl.where(hit, starts[None, :], 0), 1) + nth * ROWS
        mask = tile < n_tiles
        tl.store(tiles + tile * 3, tl.where(owner < EP, owner, -1), mask=mask)
        tl.store(tiles + tile * 3 + 1, begin, mask=mask)
        tl.store(tiles + tile * 3 + 2, tl.minimum(count, ROWS), mask=mask)


@triton.jit
def _route_block(
    pid,
    logits,
    expert_map,
    routing,
    counts,
    n_tokens,
    n_tiles,
    SHAPE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Top-k of BT tokens; then their pairs and tiles, or their counts for a second launch."""
    EP: tl.constexpr = SHAPE.padded_experts
    first = pid * SHAPE.block
    local = _topk(logits, routing, expert_map, first, n_tokens, SHAPE, RENORMALIZE)
    pairs = local.reshape(SHAPE.block * SHAPE.padded_k)
    count = tl.sum((pairs[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32), 0)
    if SINGLE:
        start = tl.cumsum(count, 0) - count
        _place_pairs(local, start, routing, first, n_tokens, SHAPE)
        _list_tiles(count, start, routing.tiles, n_tiles, SHAPE, 64)
    else:
        tl.store(counts + pid * EP + tl.arange(0, EP), count)


@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _route_kernel(
    logits,
    expert_map,
    routing,
    counts,
    rows,
    n_tokens,
    n_tiles,
    SHAPE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SINGLE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = (n_tokens + SHAPE.block - 1) // SHAPE.block
    start_next()
    wait_for_inputs()
    # the outer branch is decided when the kernel is compiled: without x the inner has no type
    if rows.x is not None:
        if pid >= blocks:
            encode_row(rows, pid - blocks, H, BLOCK, LEVELS, PERMUTE)
        else:
            _route_block(
                pid,
                logits,
                expert_map,
                routing,
                counts,
                n_tokens,
                n_tiles,
                SHAPE,
                RENORMALIZE,
                SINGLE,
            )
    else:
        _route_block(
            pid,
            logits,
            expert_map,
            routing,
            counts,
            n_tokens,
            n_tiles,
            SHAPE,
            RENORMALIZE,
            SINGLE,
        )


@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _place_kernel(expert_map, routing, counts, n_tokens, n_tiles, SHAPE: tl.constexpr):
    EP: tl.constexpr = SHAPE.padded_experts
    K: tl.constexpr = SHAPE.top_k
    pid = tl.program_id(0)
    blocks = (n_tokens + SHAPE.block - 1) // SHAPE.block
    start_next()
    wait_for_inputs()
    expert = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    for at in range(0, blocks, 32):
        block = at + tl.arange(0, 32)
        part = tl.load(
            counts + block[:, None] * EP + expert[None, :], mask=(block < blocks)[:, None], other=0
        )
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((block < pid)[:, None], part, 0), 0)
    start = tl.cumsum(total, 0) - total
    first = pid * SHAPE.block
    token = first + tl.arange(0, SHAPE.block)
    slot = tl.arange(0, SHAPE.padded_k)
    mask = (token < n_tokens)[:, None] & (slot < K)[None, :]
    local = tl.load(routing.topk_ids + token[:, None] * K + slot[None, :], mask=mask, other=0)
    if expert_map is not None:
        local = tl.load(expert_map + local, mask=mask, other=-1)
    local = tl.where(mask, local, -1)
    _place_pairs(local, start + before, routing, first, n_tokens, SHAPE)
    if pid == 0:
        _list_tiles(total, start, routing.tiles, n_tiles, SHAPE, 64)


def route(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None,
    experts: int,
    rows: int,
    x: torch.Tensor | None = None,
    levels: int = 2,
    permute: bool = True,
) -> Routing:
    """Route T >= 1 tokens, list tiles of up to ``rows`` pairs, encode the rows of ``x``.

    ``experts`` are those of this rank, the ones ``expert_map`` maps to.
    """
    router_logits = router_logits.contiguous()
    tokens, global_experts = router_logits.shape
    block, single = routing_block(tokens, global_experts, top_k)
    padded_experts = max(16, next_power_of_2(max(global_experts, experts)))
    shape = _Shape(global_experts, padded_experts, top_k, next_power_of_2(top_k), block, rows)
    blocks = cdiv(tokens, block)
    counts = None
    if not single:
        counts = router_logits.new_empty((blocks, padded_experts), dtype=torch.int32)
    encoded, width = Encoded(None, None, None), 128
    if x is not None:
        encoded, width = empty_codes(x.contiguous(), tokens, levels), x.shape[1]
    n_tiles = max(1, min(tokens * top_k, experts + tokens * top_k // rows))
    routing = _empty_routing(router_logits, top_k, n_tiles)
    options = pdl_options(router_logits.device)
    _route_kernel[(blocks + (0 if x is None else tokens),)](
        router_logits,
        expert_map,
        routing,
        counts,
        encoded,
        tokens,
        n_tiles,
        SHAPE=shape,
        RENORMALIZE=renormalize,
        SINGLE=single,
        H=width,
        BLOCK=next_power_of_2(-(-width // 128) * 128),
        LEVELS=levels,
        PERMUTE=permute,
        num_warps=4,
        **options,
    )
    if not single:
        _place_kernel[(blocks,)](
            expert_map, routing, counts, tokens, n_tiles, SHAPE=shape, num_warps=4, **options
        )
    return routing._replace(codes=encoded.codes, scale=encoded.scale)


def _empty_routing(router_logits: torch.Tensor, top_k: int, n_tiles: int) -> Routing:
    """What the kernels fill; its integers share one allocation."""
    tokens, device = router_logits.shape[0], router_logits.device
    pairs = tokens * top_k
    # every part starts at 16 bytes: Triton compiles anew for a pointer that does not
    part = -(-pairs // 4) * 4
    integers = torch.empty(3 * part + 3 * n_tiles, dtype=torch.int32, device=device)
    ids, order, place = (integers[i * part : i * part + pairs] for i in range(3))
    tiles = integers[3 * part :].view(n_tiles, 3)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    return Routing(weights, ids.view(tokens, top_k), order, place, tiles, None, None)


def moe_route(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the top-k experts; see kernels/moe for the contract."""
    if router_logits.shape[0] == 0:
        shape = (0, top_k)
        return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(
            shape, dtype=torch.int32
        )
    routing = route(router_logits, top_k, renormalize, None, router_logits.shape[1], 16)
    return routing.topk_weights, routing.topk_ids
