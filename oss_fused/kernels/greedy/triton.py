# SPDX-License-Identifier: MIT
"""``greedy_tokens`` in one launch.

A program finds the largest value of some columns and its first column; the last program of a row to
arrive compares those of all. Their integers hold a value's order and, below it, its column: one
maximum finds both.

A program is one warp that keeps its values in registers: it reduces without shared memory, and what
it does once costs little beside its 4096 values of 16 bits. A value takes part in a maximum and in
a comparison, both of which do pairs of 16 bits at once, and in the choice of a column. A sort key
of each value and its column are over 20 instructions; an H200 reads 2.6 times as fast as it does
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import INTERPRETED, sort_keys

# bytes of a program, and of one load of its warp
_BYTES = 8192
_LOAD = 512


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values):
    """The largest of float32 ``values`` [CHUNKS, WIDTH], or NaN where one is."""
    if INTERPRETED:
        # there a reduction by _larger takes one value at a time, and tl.max leaves NaN out
        ordered = tl.min(tl.min((values == values).to(tl.int32), 0), 0)
        numbers = tl.where(values == values, values, float("-inf"))
        return tl.where(ordered == 1, tl.max(tl.max(numbers, 0), 0), float("nan"))
    else:
        return tl.reduce(values, None, _larger)


@triton.jit
def _first(hit):
    """The first column, row by row, in which ``hit`` [CHUNKS, WIDTH] is true; one must be."""
    CHUNKS: tl.constexpr = hit.shape[0]
    WIDTH: tl.constexpr = hit.shape[1]
    # a thread holds all chunks of its columns: constants are selected
    chunk = tl.min(tl.where(hit, tl.arange(0, CHUNKS)[:, None], CHUNKS), 0)
    return tl.min(chunk * WIDTH + tl.arange(0, WIDTH), 0)


@triton.jit(do_not_specialize=["parts"])
def _greedy_kernel(
    logits,
    best,
    arrivals,
    offsets,
    tokens,
    columns,
    parts,
    stride,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * (CHUNKS * WIDTH)
    column = begin + tl.arange(0, CHUNKS)[:, None] * WIDTH + tl.arange(0, WIDTH)
    wait_for_inputs()
    start_next()
    # what is not there is nowhere the first of equals
    loaded = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf"))
    values = loaded.to(tl.float32)
    # rounding changes nothing, and tells the compiler that it can compare pairs of 16 bits
    value = _largest(values).to(loaded.dtype).to(tl.float32)
    # only NaN differs from itself
    if value == value:
        first = _first(values == value)
    else:
        first = _first(values != values)
    _, largest = sort_keys(value)
    # the lower column among equal values
    lower = 0x7FFFFFFF - begin - first
    tl.store(best + row * parts + part, (largest.to(tl.int64) << 32) | lower.to(tl.int64))
    # the store comes before the arrival that announces it
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.store(arrivals + row, 0)
        nth = tl.arange(0, PARTS)
        found = tl.load(
            best + row * parts + nth,
            mask=nth < parts,
            other=-9223372036854775808,
            cache_modifier=".cg",
        )
        token = 0x7FFFFFFF - (tl.max(found, 0) & 0x7FFFFFFF)
        if offsets is not None:
            token += tl.load(offsets + token)
        tl.store(tokens + row, token)


def greedy_tokens(
    logits: torch.Tensor, arrivals: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """The likeliest tokens; see kernels/greedy for the contract."""
    rows, columns = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    size, width = _BYTES // logits.itemsize, _LOAD // logits.itemsize
    parts = cdiv(columns, size)
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _greedy_kernel[(rows, parts)](
        logits,
        best,
        arrivals,
        offsets,
        tokens,
        columns,
        parts,
        logits.stride(0),
        CHUNKS=size // width,
        WIDTH=width,
        PARTS=next_power_of_2(parts),
        num_warps=1,
        **pdl_options(logits.device),
    )
    return tokens
