# SPDX-License-Identifier: MIT
"""Routing: top-k, softmax, the pairs (token, slot) sorted by expert, and the list of tiles.

Small batches take one launch: one program places the pairs, and one, which repeats the top-k,
lists the tiles; those that follow turn the rows of x into e4m3 codes in the order of moe/tile.py.
Larger batches take two: in the first each program finds the top-k of its BT tokens, the second
places the pairs (moe/place.py). The second also stores the codes where they lie in the order of
the pairs and the tokens are not too many; else the codes are a third launch.
Pairs of an expert keep their order (token, then slot), so nothing depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.config import placing_chunk, routing_block
from oss_fused.kernels.moe.encode import NO_CODES, Encoded, empty_codes, encode_row, encode_rows
from oss_fused.kernels.moe.place import (
    Routing,
    Shape,
    list_tiles,
    local_ids,
    place,
    place_and_encode,
    place_pairs,
)
from oss_fused.kernels.numerics import sort_keys


@triton.jit
def _packed(logits, expert):
    """Integers that order as the experts are chosen: by value with NaN above all, then the lower
    expert. No two are equal."""
    _, key = sort_keys(logits)
    if logits.dtype == tl.bfloat16:
        return (key & -65536) | (65535 - expert)
    else:
        return (key.to(tl.int64) << 32) | (0xFFFFFFFF - expert.to(tl.int64))


@triton.jit
def _value(packed):
    """The value in what ``_packed`` made, as float32."""
    if packed.dtype == tl.int32:
        key = packed & -65536
        bits = key ^ ((key >> 31) & 0x7FFF0000)
    else:
        key = (packed >> 32).to(tl.int32)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _topk(logits, routing, first, n_tokens, SHAPE: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Store weights and ids of BT tokens; return the slot of each expert [EP, BT], -1 for none."""
    EXPERTS: tl.constexpr = SHAPE.experts
    K: tl.constexpr = SHAPE.top_k
    BT: tl.constexpr = SHAPE.block
    token = first + tl.arange(0, BT)
    expert = tl.arange(0, SHAPE.padded_experts)[:, None]
    mask = (token < n_tokens)[None, :] & (expert < EXPERTS)
    # loaded one by one, so that a warp has the experts of a token and stores what it has loaded
    offsets = tl.max_contiguous(token.to(tl.int64)[None, :] * EXPERTS + expert, (1, 1))
    loaded = tl.load(logits + offsets, mask=mask, other=float("-inf"))
    keys = _packed(loaded, expert)
    # below the key of -inf: never chosen while a real expert is left
    LEAST: tl.constexpr = -2147483648 if loaded.dtype == tl.bfloat16 else -9223372036854775808
    keys = tl.where(expert < EXPERTS, keys, LEAST)
    slot = tl.full(keys.shape, -1, tl.int32)
    top = tl.zeros((BT,), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, 0)
        hit = keys == best[None, :]
        slot = tl.where(hit, i, slot)
        keys = tl.where(hit, LEAST, keys)
        if i == 0:
            # a NaN comes first, and makes all of the row's NaN
            top = _value(best)
    slot = tl.where(mask, slot, -1)
    exps = tl.exp(loaded.to(tl.float32) - top[None, :])
    total = tl.sum(tl.where((slot >= 0) if RENORMALIZE else mask, exps, 0.0), 0)
    index = token[None, :] * K + slot
    tl.store(routing.topk_weights + index, exps / total[None, :], mask=slot >= 0)
    tl.store(routing.topk_ids + index, tl.broadcast_to(expert, slot.shape), mask=slot >= 0)
    return slot


