# SPDX-License-Identifier: MIT
"""Grouped products of the experts for many tokens, in Gluon: one warp loads, eight multiply.

A persistent program takes 128 weight rows and the tokens of one tile, sorted by expert and
encoded as e4m3 codes. One warp copies the tokens' codes into a ring of shared-memory buffers
(pipeline.py); two warpgroups of 64 weight rows each read the packed weights of their rows
straight into registers, two chunks ahead, and unpack one chunk while the tensor cores multiply
the chunk before it. moe/gemm.py says what levels are, moe/tile.py in which order columns lie.
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

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.gluon_tile import (
    ProductShape,
    load_chunk,
    row_scale,
    store_codes,
    unpack,
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
from oss_fused.kernels.pipeline import copy_box, descriptor, next_slot

_STAGES = 5


@gluon.jit
def _load_tokens(desc, ring, tiles, progress, units, SHAPE: gl.constexpr):
    """The loading warp: every chunk of tokens of every unit that it takes."""
    buffers, full, empty, notes = ring
    STAGES: gl.constexpr = buffers.type.shape[0]
    SECOND: gl.constexpr = SHAPE.op is None
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    wait_for_inputs()
    # not before: combine reads the routing ahead of its own wait
    start_next()
    total = gl.load(progress) * units
    index = gl.program_id(0)
    while index < total:
        at = tiles + index // units * 3
        begin = gl.load(at + 1)
        mbarrier.wait(empty.index(slot), phase)
        announce(notes.index(slot), index % units, gl.load(at), begin, gl.load(at + 2))
        asked = ask_for_unit(progress, SECOND)
        for start in range(0, SHAPE.k, 128):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, desc.block_type.nbytes)
            copy_box(desc, [begin * SHAPE.levels, start], ready, buffers.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
        index = taken_unit(asked, progress, total, SECOND)
    mbarrier.wait(empty.index(slot), phase)
    announce_end(notes.index(slot), full.index(slot))


@gluon.jit
def _issue(a, buffers, slot, acc, COLUMNS: gl.constexpr):
    """Start the product of a chunk, and wait for the one before, which has other registers.

    Without a wait between the products ptxas makes each of them wait for its end.
    """
    tokens = buffers.index(slot).slice(0, COLUMNS, dim=0).permute((1, 0))
    acc = warpgroup_mma(a, tokens, acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def _multiply(
    weight,
    words,
    ring,
    slot,
    phase,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
    STEP: gl.constexpr,
):
    """Products [64, COLUMNS] of one tile over all of K, and the ring's next slot and phase.

    In steps of STEP chunks: within a step, a chunk is unpacked while the one before is multiplied.
    """
    buffers, full, empty, _notes = ring
    STAGES: gl.constexpr = buffers.type.shape[0]
    CHUNKS: gl.constexpr = (K + 127) // 128
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    packed, steps = load_chunk(weight, words, 0, K)
    packed1, steps1 = load_chunk(weight, words, 1, K)
    acc = gl.zeros([64, COLUMNS], gl.float32, layout=product)
    for start in range(0, CHUNKS // STEP * STEP, STEP):
        first = slot
        for chunk in gl.static_range(STEP):
            a = unpack(packed, steps, product)
            packed, steps = packed1, steps1
            packed1, steps1 = load_chunk(weight, words, start + chunk + 2, K)
            mbarrier.wait(full.index(slot), phase)
            acc = _issue(a, buffers, slot, acc, COLUMNS)
            slot, phase = next_slot(slot, phase, STAGES)
        # nothing may run past this: the next weights take the registers of these
        acc = warpgroup_mma_wait(0, deps=[acc])
        for chunk in gl.static_range(STEP):
            mbarrier.arrive(empty.index((first + chunk) % STAGES), count=1)
    for chunk in gl.static_range(CHUNKS // STEP * STEP, CHUNKS):
        a = unpack(packed, steps, product)
        packed, steps = packed1, steps1
        packed1, steps1 = load_chunk(weight, words, chunk + 2, K)
        mbarrier.wait(full.index(slot), phase)
        acc = _issue(a, buffers, slot, acc, COLUMNS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _store_gated(acc, words, x_scale, bias, out, group, begin, count, SHAPE: gl.constexpr):
    """Clamped SwiGLU of [64, tokens] products; codes [P, LEVELS, OP] in the order of columns."""
    TOKENS: gl.constexpr = acc.type.shape[1]
    pairs = acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)).reshape([32, TOKENS, 2])
    gate, up = gl.split(pairs)
    layout: gl.constexpr = gate.type.layout
    row = gl.arange(0, 32, gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    scale = gl.load(x_scale + begin + token, mask=token < count, other=0.0)[None, :]
    gate *= row_scale(gl.load(words + row))[:, None] * scale
    up *= row_scale(gl.load(words + row + 32))[:, None] * scale
    if bias is not None:
        shift = bias + 2 * (group * 32 + row)
        gate += gl.load(shift).to(gl.float32)[:, None]
        up += gl.load(shift + 1).to(gl.float32)[:, None]
    LAST: gl.constexpr = SHAPE.n // 64 - 1
    store_codes(gate, up, out, group, begin, count, SHAPE.op, LAST, SHAPE.levels, SHAPE.dtype)


@gluon.jit
def _store_rows(acc, words, x_scale, bias, out, group, begin, count, N: gl.constexpr):
    """out[begin + token, group * 64 + row] of [64, tokens] products, rounded to out's dtype."""
    TOKENS: gl.constexpr = acc.type.shape[1]
    acc = acc.reshape([4, 2, 8, TOKENS]).permute((1, 0, 2, 3)).reshape([64, TOKENS])
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    acc *= (row_scale(gl.load(words + row)) * 0.125)[:, None]
    if bias is not None:
        acc += gl.load(bias + group * 64 + row).to(gl.float32)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    column = group * 64 + gl.arange(0, 64, gl.SliceLayout(1, stored))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    rows = (begin + token).to(gl.int64) * N
    mask = (token < count)[None, :] & (column >= 0)[:, None]
    rounded = gl.convert_layout(acc.to(out.dtype.element_ty), stored)
    gl.store(out + rows[None, :] + column[:, None], rounded, mask=mask)


