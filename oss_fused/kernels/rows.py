# SPDX-License-Identifier: MIT
"""How kernels that reduce rows cut them into tiles."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from oss_fused.kernels.integers import next_power_of_2

# 64 float32 values in each of 512 threads; more would spill
_WHOLE = 32768
_TILE = 4096
# a CTA with fewer values than this takes several rows
_FEW = 1024


class RowTiles(NamedTuple):
    """Rows of a CTA, columns of its tile, whether one tile is the whole row, warps."""

    rows: int
    block: int
    whole: bool
    warps: int

    def even(self, rows: int, columns: int) -> bool:
        """Whether tiles of whole rows cover a matrix and nothing beyond it."""
        return self.whole and self.block == columns and rows % self.rows == 0


@triton.jit
def inside(in_rows, cols, n_cols, EVEN: tl.constexpr):
    """Where a tile lies in the matrix; EVEN: everywhere, so that no mask is compiled."""
    mask = in_rows & (cols < n_cols)
    if EVEN:
        mask = tl.full(mask.shape, True, tl.int1)
    return mask


def row_tiles(columns: int, whole: bool, pairs: bool = False) -> RowTiles:
    """Tiles of rows of ``columns`` values.

    Args:
        columns: values of a row.
        whole: in one tile where registers hold it.
        pairs: two rows of 4096 or 8192 values in a tile, which then read what belongs to columns
            once; else more warps for each.
    """
    block = next_power_of_2(columns)
    whole = whole and block <= _WHOLE
    if not whole:
        block = min(block, _TILE)
    long = whole and 4096 <= block <= 8192
    rows = 2 if pairs and long else max(1, _FEW // block)
    each = 1024 if whole and not (long and not pairs) else 512
    return RowTiles(rows, block, whole, min(max(rows * block // each, 1), 16))
