# SPDX-License-Identifier: MIT
"""Tiles of a paged cache for decode attention: pages, addresses of rows, pairs of FP8 columns.

A tile has BLOCK_N positions; each of WARPS warps has BLOCK_N / WARPS of them to itself.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from oss_fused.kernels.numerics import INTERPRETED, from_fp8, widened


def positions_in_a_page(window: int, page_size: int, each: int) -> int:
    """How many of ``each`` positions in a row surely lie in one page, from a multiple of it on.

    The first position that a window sees is any.
    """
    return 1 if window else math.gcd(page_size, each)


@triton.jit
def tile_positions(begin, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, RUN: tl.constexpr):
    """First of each RUN positions of a tile: [WARPS, per warp], or [BLOCK_N / RUN] of one warp."""
    first = tl.arange(0, BLOCK_N // RUN) * RUN
    if WARPS > 1:
        first = tl.reshape(first, WARPS, BLOCK_N // WARPS // RUN)
    return begin + first


@triton.jit
def load_pages(
    table,
    begin,
    end,
    page_size: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Page of each RUN positions of the tile from ``begin`` on."""
    first = tile_positions(begin, BLOCK_N, WARPS, RUN)
    return tl.load(table + first // page_size, mask=first < end, other=0)


@triton.jit
def _spread(runs, inside, positions):
    """``runs`` [..., n] + ``inside`` [RUN] as one number for each of ``positions`` [..., n * RUN].

    Reshaped before strides multiply it: the compiler then knows that rows are aligned.
    """
    return tl.reshape(tl.expand_dims(runs, -1) + inside, positions.shape)


@triton.jit
def find_rows(
    keys,
    values,
    pages,
    begin,
    end,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Offsets [..., positions, 1] of rows of keys and values; which are before ``end``."""
    positions = tile_positions(begin, BLOCK_N, WARPS, 1)
    first = tile_positions(begin, BLOCK_N, WARPS, RUN)
    inside = tl.arange(0, RUN)
    slots = _spread(first % keys.page_size, inside, positions)
    pages = _spread(pages, inside * 0, positions).to(tl.int64)
    k_rows = pages * keys.block_stride + slots * keys.page_stride
    v_rows = pages * values.block_stride + slots * values.page_stride
    valid = tl.expand_dims(positions < end, -1)
    return tl.expand_dims(k_rows, -1), tl.expand_dims(v_rows, -1), valid


@triton.jit
def load_as(pointers, mask, dtype: tl.constexpr):
    """Values that a product takes; e4m3 -> ``dtype`` is exact."""
    tile = tl.load(pointers, mask=mask, other=0.0)
    if tile.dtype != tl.float8e4nv:
        return tile.to(dtype)
    if INTERPRETED:
        return from_fp8(tile).to(dtype)
    else:
        return widened(tile, dtype)


@triton.jit
def unpack_pairs(codes, dtype: tl.constexpr):
    """The even and the odd columns of rows of e4m3 that were loaded as int16; exact.

    Tensor cores want a pair of neighbouring rows in each register. Words of 16 bits come transposed
    out of shared memory, single bytes do not; one permutation then makes pairs of rows.
    """
    if INTERPRETED:
        even = (codes & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = ((codes >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return from_fp8(even).to(dtype), from_fp8(odd).to(dtype)
    even, odd = tl.inline_asm_elementwise(
        """{
        .reg .b32 rows;
        .reg .b16 low, high;
        prmt.b32 rows, $2, 0, 0x3120;
        mov.b32 {low, high}, rows;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [codes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return widened(even, dtype), widened(odd, dtype)
