# SPDX-License-Identifier: MIT
"""Which experts a token chooses: the order of its logits, and of one token the choice itself.

The kernels of a step of one token need no launch that routes: each computes the choice from the
token's logits. Its pairs stay in the order of their slots, so that slot s is tile s and row s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.numerics import sort_keys


@triton.jit
def ranked(logits, EXPERTS: tl.constexpr):
    """Values of one token's logits and their ranks: 0 for the largest, the lower expert first among
    equals; [EXPERTS], rounded up to a power of two."""
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    column = tl.arange(0, PADDED)
    value, key = sort_keys(tl.load(logits + column, mask=column < EXPERTS, other=float("-inf")))
    # below the key of -inf
    key = tl.where(column < EXPERTS, key, -2147483648)
    first = (key[None, :] == key[:, None]) & (column[None, :] < column[:, None])
    rank = tl.sum(((key[None, :] > key[:, None]) | first).to(tl.int32), 1)
    return value, rank


@triton.jit
def chosen_expert(logits, slot, EXPERTS: tl.constexpr):
    """The expert of a token's ``slot``."""
    _, rank = ranked(logits, EXPERTS)
    return tl.sum(tl.where(rank == slot, tl.arange(0, rank.shape[0]), 0), 0)


@triton.jit
def load_tile(tiles, EXPERTS: tl.constexpr):
    """(expert, first position, rows) of this program's tile.

    With EXPERTS ``tiles`` are the logits [1, EXPERTS] of one token.
    """
    if EXPERTS > 0:
        slot = tl.program_id(1)
        return chosen_expert(tiles, slot, EXPERTS), slot, 1
    else:
        tile = tiles + tl.program_id(1) * 3
        return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
