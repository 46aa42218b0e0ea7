# SPDX-License-Identifier: MIT
"""The ring of a product of few rows: one warp brings boxes of weights and tokens, others multiply.

A stage holds SLABS tiles of 128 columns, which arrive together: every wait costs the CTA two
barriers. A tile of weights is one box or several, from places that are equally far apart; so is
one of tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.launch import wait_for_inputs, wait_unless
from oss_fused.kernels.pipeline import (
    barriers_of,
    copy_box,
    early_stages,
    free_previous,
    next_slot,
)

# columns of a box
WIDTH = 128


@gluon.jit
def make_tiles(desc, COUNT: gl.constexpr, BOXES: gl.constexpr):
    """Room for COUNT tiles of BOXES boxes each, one above the other."""
    ROWS: gl.constexpr = BOXES * desc.block_type.shape[0]
    shape: gl.constexpr = [COUNT, ROWS, desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_ring(
    tokens,
    b_desc,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    BOXES: gl.constexpr,
    WHOLE: gl.constexpr = False,
):
    """(tokens, weights, full, empty): a stage has SLABS tiles of weights, of BOXES boxes each.

    ``tokens``: as many tiles, which come with the weights, or those of all columns (gemm/codes.py).
    ``empty``: barriers in a tuple; none where the ring holds the WHOLE of K, so that no stage is
    filled again and none has to be waited for.
    """
    weights = make_tiles(b_desc, STAGES * SLABS, BOXES)
    full = barriers_of(STAGES, 1)
    if WHOLE:
        return tokens, weights, full, ()
    else:
        return tokens, weights, full, (barriers_of(STAGES, 1),)


@gluon.jit
def _box(desc, tiles, slot, index: gl.constexpr, at, step, SLABS: gl.constexpr):
    """Place in memory, and in the slot, of box ``index`` of the slot's tiles."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    BOXES: gl.constexpr = tiles.type.shape[1] // ROWS
    slab: gl.constexpr = index // BOXES
    box: gl.constexpr = index % BOXES
    column = at[1] + box * step[1] + slab * desc.block_type.shape[1]
    tile = tiles.index(slot * SLABS + slab)
    return [at[0] + box * step[0], column], tile.slice(box * ROWS, ROWS, dim=0)


# two functions, so that the test of early loads tells weights from tokens
@gluon.jit
def _request_weights(b_desc, ring, slot, at, step, pred, SLABS: gl.constexpr):
    """Ask for a slot's weights: box i of a tile begins i times ``step`` behind ``at``."""
    BOXES: gl.constexpr = ring[1].type.shape[1] // b_desc.block_type.shape[0]
    for index in gl.static_range(SLABS * BOXES):
        place, box = _box(b_desc, ring[1], slot, index, at, step, SLABS)
        copy_box(b_desc, place, ring[2].index(slot), box, pred=pred)


@gluon.jit
def _request_tokens(a_desc, ring, slot, at, step, pred, SLABS: gl.constexpr):
    """Ask for a slot's tokens, as ``_request_weights`` does."""
    BOXES: gl.constexpr = ring[0].type.shape[1] // a_desc.block_type.shape[0]
    for index in gl.static_range(SLABS * BOXES):
        place, box = _box(a_desc, ring[0], slot, index, at, step, SLABS)
        copy_box(a_desc, place, ring[2].index(slot), box, pred=pred)


