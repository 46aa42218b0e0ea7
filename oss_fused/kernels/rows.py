# SPDX-License-Identifier: MIT
"""How kernels that reduce rows cut them into tiles."""

from __future__ import annotations

from typing import NamedTuple

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


def row_tiles(columns: int, whole: bool) -> RowTiles:
    """Tiles of rows of ``columns`` values; ``whole``: in one tile where registers hold it."""
    block = next_power_of_2(columns)
    whole = whole and block <= _WHOLE
    if not whole:
        block = min(block, _TILE)
    rows = max(1, _FEW // block)
    return RowTiles(rows, block, whole, min(max(rows * block // (1024 if whole else 512), 1), 16))