@gluon.jit
def _compute_group(
    ring,
    tensors,
    tile,
    group,
    slot,
    phase,
    SHAPE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STEP: gl.constexpr,
):
    """Products of a row group with the first COLUMNS columns of a tile, stored."""
    x_scale, weight, weight_scale, bias, out = tensors
    expert, begin, count = tile
    of_group = expert * (SHAPE.n // 64) + group
    words = weight_scale + of_group * ((SHAPE.k + 127) // 128 * 64)
    packed = weight + of_group * (8 * SHAPE.k)
    acc, slot, phase = _multiply(packed, words, ring, slot, phase, SHAPE.k, COLUMNS, STEP)
    if SHAPE.levels == 2:
        first, second = gl.split(acc.reshape([64, COLUMNS // 2, 2]))
        acc = first + second * 0.0625
    shift = bias
    if bias is not None:
        shift = bias + expert * SHAPE.n
    if SHAPE.op is None:
        _store_rows(acc, words, x_scale, shift, out, group, begin, count, SHAPE.n)
    else:
        _store_gated(acc, words, x_scale, shift, out, group, begin, count, SHAPE)
    return slot, phase


@gluon.jit
def _consume(
    work, SHAPE: gl.constexpr, NARROW: gl.constexpr, STEP: gl.constexpr, PART: gl.constexpr
):
    """A warpgroup: row group ``2 * unit + PART`` of every announced unit.

    With NARROW, tiles of few tokens (mostly an expert's last) take a half or quarter of columns.
    """
    ring, tensors = work
    buffers, full, _empty, notes = ring
    COLUMNS: gl.constexpr = buffers.type.shape[1]
    TOKENS: gl.constexpr = COLUMNS // SHAPE.levels
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    unit, expert, begin, count = announced(notes.index(slot), full.index(slot), phase)
    while unit >= 0:
        tile = (expert, begin, count)
        # of an odd number of groups the last is computed twice: same inputs, same values
        group = gl.minimum(unit * 2 + PART, SHAPE.n // 64 - 1)
        if NARROW and (count <= TOKENS // 4):
            slot, phase = _compute_group(
                ring, tensors, tile, group, slot, phase, SHAPE, COLUMNS // 4, STEP
            )
        elif NARROW and (count <= TOKENS // 2):
            slot, phase = _compute_group(
                ring, tensors, tile, group, slot, phase, SHAPE, COLUMNS // 2, STEP
            )
        else:
            slot, phase = _compute_group(
                ring, tensors, tile, group, slot, phase, SHAPE, COLUMNS, STEP
            )
        unit, expert, begin, count = announced(notes.index(slot), full.index(slot), phase)


@gluon.jit
def _large_kernel(
    desc,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tiles,
    progress,
    SHAPE: gl.constexpr,
    NARROW: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products of sorted rows with w13, gated, or with w2."""
    units: gl.constexpr = (SHAPE.n // 64 + 1) // 2
    buffers = gl.allocate_shared_memory(
        desc.dtype, [STAGES, desc.block_type.shape[0], 128], desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    ring = (buffers, full, empty, notes_of(STAGES))
    work = (ring, (x_scale, weight, weight_scale, bias, out))
    gl.warp_specialize(
        [
            (_consume, (work, SHAPE, NARROW, STEP, 0)),
            (_consume, (work, SHAPE, NARROW, STEP, 1)),
            (_load_tokens, (desc, ring, tiles, progress, units, SHAPE)),
        ],
        [4, 1],
        [240, 24],
    )


def large_product(
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
    few_tiles: bool,
) -> None:
    """Fill ``out``: codes [P, levels, OP] of the gated product, or rows [P, N] of the second.

    Args:
        codes: e4m3 [P, levels, KP], sorted by expert.
        x_scale: float32 [P], or None for the static 1/8 of the gated codes.
        weight: repacked [E, N, K/2].
        weight_scale: repacked [E, N/64, chunks, 64].
        bias: [E, N] or None.
        out: float8_e4m3fn for the first product, half precision for the second.
        routing: with tiles of ``rows`` tokens.
        inner: K.
        dtype: of the model, to which the intermediate is rounded.
        rows: 64 or 128 with two levels, 128 or 256 with one.
        few_tiles: an expert has few of them, so that its last one weighs.
    """
    pairs, levels, padded = codes.shape
    width, n_tiles = weight.shape[1], routing.tiles.shape[0]
    act = out.shape[2] if out.dim() == 3 else None
    half = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    shape = ProductShape(width, inner, act, levels, half)
    programs = min(multiprocessors(codes.device), n_tiles * cdiv(width // 64, 2))
    _large_kernel[(programs,)](
        descriptor(codes.view(pairs * levels, padded), rows * levels, 128),
        x_scale,
        weight.view(torch.int32),
        weight_scale,
        bias,
        out,
        routing.tiles,
        routing.progress,
        SHAPE=shape,
        NARROW=few_tiles or levels == 1,
        STEP=2 if few_tiles else 1,
        STAGES=_STAGES,
        num_warps=4,
        **pdl_options(codes.device),
    )