@gluon.jit
def load_ring(a_desc, b_desc, ring, warm, first, steps, k, PREFETCH: gl.constexpr):
    """The loading warp: ``k`` columns of tokens and weights.

    ``first``: row of the tokens, row of the weights, and column of both. ``steps``: rows and
    columns from one box of a tile of tokens to the next, and of weights. Without ``a_desc`` the
    multiplying warps have the tokens.
    """
    first_row, first_n, first_k = first
    tokens, weights, full, empty = ring
    STAGES: gl.constexpr = full.type.shape[0]
    SLABS: gl.constexpr = weights.type.shape[0] // STAGES
    STEP: gl.constexpr = SLABS * b_desc.block_type.shape[1]
    OF_TOKENS: gl.constexpr = 0 if a_desc is None else tokens.type.shape[1]
    TILE_ROWS: gl.constexpr = OF_TOKENS + weights.type.shape[1]
    EARLY: gl.constexpr = early_stages(STAGES)
    wait_unless(PREFETCH)
    for slot in gl.static_range(EARLY):
        start = slot * STEP
        mbarrier.expect(full.index(slot), TILE_ROWS * STEP, pred=start < k)
        place = (first_n, first_k + start)
        _request_weights(b_desc, ring, slot, place, steps[1], start < k, SLABS)
    if a_desc is not None:
        # a box outside of the tensor reads no input, and has the descriptor in its cache from here
        # on
        mbarrier.expect(warm, a_desc.block_type.nbytes)
        box = tokens.index(0).slice(0, a_desc.block_type.shape[0], dim=0)
        copy_box(a_desc, [1 << 30, 0], warm, box)
        mbarrier.wait(warm, 0)
    wait_for_inputs()
    if a_desc is not None:
        for slot in gl.static_range(EARLY):
            start = slot * STEP
            place = (first_row, first_k + start)
            _request_tokens(a_desc, ring, slot, place, steps[0], start < k, SLABS)
    slot = gl.to_tensor(EARLY % STAGES)
    phase = gl.to_tensor(1 if EARLY < STAGES else 0)
    for start in range(EARLY * STEP, k, STEP):
        if len(empty) > 0:
            # of a slot that was never filled this passes at once
            mbarrier.wait(empty[0].index(slot), phase)
        mbarrier.expect(full.index(slot), TILE_ROWS * STEP)
        place = (first_n, first_k + start)
        _request_weights(b_desc, ring, slot, place, steps[1], True, SLABS)
        if a_desc is not None:
            place = (first_row, first_k + start)
            _request_tokens(a_desc, ring, slot, place, steps[0], True, SLABS)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.constexpr_function
def ring_layout(rows, warps):
    """Layout of the sums of a tile of ``rows`` rows of tokens, of which a warpgroup has a share."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, rows // groups, 32])


@gluon.jit
def add_stage(acc, ring, slot, phase, tile, pred):
    """``acc`` and the products of a slot's weights with the tokens' tiles from ``tile`` on.

    Hands the slot before back to the loading warp where ``pred``, unless the ring holds all of K.
    """
    tokens, weights, full, empty = ring
    STAGES: gl.constexpr = full.type.shape[0]
    SLABS: gl.constexpr = weights.type.shape[0] // STAGES
    mbarrier.wait(full.index(slot), phase)
    for slab in gl.static_range(SLABS):
        x = tokens.index(tile + slab).permute((1, 0))
        acc = warpgroup_mma(weights.index(slot * SLABS + slab), x, acc, is_async=True)
    acc = warpgroup_mma_wait(SLABS, deps=[acc])
    if len(empty) > 0:
        free_previous(empty[0], slot, STAGES, pred)
    return acc


@gluon.jit
def sum_ring(ring, k):
    """Sums [rows of weights, rows of tokens] float32 of ``k`` columns that the ring brings."""
    tokens, weights, full, _empty = ring
    STAGES: gl.constexpr = full.type.shape[0]
    SLABS: gl.constexpr = weights.type.shape[0] // STAGES
    ROWS: gl.constexpr = weights.type.shape[1]
    TOKENS: gl.constexpr = tokens.type.shape[1]
    layout: gl.constexpr = ring_layout(TOKENS, gl.num_warps())
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=layout)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for start in range(0, k, SLABS * tokens.type.shape[2]):
        acc = add_stage(acc, ring, slot, phase, slot * SLABS, start > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    return warpgroup_mma_wait(0, deps=[acc])