@triton.jit
def _route_block(pid, work, SHAPE: tl.constexpr, RENORMALIZE: tl.constexpr, SINGLE: tl.constexpr):
    """Top-k of BT tokens; then their pairs and tiles, or their counts if the second launch asks.

    Where one block has all tokens, a second program repeats the top-k and lists the tiles.
    """
    logits, expert_map, routing, counts, n_tokens, n_tiles = work
    EP: tl.constexpr = SHAPE.padded_experts
    first = 0 if SINGLE else pid * SHAPE.block
    slot = _topk(logits, routing, first, n_tokens, SHAPE, RENORMALIZE)
    here = (slot >= 0) & (local_ids(expert_map, SHAPE) >= 0)[:, None]
    pairs = here.to(tl.int32)
    count = tl.sum(pairs, 1)
    if SINGLE:
        start = tl.cumsum(count, 0) - count
        if pid == 0:
            place_pairs(slot, pairs, start, routing, first, SHAPE)
        else:
            list_tiles(count, start, expert_map, routing, n_tiles, SHAPE)
    elif counts is not None:
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
    POLICY: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = 2 if SINGLE else (n_tokens + SHAPE.block - 1) // SHAPE.block
    start_next()
    wait_for_inputs()
    work = (logits, expert_map, routing, counts, n_tokens, n_tiles)
    # the outer branch is decided when the kernel is compiled: without x the inner has no type
    if rows.x is not None:
        if pid >= blocks:
            encode_row(rows, pid - blocks, H, BLOCK, LEVELS, PERMUTE, POLICY)
        else:
            _route_block(pid, work, SHAPE, RENORMALIZE, SINGLE)
    else:
        _route_block(pid, work, SHAPE, RENORMALIZE, SINGLE)


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
    by_pair: bool = False,
) -> Routing:
    """Route T >= 1 tokens, list tiles of up to ``rows`` pairs, encode the rows of ``x``.

    ``experts`` are those of this rank, the ones ``expert_map`` maps to. ``by_pair`` puts a row of
    codes into the place of each pair, [P, levels, KP]; behind those computed here nothing is
    written.
    """
    router_logits = router_logits.contiguous()
    tokens, global_experts = router_logits.shape
    block, single = routing_block(tokens, global_experts, x is not None and not by_pair)
    padded_experts = max(16, next_power_of_2(max(global_experts, experts)))
    shape = Shape(global_experts, padded_experts, top_k, block, rows)
    n_tiles = max(1, min(tokens * top_k, experts + tokens * top_k // rows))
    routing = _empty_routing(router_logits, top_k, n_tiles)
    chunk = placing_chunk(tokens, top_k) if x is not None and by_pair and not single else 0
    x = None if x is None else x.contiguous()
    encoded, counts = NO_CODES, None
    if single and x is not None and not by_pair:
        encoded = empty_codes(x, tokens, levels)
    if not single and not chunk:
        counts = router_logits.new_empty((cdiv(tokens, block), padded_experts), dtype=torch.int32)
    into = (routing, counts, encoded)
    _launch(router_logits, expert_map, into, shape, renormalize, single, permute)
    if chunk and x is not None:
        return place_and_encode(x, routing, expert_map, shape, chunk, levels, permute)
    if counts is not None:
        place(routing, counts, expert_map, shape)
    if x is None or encoded.x is not None:
        return routing._replace(codes=encoded.codes, scale=encoded.scale)
    codes, scale = encode_rows(x, levels, permute, routing.place if by_pair else None)
    return routing._replace(codes=codes, scale=scale)


def _launch(
    router_logits: torch.Tensor,
    expert_map: torch.Tensor | None,
    into: tuple[Routing, torch.Tensor | None, Encoded],
    shape: Shape,
    renormalize: bool,
    single: bool,
    permute: bool,
) -> None:
    """The first launch; ``into``: the routing, and counts and codes where they are wanted."""
    routing, counts, encoded = into
    tokens = router_logits.shape[0]
    coded = encoded.x is not None
    width, levels = (encoded.x.shape[1], encoded.codes.shape[1]) if coded else (128, 2)
    blocks = 2 if single else cdiv(tokens, shape.block)
    _route_kernel[(blocks + (tokens if coded else 0),)](
        router_logits,
        expert_map,
        routing,
        counts,
        encoded,
        tokens,
        routing.tiles.shape[0],
        SHAPE=shape,
        RENORMALIZE=renormalize,
        SINGLE=single,
        H=width,
        BLOCK=next_power_of_2(-(-width // 128) * 128),
        LEVELS=levels,
        PERMUTE=permute,
        POLICY=activation_policy(tokens) if coded else "",
        # up to eight tokens of 32 experts a warp, one after the other
        num_warps=min(max(shape.block * shape.padded_experts // 256, 4), 16),
        **pdl_options(router_logits.device),
    )


def _empty_routing(router_logits: torch.Tensor, top_k: int, n_tiles: int) -> Routing:
    """What the kernels fill; its integers share one allocation."""
    tokens, device = router_logits.shape[0], router_logits.device
    pairs = tokens * top_k
    # every part starts at 16 bytes: Triton compiles anew for a pointer that does not
    part = -(-pairs // 4) * 4
    integers = torch.empty(4 + 3 * part + 3 * n_tiles, dtype=torch.int32, device=device)
    progress, integers = integers[:3], integers[4:]
    ids, order, place = (integers[i * part : i * part + pairs] for i in range(3))
    tiles = integers[3 * part :].view(n_tiles, 3)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    return Routing(weights, ids.view(tokens, top_k), order, place, tiles, progress, None, None)


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
