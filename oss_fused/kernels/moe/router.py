# SPDX-License-Identifier: MIT
"""Routing: top-k, softmax, the pairs (token, slot) sorted by expert, and the list of tiles.

Small batches take one launch: one program places the pairs, and one, which repeats the top-k,
lists the tiles; those that follow turn the rows of x into e4m3 codes in the order of moe/tile.py.
Larger batches take two: each program finds the top-k of its BT tokens and counts its pairs per
expert, then each places its pairs, knowing everyone's counts; the codes are a third launch.
Pairs of an expert keep their order (token, then slot), so nothing depends on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.config import routing_block
from oss_fused.kernels.moe.encode import Encoded, empty_codes, encode_row, encode_rows
from oss_fused.kernels.numerics import sort_keys


class Routing(NamedTuple):
    """Who computes what; P = T * top_k pairs.

    topk_weights [T, top_k] float32 and topk_ids [T, top_k] int32 (global); order [P] int32 is the
    pairs by expert; place [P] int32 a pair's position in order, -1 if its expert is not here;
    tiles [M, 3] int32 (local expert or -1, first position, rows); codes [T, levels, KP] e4m3 and
    scale [T] float32 are x, or None where no x was given.

    One token need not be routed (moe/choice.py): topk_weights and tiles are then its logits [1, G],
    and ids, order and place are None.
    """

    topk_weights: torch.Tensor
    topk_ids: Any
    order: Any
    place: Any
    tiles: torch.Tensor
    codes: torch.Tensor | None
    scale: torch.Tensor | None


class _Shape(NamedTuple):
    """What the routing kernels are compiled for.

    Experts of all ranks, also rounded up to a power of two, and of a token; tokens of a program,
    pairs of a tile.
    """

    experts: int
    padded_experts: int
    top_k: int
    block: int
    rows: int


@triton.jit
def _packed(logits, column):
    """Integers that order as the experts are chosen: by value with NaN above all, then the lower
    expert; and how many low bits are the expert's."""
    _, key = sort_keys(logits)
    if logits.dtype == tl.bfloat16:
        return (key & -65536) | (65535 - column)
    else:
        return (key.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))


@triton.jit
def _unpacked(best):
    """(value, expert) of what ``_packed`` made."""
    if best.dtype == tl.int32:
        key = best & -65536
        expert = 65535 - (best & 65535)
        bits = key ^ ((key >> 31) & 0x7FFF0000)
    else:
        key = (best >> 32).to(tl.int32)
        expert = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), expert


