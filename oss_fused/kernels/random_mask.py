# SPDX-License-Identifier: MIT
"""Dropout masks as a function of seed and position: no state, and backward repeats the mask.

An element is kept where a 32-bit hash of (seed, row, column) is at least ``p * 2**32``. The hash is
the permutation "lowbias32" (https://github.com/skeeto/hash-prospector) applied to row and column in
turn; kernels/numerics.py has the same arithmetic for kernels. Columns are below 2**32.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    """The permutation of 32-bit numbers, held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    # wraps modulo 2**64, which leaves the low 32 bits right
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def fold_seed(seed: int) -> int:
    """``seed`` as a signed 32-bit number: a kernel's argument of one type for every seed."""
    folded = (seed ^ ((seed >> 32) * 0x9E3779B1)) & _MASK
    return folded - (1 << 32) if folded >> 31 else folded


def drop_threshold(p: float) -> int:
    """Hashes below it are dropped: 0 for p = 0, below 2**32 for p < 1."""
    return int(p * 2.0**32)


def keep_mask(seed: int, rows: torch.Tensor, columns: torch.Tensor, p: float) -> torch.Tensor:
    """Whether each element is kept; ``rows`` and ``columns`` are int64 and broadcast together."""
    row_key = mix_bits((fold_seed(seed) & _MASK) ^ mix_bits((rows & _MASK) ^ mix_bits(rows >> 32)))
    column_key = mix_bits(columns ^ 0x1E3779B9)
    return mix_bits(row_key ^ column_key) >= drop_threshold(p)
