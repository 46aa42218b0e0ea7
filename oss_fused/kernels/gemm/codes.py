# SPDX-License-Identifier: MIT
"""Codes of one row, made by each CTA of a product while its weights are on their way.

A tile of tokens has eight rows at least (the tensor cores' narrow side). Those that the row and its
levels leave over have copies, or, where shared memory is short, other columns: each PARTS-th part
of K then lies in rows of its own, and sums of other parts are dropped.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from oss_fused.kernels.numerics import magnitude_bits, quantize_dynamic, scale_of_amax, two_levels
from oss_fused.kernels.pipeline import meet, next_slot, view_as
from oss_fused.kernels.ring import WIDTH, add_stage, ring_layout

# the fewest rows of tokens that a product takes
LEAST_ROWS = 8
_ROWS, _WIDTH = gl.constexpr(LEAST_ROWS), gl.constexpr(WIDTH)


@gluon.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@gluon.jit
def make_code_tiles(TILES: gl.constexpr, SLICES: gl.constexpr):
    """Room for TILES tiles of 8 rows of each slice of K."""
    layout: gl.constexpr = gl.NVMMASharedLayout(_WIDTH, 8)
    return gl.allocate_shared_memory(gl.float8e4nv, [TILES, SLICES * _ROWS, _WIDTH], layout)


@gluon.jit
def store_codes(
    row,
    columns,
    length,
    tiles,
    LEVELS: gl.constexpr,
    SLICES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Quantise ``columns`` values of 16 bits from ``row`` on into ``tiles``; returns the scale.

    A slice of K has ``length`` columns. Row (slice, copy, part, level) of tile i has those from
    128 * i on of its part of its slice; the number of tiles is a power of two.
    """
    TILES: gl.constexpr = tiles.type.shape[0]
    COPIES: gl.constexpr = _ROWS // (LEVELS * PARTS)
    SHARE: gl.constexpr = PARTS * TILES * _WIDTH
    # 16 codes of a thread are one store
    layout: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    place = gl.arange(0, SLICES * SHARE, layout)
    column = place // SHARE * length + place % SHARE
    inside = (place % SHARE < length) & (column < columns)
    values = gl.load(row + column, mask=inside, other=0.0).to(gl.float32)
    bits = gl.max(magnitude_bits(values), 0)
    if LEVELS == 1:
        scale = scale_of_amax(bits)
        codes = quantize_dynamic(values, gl.div_rn(1.0, scale))
    else:
        first, second, scale = two_levels(values, bits)
        codes = gl.join(first, second)
    for _ in gl.static_range(_log2(COPIES)):
        codes = gl.join(codes, codes)
    codes = codes.reshape([SLICES, PARTS, TILES, _WIDTH, LEVELS, COPIES])
    flat: gl.constexpr = [TILES * SLICES * _ROWS, _WIDTH]
    codes = codes.permute((2, 0, 5, 1, 4, 3)).reshape(flat)
    view_as(tiles, tiles.dtype, flat, tiles.layout).store(codes)
    # the tensor cores read what threads wrote
    fence_async_shared()
    meet()
    return scale


@gluon.jit
def sum_parts(ring, k, LEVELS: gl.constexpr):
    """As ``sum_ring``, of tiles that hold all codes: [rows of weights, rows of a tile].

    Sums of a part are in its columns of the first copy, the others are 0.
    """
    tiles, weights, full, _empty = ring
    STAGES: gl.constexpr = full.type.shape[0]
    SLABS: gl.constexpr = weights.type.shape[0] // STAGES
    ROWS: gl.constexpr = weights.type.shape[1]
    COLUMNS: gl.constexpr = tiles.type.shape[1]
    PART: gl.constexpr = tiles.type.shape[0] * _WIDTH
    layout: gl.constexpr = ring_layout(COLUMNS, gl.num_warps())
    of_part = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)) % _ROWS // LEVELS
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout=layout)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for part in range(0, gl.cdiv(k, PART)):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=layout)
        for start in range(0, gl.minimum(k - part * PART, PART), SLABS * _WIDTH):
            acc = add_stage(acc, ring, slot, phase, start // _WIDTH, part + start > 0)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        total = gl.where((of_part == part)[None, :], acc, total)
    return total
