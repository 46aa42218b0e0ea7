# SPDX-License-Identifier: MIT
"""Softmax over rows; see kernels/softmax.

A CTA takes one long row or several short ones. Bytes are what softmax costs: a row that fits into
registers is read once. Longer ones are read three times by "two_pass" and twice by "online", the
later times from L2 where a row fits there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import round_to
from oss_fused.kernels.rows import inside, row_tiles


@triton.jit
def _tile(x, row, in_rows, cols, stride_x, n_cols):
    mask = in_rows & (cols < n_cols)
    tile = tl.load(x + row * stride_x + cols, mask=mask, other=float("-inf"))
    return tile.to(tl.float32), mask


@triton.jit
def _finite(best):
    # a row that is -inf so far: any finite number keeps e^(x - best) at 0
    return tl.where(best == float("-inf"), 0.0, best)


@triton.jit(do_not_specialize=["rows"])
def _softmax_kernel(
    x,
    out,
    rows,
    stride_x,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ONLINE: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    in_rows = row < rows
    lane = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if WHOLE:
        mask = inside(in_rows, lane, n_cols, EVEN)
        # x and out pass L2 as a stream
        wide = tl.load(
            x + row * stride_x + lane,
            mask=mask,
            other=float("-inf"),
            eviction_policy="evict_first",
        ).to(tl.float32)
        weights = tl.exp(wide - tl.max(wide, 1)[:, None])
        y = weights * (1.0 / tl.sum(tl.where(mask, weights, 0.0), 1))[:, None]
        target = out + row * n_cols + lane
        tl.store(target, round_to(y, dtype), mask=mask, cache_modifier=".cs")
    else:
        if ONLINE:
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            for start in range(0, n_cols, BLOCK):
                wide, _ = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
                new_best = tl.maximum(best, tl.max(wide, 1))
                safe = _finite(new_best)
                total = total * tl.exp(best - safe) + tl.sum(tl.exp(wide - safe[:, None]), 1)
                best = new_best
            safe = _finite(best)[:, None]
        else:
            # a maximum and a sum for each lane: one reduction after the loop, not one in each turn
            bests = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
            for start in range(0, n_cols, BLOCK):
                wide, _ = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
                bests = tl.maximum(bests, wide)
            safe = _finite(tl.max(bests, 1))[:, None]
            totals = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, n_cols, BLOCK):
                wide, _ = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
                totals += tl.exp(wide - safe)
            total = tl.sum(totals, 1)
        # a row of -inf has no weight at all: 0 * (1 / 0) is NaN
        inverse = (1.0 / total)[:, None]
        for start in range(0, n_cols, BLOCK):
            cols = start + lane
            wide, mask = _tile(x, row, in_rows, cols, stride_x, n_cols)
            y = tl.exp(wide - safe) * inverse
            tl.store(out + row * n_cols + cols, round_to(y, dtype), mask=mask)


def softmax(x: torch.Tensor, method: str) -> torch.Tensor:
    """Softmax over the last dimension; see kernels/softmax for the contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    tiles = row_tiles(n_cols, whole=method == "two_pass")
    _softmax_kernel[(cdiv(n_rows, tiles.rows),)](
        rows,
        out,
        n_rows,
        rows.stride(0),
        n_cols,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        WHOLE=tiles.whole,
        EVEN=tiles.even(n_rows, n_cols),
        ONLINE=method == "online",
        num_warps=tiles.warps,
        **pdl_options(x.device),
    )
    return out
