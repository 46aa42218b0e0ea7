# SPDX-License-Identifier: MIT
"""Splits of one head's positions: what each leaves, and the last one's sum of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Splits(NamedTuple):
    """What splits of one head leave for the last of them; arrivals [programs * Hkv] counts them.

    sums [slots, ROWS, BLOCK_D] and stats [slots, ROWS, 2] (maximum, weight) are float32.
    """

    arrivals: Any
    sums: Any
    stats: Any


@triton.jit
def leave(splits, slot, best, total, acc, used, ROWS: tl.constexpr):
    """Leave the rows of this split that are ``used``; returns how many had arrived before it."""
    BLOCK_D: tl.constexpr = acc.shape[1]
    lanes, columns = tl.arange(0, acc.shape[0]), tl.arange(0, BLOCK_D)
    here = (slot * tl.num_programs(2) + tl.program_id(2)) * ROWS + lanes
    sums = splits.sums + (here[:, None] * BLOCK_D + columns[None, :])
    tl.store(sums, acc, mask=used[:, None])
    tl.store(splits.stats + here * 2, best, mask=used)
    tl.store(splits.stats + here * 2 + 1, total, mask=used)
    # every thread's stores come before the arrival that announces them
    tl.debug_barrier()
    return tl.atomic_add(splits.arrivals + slot, 1, sem="acq_rel", scope="gpu")


@triton.jit
def gather(
    splits,
    slot,
    active,
    used,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Maximum, weight and weighted sum of all splits of a head, in their order; count anew.

    AT_ONCE splits are read together: one wait for memory, and not one per split.
    """
    tl.store(splits.arrivals + slot, 0)
    ROWS: tl.constexpr = used.shape[0]
    best = tl.full([ROWS], LEAST, tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
    lanes, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    for start in range(0, active, AT_ONCE):
        for other in tl.static_range(AT_ONCE):
            there = (slot * tl.num_programs(2) + start + other) * ROWS + lanes
            valid = used & (start + other + lanes * 0 < active)
            stats = splits.stats + there * 2
            other_best = tl.load(stats, mask=valid, other=LEAST, cache_modifier=".cg")
            other_total = tl.load(stats + 1, mask=valid, other=0.0, cache_modifier=".cg")
            sums = splits.sums + (there[:, None] * BLOCK_D + columns[None, :])
            other_acc = tl.load(sums, mask=valid[:, None], other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, other_best)
            shrink = tl.exp2(best - new_best)
            grow = tl.exp2(other_best - new_best)
            total = total * shrink + other_total * grow
            acc = acc * shrink[:, None] + other_acc * grow[:, None]
            best = new_best
    return best, total, acc