@triton.jit
def _topk(logits, routing, first, n_tokens, SHAPE: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Store weights and ids of BT tokens; return the ids, a tuple of [BT], and what is chosen
    [BT, EP]."""
    EXPERTS: tl.constexpr = SHAPE.experts
    K: tl.constexpr = SHAPE.top_k
    BT: tl.constexpr = SHAPE.block
    token = first + tl.arange(0, BT)
    column = tl.arange(0, SHAPE.padded_experts)
    live = token < n_tokens
    mask = live[:, None] & (column < EXPERTS)[None, :]
    pointers = logits + token.to(tl.int64)[:, None] * EXPERTS + column[None, :]
    loaded = tl.load(pointers, mask=mask, other=float("-inf"))
    keys = _packed(loaded, column[None, :])
    # below the key of -inf: never chosen while a real expert is left
    LEAST: tl.constexpr = -2147483648 if loaded.dtype == tl.bfloat16 else -9223372036854775808
    keys = tl.where((column < EXPERTS)[None, :], keys, LEAST)
    ids = ()
    exps = ()
    top = tl.zeros((BT,), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], LEAST, keys)
        value, expert = _unpacked(best)
        if i == 0:
            top = value
        # a NaN comes first, and makes all of the row's NaN
        ids += (expert,)  # type: ignore[assignment]
        exps += (tl.exp(value - top),)  # type: ignore[assignment]
        total += exps[i]
    if not RENORMALIZE:
        values = tl.where(mask, loaded.to(tl.float32), float("-inf"))
        total = tl.sum(tl.exp(values - top[:, None]), 1)
    for i in tl.static_range(K):
        out = token.to(tl.int64) * K + i
        tl.store(routing.topk_weights + out, exps[i] / total, mask=live)
        tl.store(routing.topk_ids + out, ids[i], mask=live)
    return ids, (keys == LEAST) & mask


@triton.jit
def _local_ids(expert_map, SHAPE: tl.constexpr):
    """Local id [EP] of every expert, -1 where it is not here."""
    column = tl.arange(0, SHAPE.padded_experts)
    if expert_map is None:
        return column
    else:
        return tl.load(expert_map + column, mask=column < SHAPE.experts, other=-1)


@triton.jit
def _place_pairs(chosen, here, base, routing, first, n_tokens, SHAPE: tl.constexpr):
    """Store order and place of a block's pairs.

    ``here`` [BT, EP]: whether a token has a pair with an expert of this rank; ``base`` [EP]: the
    block's first position per expert.
    """
    K: tl.constexpr = SHAPE.top_k
    token = first + tl.arange(0, SHAPE.block)
    column = tl.arange(0, SHAPE.padded_experts)
    pairs = here.to(tl.int32)
    position = tl.where(here, base[None, :] + tl.cumsum(pairs, 0) - pairs, -1)
    for i in tl.static_range(K):
        # all others are below -1
        of_slot = tl.where(column[None, :] == chosen[i][:, None], position, -2)
        at = tl.max(of_slot, 1)
        index = token * K + i
        tl.store(routing.order + at, index, mask=at >= 0)
        tl.store(routing.place + index, at, mask=token < n_tokens)


@triton.jit
def _list_tiles(counts, starts, expert_map, tiles, n_tiles, SHAPE: tl.constexpr, BM: tl.constexpr):
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
        owned = owner < EP
        if expert_map is not None:
            owner = tl.load(expert_map + owner, mask=owned, other=-1)
        tl.store(tiles + tile * 3, tl.where(owned, owner, -1), mask=mask)
        tl.store(tiles + tile * 3 + 1, begin, mask=mask)
        tl.store(tiles + tile * 3 + 2, tl.minimum(count, ROWS), mask=mask)


@triton.jit
def _route_block(pid, work, SHAPE: tl.constexpr, RENORMALIZE: tl.constexpr, SINGLE: tl.constexpr):
    """Top-k of BT tokens; then their pairs and tiles, or their counts for a second launch.

    Where one block has all tokens, a second program repeats the top-k and lists the tiles.
    """
    logits, expert_map, routing, counts, n_tokens, n_tiles = work
    EP: tl.constexpr = SHAPE.padded_experts
    first = 0 if SINGLE else pid * SHAPE.block
    chosen, here = _topk(logits, routing, first, n_tokens, SHAPE, RENORMALIZE)
    here &= (_local_ids(expert_map, SHAPE) >= 0)[None, :]
    count = tl.sum(here.to(tl.int32), 0)
    if SINGLE:
        start = tl.cumsum(count, 0) - count
        if pid == 0:
            _place_pairs(chosen, here, start, routing, first, n_tokens, SHAPE)
        else:
            _list_tiles(count, start, expert_map, routing.tiles, n_tiles, SHAPE, 64)
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
    blocks = 2 if SINGLE else (n_tokens + SHAPE.block - 1) // SHAPE.block
    start_next()
    wait_for_inputs()
    work = (logits, expert_map, routing, counts, n_tokens, n_tiles)
    # the outer branch is decided when the kernel is compiled: without x the inner has no type
    if rows.x is not None:
        if pid >= blocks:
            encode_row(rows, pid - blocks, H, BLOCK, LEVELS, PERMUTE)
        else:
            _route_block(pid, work, SHAPE, RENORMALIZE, SINGLE)
    else:
        _route_block(pid, work, SHAPE, RENORMALIZE, SINGLE)


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
    chosen = ()
    BT: tl.constexpr = SHAPE.block
    here = tl.zeros((BT, EP), tl.int1)
    for i in tl.static_range(K):
        of_slot = tl.load(routing.topk_ids + token * K + i, mask=token < n_tokens, other=-1)
        chosen += (of_slot,)  # type: ignore[assignment]
        here |= of_slot[:, None] == expert[None, :]
    here &= (_local_ids(expert_map, SHAPE) >= 0)[None, :]
    _place_pairs(chosen, here, start + before, routing, first, n_tokens, SHAPE)
    if pid == 0:
        _list_tiles(total, start, expert_map, routing.tiles, n_tiles, SHAPE, 64)


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
    block, single = routing_block(tokens, global_experts, x is not None)
    padded_experts = max(16, next_power_of_2(max(global_experts, experts)))
    shape = _Shape(global_experts, padded_experts, top_k, block, rows)
    blocks = 2 if single else cdiv(tokens, block)
    warps = 4 if block * padded_experts <= 2048 else 8
    counts = None
    if not single:
        counts = router_logits.new_empty((blocks, padded_experts), dtype=torch.int32)
    encoded, width = Encoded(None, None, None), 128
    if x is not None and single:
        encoded, width = empty_codes(x.contiguous(), tokens, levels), x.shape[1]
    n_tiles = max(1, min(tokens * top_k, experts + tokens * top_k // rows))
    routing = _empty_routing(router_logits, top_k, n_tiles)
    options = pdl_options(router_logits.device)
    _route_kernel[(blocks + (0 if encoded.x is None else tokens),)](
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
        num_warps=warps,
        **options,
    )
    if not single:
        _place_kernel[(blocks,)](
            expert_map, routing, counts, tokens, n_tiles, SHAPE=shape, num_warps=4, **options
        )
    if x is None or single:
        return routing._replace(codes=encoded.codes, scale=encoded.scale)
    codes, scale = encode_rows(x.contiguous(), levels, permute)
    return routing._replace(codes=codes, scale=scale)


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
