# SPDX-License-Identifier: MIT
"""Places of the pairs (token, slot) in the order of their experts, and the list of tiles.

Where one routing program has all tokens, that program does this (moe/router.py). Else a launch
follows. It has one of two forms:

- ``place``: a program for each routing block, which adds up what the blocks before it counted.
- ``place_and_encode``: a program for each token, which counts the pairs before its own in the ids
  of all tokens, and stores the codes of its row of x in the places that it found; one more program
  lists the tiles. The ids are read once for each token, so this is for hundreds of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.encode import empty_codes, load_row, row_codes, store_encoded

# above the key of every pair that is computed here
_NOWHERE = tl.constexpr(2147483647)
# entries of the list that are marked as unused at once
_UNUSED = tl.constexpr(64)


class Routing(NamedTuple):
    """Who computes what; P = T * top_k pairs.

    topk_weights [T, top_k] float32 and topk_ids [T, top_k] int32 (global); order [P] int32 is the
    pairs by expert; place [P] int32 a pair's position in order, -1 if its expert is not here;
    tiles [M, 3] int32 (local expert, first position, rows; of an unused one -1 alone); progress [3]
    int32 as in moe/units.py; codes [T, levels, KP] e4m3 and scale [T] float32 are x, or None where
    no x was given.

    One token need not be routed (moe/choice.py): topk_weights and tiles are then its logits [1, G],
    and ids, order, place and progress are None. expected [G] are the logits that its residual alone
    has, or None (moe/router_norm.py).
    """

    topk_weights: torch.Tensor
    topk_ids: Any
    order: Any
    place: Any
    tiles: torch.Tensor
    progress: Any
    codes: torch.Tensor | None
    scale: torch.Tensor | None
    expected: torch.Tensor | None = None


def unrouted(
    logits: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    expected: torch.Tensor | None = None,
) -> Routing:
    """One token with its ``logits`` [1, G], whose experts the products find themselves."""
    return Routing(logits, None, None, None, logits, None, codes, scale, expected)


class Shape(NamedTuple):
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
def local_ids(expert_map, SHAPE: tl.constexpr):
    """Local id [EP] of every expert, -1 where it is not here."""
    column = tl.arange(0, SHAPE.padded_experts)
    if expert_map is None:
        return column
    else:
        return tl.load(expert_map + column, mask=column < SHAPE.experts, other=-1)


@triton.jit
def place_pairs(slot, pairs, base, routing, first, SHAPE: tl.constexpr):
    """Store order and place of a block's pairs.

    ``slot`` [EP, BT]: in which slot a token has an expert, -1 for none; ``pairs`` [EP, BT]: 1 where
    it has one of this rank, else 0; ``base`` [EP]: the block's first position per expert.
    """
    token = first + tl.arange(0, SHAPE.block)
    here = pairs > 0
    position = base[:, None] + tl.cumsum(pairs, 1) - pairs
    index = token[None, :] * SHAPE.top_k + slot
    tl.store(routing.order + position, index, mask=here)
    tl.store(routing.place + index, tl.where(here, position, -1), mask=slot >= 0)


@triton.jit
def list_tiles(counts, starts, expert_map, routing, n_tiles, SHAPE: tl.constexpr):
    """Store (expert, first position, rows) of every tile; of an unused one only the expert, -1.

    Their number is the beginning of ``progress``.
    """
    ROWS: tl.constexpr = SHAPE.rows
    expert = local_ids(expert_map, SHAPE)
    of_expert = (counts + ROWS - 1) // ROWS
    first = tl.cumsum(of_expert, 0) - of_expert
    total = tl.sum(of_expert, 0)
    tl.store(routing.progress, total)
    tl.store(routing.progress + 1 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    for nth in range(0, tl.max(of_expert, 0)):
        # of every expert that has as many; a map that means one twice has more than there is room
        mask = (nth < of_expert) & (first + nth < n_tiles)
        tile = routing.tiles + (first + nth) * 3
        tl.store(tile, expert, mask=mask)
        tl.store(tile + 1, starts + nth * ROWS, mask=mask)
        tl.store(tile + 2, tl.minimum(counts - nth * ROWS, ROWS), mask=mask)
    for at in range(0, n_tiles, _UNUSED):
        tile = at + tl.arange(0, _UNUSED)
        unused = (tile >= total) & (tile < n_tiles)
        tl.store(routing.tiles + tile * 3, tl.full((_UNUSED,), -1, tl.int32), mask=unused)


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
    BT: tl.constexpr = SHAPE.block
    slot = tl.full((EP, BT), -1, tl.int32)
    for i in tl.static_range(K):
        chosen = tl.load(routing.topk_ids + token * K + i, mask=token < n_tokens, other=-1)
        slot = tl.where(chosen[None, :] == expert[:, None], i, slot)
    here = (slot >= 0) & (local_ids(expert_map, SHAPE) >= 0)[:, None]
    place_pairs(slot, here.to(tl.int32), start + before, routing, first, SHAPE)
    if pid == 0:
        list_tiles(total, start, expert_map, routing, n_tiles, SHAPE)


@triton.jit
def _experts(pair, routing, expert_map, n_pairs):
    """Experts of ``pair``, and whether there is such a pair and its expert is here."""
    live = pair < n_pairs
    expert = tl.load(routing.topk_ids + pair, mask=live, other=0)
    if expert_map is not None:
        live &= tl.load(expert_map + expert, mask=live, other=-1) >= 0
    return expert, live


@triton.jit
def _keys(pair, routing, expert_map, n_pairs):
    """Integers that order as the pairs are sorted: by expert, then by their own number."""
    expert, here = _experts(pair, routing, expert_map, n_pairs)
    return tl.where(here, expert * n_pairs + pair, _NOWHERE)


@triton.jit
def _count_and_list(
    expert_map, routing, n_pairs, n_tiles, SHAPE: tl.constexpr, CHUNK: tl.constexpr
):
    """Count the pairs of every expert and store the tiles."""
    EP: tl.constexpr = SHAPE.padded_experts
    counts = tl.zeros((EP,), tl.int32)
    for at in range(0, n_pairs, CHUNK):
        expert, here = _experts(at + tl.arange(0, CHUNK), routing, expert_map, n_pairs)
        counts += tl.histogram(expert, EP, mask=here)
    starts = tl.cumsum(counts, 0) - counts
    list_tiles(counts, starts, expert_map, routing, n_tiles, SHAPE)


@triton.jit
def _place_token(
    expert_map,
    routing,
    token,
    n_pairs,
    SHAPE: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store order and place of a token's pairs; return the places, a tuple, -1 for none."""
    K: tl.constexpr = SHAPE.top_k
    slot = tl.arange(0, SLOTS)
    chunk = tl.arange(0, CHUNK)[None, :]
    # a chunk is asked for before the one at hand is counted, the first before the token's own ids
    keys = _keys(chunk, routing, expert_map, n_pairs)
    own = tl.full((SLOTS, 1), _NOWHERE, tl.int32)
    here = ()
    for i in tl.static_range(K):
        key = _keys(token * K + i, routing, expert_map, n_pairs)
        own = tl.where(slot[:, None] == i, key, own)
        here += (key < _NOWHERE,)  # type: ignore[assignment]
    before = tl.zeros((SLOTS,), tl.int32)
    for at in range(CHUNK, n_pairs + CHUNK, CHUNK):
        before += tl.sum((keys < own).to(tl.int32), 1)
        keys = _keys(at + chunk, routing, expert_map, n_pairs)
    places = ()
    for i in tl.static_range(K):
        place = tl.where(here[i], tl.sum(tl.where(slot == i, before, 0), 0), -1)
        tl.store(routing.order + place, token * K + i, mask=here[i])
        tl.store(routing.place + token * K + i, place)
        places += (place,)  # type: ignore[assignment]
    return places


