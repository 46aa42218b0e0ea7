# SPDX-License-Identifier: MIT
"""Grouped products of the experts for tens of tokens each, in Gluon: one warp copies, others
multiply.

A persistent program takes as many 64-row groups of one expert's weight at a time as it has
consumers (four warps each). One warp copies their packed weights, scale words and the codes of a
tile's tokens, sorted by expert, into a ring of shared memory, chunk by chunk. A consumer unpacks
its group's weights into registers and multiplies. moe/gemm.py says what levels are, moe/tile.py in
which order columns lie.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.gluon_tile import (
    ProductShape,
    load_chunk,
    scaled,
    step_layout,
    store_codes,
    store_rows,
    token_scales,
    unpack,
    unpack_copied,
)
from oss_fused.kernels.moe.place import Routing
from oss_fused.kernels.moe.units import (
    announce,
    announce_end,
    announced,
    ask_for_unit,
    notes_of,
    taken_unit,
)
from oss_fused.kernels.pipeline import copy_box, descriptor, next_slot, ring_stages, sums_layout

# packed weights and scale words of a group's chunk
_CHUNK_BYTES = 64 * 64 + 64 * 4
# copies in which a tile's codes come, as many as its tokens take
_BOXES = 4
# of shared memory: barriers, and the exchange of a result's layout
_OTHER_BYTES = 12 * 1024


@gluon.jit
def _request(descs, ring, place, tile, unit, SHAPE: gl.constexpr, WITH_WEIGHTS: gl.constexpr):
    """One chunk into its slot: a tile's codes in as many boxes as they take, the groups' weights
    and scale words."""
    w_desc, s_desc, x_desc = descs
    weights, words, codes, full, _empty, _notes = ring
    slot, chunk = place
    expert, begin, boxes = tile
    STAGES: gl.constexpr = codes.type.shape[0]
    GROUPS: gl.constexpr = weights.type.shape[0] // STAGES
    ALL: gl.constexpr = SHAPE.n // 64
    BOX: gl.constexpr = x_desc.block_type.shape[0]
    MOST: gl.constexpr = codes.type.shape[1] // BOX
    OF_GROUP: gl.constexpr = w_desc.block_type.nbytes + s_desc.block_type.nbytes
    WEIGHTS: gl.constexpr = GROUPS * OF_GROUP if WITH_WEIGHTS else 0
    ready = full.index(slot)
    for count in gl.static_range(1, MOST + 1):
        mbarrier.expect(ready, WEIGHTS + count * x_desc.block_type.nbytes, pred=boxes == count)
    if WITH_WEIGHTS:
        for part in gl.static_range(GROUPS):
            group = expert * ALL + gl.minimum(unit * GROUPS + part, ALL - 1)
            at = slot * GROUPS + part
            copy_box(w_desc, [group * (SHAPE.k // 4) + chunk * 32, 0], ready, weights.index(at))
            row = (group * ((SHAPE.k + 127) // 128) + chunk) * 2
            copy_box(s_desc, [row, 0], ready, words.index(at))
    for box in gl.static_range(MOST):
        target = codes.index(slot).slice(box * BOX, BOX, dim=0)
        row = begin * SHAPE.levels + box * BOX
        copy_box(x_desc, [row, chunk * 128], ready, target, pred=box < boxes)


@gluon.jit
def _load(descs, ring, tiles, progress, units, SHAPE: gl.constexpr):
    """The loading warp: every chunk of every unit that it takes, once a slot is free."""
    STAGES: gl.constexpr = ring[2].type.shape[0]
    BOX: gl.constexpr = descs[2].block_type.shape[0] // SHAPE.levels
    WHOLE: gl.constexpr = SHAPE.k // 128
    SECOND: gl.constexpr = SHAPE.op is None
    empty, notes = ring[4], ring[5]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    wait_for_inputs()
    # not before: combine reads the routing ahead of its own wait
    start_next()
    total = gl.load(progress) * units
    index = gl.program_id(0)
    while index < total:
        at = tiles + index // units * 3
        expert = gl.load(at)
        begin = gl.load(at + 1)
        count = gl.load(at + 2)
        tile = (expert, begin, (count + BOX - 1) // BOX)
        unit = index % units
        mbarrier.wait(empty.index(slot), phase)
        announce(notes.index(slot), unit, expert, begin, count)
        asked = ask_for_unit(progress, SECOND)
        for chunk in range(WHOLE):
            mbarrier.wait(empty.index(slot), phase)
            _request(descs, ring, (slot, chunk), tile, unit, SHAPE, True)
            slot, phase = next_slot(slot, phase, STAGES)
        if SHAPE.k > WHOLE * 128:
            # the consumers load the weights of a chunk that is not whole themselves
            mbarrier.wait(empty.index(slot), phase)
            _request(descs, ring, (slot, WHOLE), tile, unit, SHAPE, False)
            slot, phase = next_slot(slot, phase, STAGES)
        index = taken_unit(asked, progress, total, SECOND)
    mbarrier.wait(empty.index(slot), phase)
    announce_end(notes.index(slot), ring[3].index(slot))


@gluon.jit
def _zeros(C0: gl.constexpr, C1: gl.constexpr):
    """Sums [64, C0], and [64, C1] where C1 is not 0."""
    first = gl.zeros([64, C0], gl.float32, layout=sums_layout(C0, 8))
    if C1 == 0:
        return (first,)
    else:
        return first, gl.zeros([64, C1], gl.float32, layout=sums_layout(C1, 8))


@gluon.jit
def _add(a, codes, sums, C0: gl.constexpr, C1: gl.constexpr):
    """``_zeros``' sums plus a chunk's products."""
    first = warpgroup_mma(a, codes.slice(0, C0, dim=0).permute((1, 0)), sums[0], is_async=True)
    # nothing may run past the wait: the next weights take the registers of these
    if C1 == 0:
        return (warpgroup_mma_wait(0, deps=[first]),)
    else:
        tokens = codes.slice(C0, C1, dim=0).permute((1, 0))
        second = warpgroup_mma(a, tokens, sums[1], is_async=True)
        return warpgroup_mma_wait(0, deps=[first, second])


@gluon.jit
def _multiply(
    weight,
    words,
    x_scale,
    ring,
    tile,
    slot,
    phase,
    SHAPE: gl.constexpr,
    PART: gl.constexpr,
    C0: gl.constexpr,
    C1: gl.constexpr,
):
    """Products [64, C0] and [64, C1] over all of K, scales of the first one's tokens, and the
    ring's next slot and phase."""
    codes, full, empty = ring[2], ring[3], ring[4]
    STAGES: gl.constexpr = codes.type.shape[0]
    GROUPS: gl.constexpr = ring[0].type.shape[0] // STAGES
    K: gl.constexpr = SHAPE.k
    WHOLE: gl.constexpr = K // 128
    product: gl.constexpr = sums_layout(C0, 8)
    if WHOLE * 128 < K:
        # on their way while the others are multiplied
        tail, tail_steps = load_chunk(weight, words, WHOLE, K)
    sums = _zeros(C0, C1)
    for _ in range(WHOLE):
        mbarrier.wait(full.index(slot), phase)
        at = slot * GROUPS + PART
        a = unpack_copied(ring[0].index(at), ring[1].index(at), product)
        sums = _add(a, codes.index(slot), sums, C0, C1)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    factors = token_scales(x_scale, tile[1], tile[2], C0 // SHAPE.levels, SHAPE.levels)
    if WHOLE * 128 < K:
        a = unpack(tail, tail_steps, product)
        mbarrier.wait(full.index(slot), phase)
        sums = _add(a, codes.index(slot), sums, C0, C1)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    return sums, factors, slot, phase


@gluon.jit
def _finish(acc, words, shift, factors, out, group, begin, count, SHAPE: gl.constexpr):
    """Scale, shift and store the products of one group."""
    acc = scaled(acc, words, shift, factors, SHAPE.levels)
    if SHAPE.op is None:
        store_rows(acc, out, group, begin, count, SHAPE.n)
    else:
        TOKENS: gl.constexpr = acc.type.shape[1]
        LAST: gl.constexpr = SHAPE.n // 64 - 1
        gate, up = gl.split(acc.reshape([2, 32, TOKENS]).permute((1, 2, 0)))
        store_codes(gate, up, out, group, begin, count, SHAPE.op, LAST, SHAPE.levels, SHAPE.dtype)


@gluon.jit
def _compute_group(
    ring,
    tensors,
    tile,
    group,
    slot,
    phase,
    SHAPE: gl.constexpr,
    PART: gl.constexpr,
    C0: gl.constexpr,
    C1: gl.constexpr,
):
    """Products of a row group with the first C0 + C1 columns of a tile, stored."""
    x_scale, weight, weight_scale, bias, out = tensors
    expert, begin, count = tile
    of_group = expert * (SHAPE.n // 64) + group
    words = weight_scale + of_group * ((SHAPE.k + 127) // 128 * 64)
    packed = weight + of_group * (8 * SHAPE.k)
    # what the sums will be multiplied with and moved by comes along with the weights
    row = gl.arange(0, 64, gl.SliceLayout(1, step_layout()))
    first_words = gl.load(words + row)
    shift = None
    if bias is not None:
        # with w13 a group holds 32 gates, then their ups
        column = row if SHAPE.op is None else row % 32 * 2 + row // 32
        shift = gl.load(bias + expert * SHAPE.n + group * 64 + column)
    sums, factors, slot, phase = _multiply(
        packed, words, x_scale, ring, tile, slot, phase, SHAPE, PART, C0, C1
    )
    _finish(sums[0], first_words, shift, factors, out, group, begin, count, SHAPE)
    if C1 > 0:
        begin += C0 // SHAPE.levels
        count -= C0 // SHAPE.levels
        factors = token_scales(x_scale, begin, count, C1 // SHAPE.levels, SHAPE.levels)
        _finish(sums[1], first_words, shift, factors, out, group, begin, count, SHAPE)
    return slot, phase


@gluon.jit
def _consume(work, SHAPE: gl.constexpr, NARROW: gl.constexpr, PART: gl.constexpr):
    """A consumer: row group ``CONSUMERS * unit + PART`` of every announced unit.

    With NARROW, tiles of few tokens take half of the columns, or three quarters.
    """
    ring, tensors = work
    full, notes = ring[3], ring[5]
    CONSUMERS: gl.constexpr = ring[0].type.shape[0] // ring[2].type.shape[0]
    C: gl.constexpr = ring[2].type.shape[1]
    QUARTER: gl.constexpr = C // SHAPE.levels // 4
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    unit, expert, begin, count = announced(notes.index(slot), full.index(slot), phase)
    while unit >= 0:
        tile = (expert, begin, count)
        # of groups that are not there the last is computed again: same inputs, same values
        group = gl.minimum(unit * CONSUMERS + PART, SHAPE.n // 64 - 1)
        if NARROW and (count <= 2 * QUARTER):
            slot, phase = _compute_group(
                ring, tensors, tile, group, slot, phase, SHAPE, PART, C // 2, 0
            )
        elif NARROW and (count <= 3 * QUARTER):
            slot, phase = _compute_group(
                ring, tensors, tile, group, slot, phase, SHAPE, PART, C // 2, C // 4
            )
        else:
            slot, phase = _compute_group(ring, tensors, tile, group, slot, phase, SHAPE, PART, C, 0)
        unit, expert, begin, count = announced(notes.index(slot), full.index(slot), phase)


@gluon.jit
def _make_ring(descs, STAGES: gl.constexpr, COLUMNS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Packed weights, scale words, codes; barriers between the loading warp and the consumers;
    what says to which unit chunks belong."""
    w_desc, s_desc, x_desc = descs
    PLACES: gl.constexpr = STAGES * CONSUMERS
    weights = gl.allocate_shared_memory(w_desc.dtype, [PLACES, 32, 32], w_desc.layout)
    words = gl.allocate_shared_memory(s_desc.dtype, [PLACES, 2, 32], s_desc.layout)
    codes = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # in one loop: with one for each ptxas spills registers of the consumers
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return weights, words, codes, full, empty, notes_of(STAGES)


@gluon.jit
def _stream_kernel(
    w_desc,
    s_desc,
    x_desc,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tiles,
    progress,
    SHAPE: gl.constexpr,
    NARROW: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products of sorted rows with w13, gated, or with w2."""
    units: gl.constexpr = (SHAPE.n // 64 + CONSUMERS - 1) // CONSUMERS
    descs = (w_desc, s_desc, x_desc)
    ring = _make_ring(descs, STAGES, COLUMNS, CONSUMERS)
    work = (ring, (x_scale, weight, weight_scale, bias, out))
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, SHAPE, NARROW, 0)),
                (_consume, (work, SHAPE, NARROW, 1)),
                (_consume, (work, SHAPE, NARROW, 2)),
                (_load, (descs, ring, tiles, progress, units, SHAPE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (work, SHAPE, NARROW, 0)),
                (_consume, (work, SHAPE, NARROW, 1)),
                (_consume, (work, SHAPE, NARROW, 2)),
                (_consume, (work, SHAPE, NARROW, 3)),
                (_load, (descs, ring, tiles, progress, units, SHAPE)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 32],
        )


def stream_product(
    codes: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    inner: int,
    dtype: torch.dtype,
    rows: int,
    narrow: bool,
) -> None:
    """Fill ``out`` as ``large_product`` does, for tiles of 32 to 128 tokens.

    Args:
        codes: e4m3 [P, levels, KP], sorted by expert.
        x_scale: float32 [P], or None for the static 1/8 of the gated codes.
        weight: repacked [E, N, K/2].
        weight_scale: repacked [E, N/64, chunks, 64].
        bias: [E, N] or None.
        out: float8_e4m3fn for the first product; [P, N] of any dtype for the second.
        routing: with tiles of ``rows`` tokens.
        inner: K.
        dtype: of the model, to which the intermediate is rounded.
        rows: tokens of a tile.
        narrow: tiles of few tokens take fewer columns; with more than 64 of them.
    """
    pairs, levels, padded = codes.shape
    width, n_tiles = weight.shape[1], routing.tiles.shape[0]
    # the sums of more columns take the registers of a fourth
    consumers = 4 if rows * levels <= 64 else 3
    act = out.shape[2] if out.dim() == 3 else None
    half = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    programs = min(multiprocessors(codes.device), n_tiles * cdiv(width // 64, consumers))
    packed, words = weight.view(torch.int32).view(-1, 32), weight_scale.view(-1, 32)
    w_layout, s_layout = gl.NVMMASharedLayout(128, 32), gl.NVMMASharedLayout(0, 32)
    _stream_kernel[(programs,)](
        TensorDescriptor(packed, list(packed.shape), [32, 1], [32, 32], w_layout),
        TensorDescriptor(words, list(words.shape), [32, 1], [2, 32], s_layout),
        descriptor(codes.view(pairs * levels, padded), rows * levels // _BOXES, 128),
        x_scale,
        weight.view(torch.int32),
        weight_scale,
        bias,
        out,
        routing.tiles,
        routing.progress,
        SHAPE=ProductShape(width, inner, act, levels, half),
        NARROW=narrow,
        COLUMNS=rows * levels,
        CONSUMERS=consumers,
        STAGES=ring_stages(consumers * _CHUNK_BYTES + rows * levels * 128, _OTHER_BYTES),
        num_warps=4,
        **pdl_options(codes.device),
    )
