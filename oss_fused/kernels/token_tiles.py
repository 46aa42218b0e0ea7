# SPDX-License-Identifier: MIT
"""Storage for the codes of tokens that a product reads in tiles of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2

# rows of the smallest and of the largest tile
_LEAST, _TILE = 16, 128
# of more rows the last tile is one of many; a longer row is no token's
_MOST_ROWS, _MOST_COLUMNS = 1024, 65536


def empty_token_codes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Uninitialised e4m3 codes [..., C] of tokens, contiguous, in a storage of whole tiles.

    That is the next power of two of up to 128 rows, at least 16, and a multiple of 128 of up to
    1024. TMA is slower where a box ends outside of memory that it may read (docs/gemm.md). Not for
    weights, which would keep what they do not need.
    """
    rows = math.prod(shape[:-1])
    held = rows
    if rows <= _MOST_ROWS and shape and shape[-1] <= _MOST_COLUMNS:
        held = max(next_power_of_2(rows), _LEAST) if rows <= _TILE else cdiv(rows, _TILE) * _TILE
    if held == rows:
        return torch.empty(tuple(shape), dtype=FP8, device=device)
    return torch.empty(held, shape[-1], dtype=FP8, device=device).resize_(tuple(shape))