@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _place_and_encode_kernel(
    expert_map,
    routing,
    rows,
    n_tokens,
    n_tiles,
    SHAPE: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    K: tl.constexpr = SHAPE.top_k
    pid = tl.program_id(0)
    n_pairs = n_tokens * K
    start_next()
    wait_for_inputs()
    if pid == 0:
        _count_and_list(expert_map, routing, n_pairs, n_tiles, SHAPE, CHUNK)
    else:
        token = pid - 1
        # asked for before the ids, so that both are on their way
        value = load_row(rows.x, token, H, BLOCK)
        places = _place_token(expert_map, routing, token, n_pairs, SHAPE, SLOTS, CHUNK)
        first, second, unit = row_codes(value, LEVELS)
        for i in tl.static_range(K):
            # an expert that is not here has no place for the row
            if places[i] >= 0:
                store_encoded(rows, places[i], first, second, unit, H, BLOCK, LEVELS, PERMUTE, "")


def place(
    routing: Routing, counts: torch.Tensor, expert_map: torch.Tensor | None, shape: Shape
) -> None:
    """Fill order, place and tiles from the ids and the ``counts`` of every routing block."""
    _place_kernel[(counts.shape[0],)](
        expert_map,
        routing,
        counts,
        routing.topk_ids.shape[0],
        routing.tiles.shape[0],
        SHAPE=shape,
        num_warps=4,
        **pdl_options(counts.device),
    )


def place_and_encode(
    x: torch.Tensor,
    routing: Routing,
    expert_map: torch.Tensor | None,
    shape: Shape,
    chunk: int,
    levels: int,
    permute: bool,
) -> Routing:
    """Fill order, place and tiles from the ids alone, and encode a row of x for each pair.

    ``chunk``: pairs that a program reads at once.
    """
    tokens, width = x.shape
    encoded = empty_codes(x, tokens * shape.top_k, levels)
    _place_and_encode_kernel[(1 + tokens,)](
        expert_map,
        routing,
        encoded,
        tokens,
        routing.tiles.shape[0],
        SHAPE=shape,
        SLOTS=next_power_of_2(shape.top_k),
        CHUNK=chunk,
        H=width,
        BLOCK=next_power_of_2(encoded.codes.shape[2]),
        LEVELS=levels,
        PERMUTE=permute,
        num_warps=4,
        **pdl_options(x.device),
    )
    return routing._replace(codes=encoded.codes, scale=encoded.scale)
