# SPDX-License-Identifier: MIT
"""``greedy_tokens`` in one launch.

A program finds the largest value of some columns; the last one of a row to arrive compares those of
all. Their integers hold a value's order and, below it, its column: one maximum finds both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import sort_keys

# columns of a program
_BLOCK = 4096


@triton.jit(do_not_specialize=["columns", "parts"])
def _greedy_kernel(
    logits,
    best,
    arrivals,
    offsets,
    tokens,
    columns,
    parts,
    stride,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    start_next()
    inside = column < columns
    loaded = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    _, key = sort_keys(loaded)
    # what is not there lies below all
    key = tl.where(inside, key, -2147483648)
    largest = tl.max(key, 0)
    # the lower column among equal values
    first = tl.max(tl.where(key == largest, 0x7FFFFFFF - column, 0), 0)
    tl.store(best + row * parts + part, (largest.to(tl.int64) << 32) | first.to(tl.int64))
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
    parts = cdiv(columns, _BLOCK)
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
        BLOCK=_BLOCK,
        PARTS=next_power_of_2(parts),
        num_warps=4,
        **pdl_options(logits.device),
    )
    return tokens
