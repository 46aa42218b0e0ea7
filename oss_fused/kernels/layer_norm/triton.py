# SPDX-License-Identifier: MIT
"""LayerNorm over rows; see kernels/layer_norm.

One kernel: a row that fits into registers is read once. Longer ones are read again for the result,
and "two_pass" reads them once more, for the variance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import column_bits, kept, round_to, row_bits
from oss_fused.kernels.random_mask import drop_threshold, fold_seed
from oss_fused.kernels.rows import inside, row_tiles


class _Dropout(NamedTuple):
    """Seed, bits below which a value is dropped, factor of what is kept."""

    seed: Any
    threshold: Any
    factor: Any


@triton.jit
def _tile(x, row, in_rows, cols, stride_x, n_cols, EVEN: tl.constexpr = False):
    mask = inside(in_rows, cols, n_cols, EVEN)
    tile = tl.load(x + row * stride_x + cols, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32), mask


@triton.jit
def _stats_of(wide, mask, count):
    """Mean of a tile, and the sum of squared differences from it."""
    mean = tl.sum(wide, 1) / count
    rest = tl.where(mask, wide - mean[:, None], 0.0)
    return mean, tl.sum(rest * rest, 1)


@triton.jit
def _row_stats(x, row, in_rows, lane, stride_x, n_cols, ROWS, BLOCK, WELFORD: tl.constexpr):
    """Mean and population variance of rows that take several tiles."""
    mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if WELFORD:
        for start in range(0, n_cols, BLOCK):
            wide, mask = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
            count = tl.minimum(n_cols - start, BLOCK).to(tl.float32)
            tile_mean, tile_squares = _stats_of(wide, mask, count)
            share = count / (start + count)
            step = tile_mean - mean
            mean += step * share
            squares += tile_squares + step * step * (start * share)
    else:
        for start in range(0, n_cols, BLOCK):
            wide, _ = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
            mean += tl.sum(wide, 1)
        mean /= n_cols
        for start in range(0, n_cols, BLOCK):
            wide, mask = _tile(x, row, in_rows, start + lane, stride_x, n_cols)
            rest = tl.where(mask, wide - mean[:, None], 0.0)
            squares += tl.sum(rest * rest, 1)
    return mean, squares / n_cols


@triton.jit
def _of_columns(values, cols, n_cols, EVEN: tl.constexpr = False):
    """Weight or bias of a tile's columns, or None."""
    found = None
    if values is not None:
        found = tl.load(values + cols, mask=inside(cols >= 0, cols, n_cols, EVEN), other=0.0)
    return found


@triton.jit
def _write(wide, mask, mean, rstd, weight, bias, out, row, cols, n_cols, dropout, DROPOUT):
    y = (wide - mean[:, None]) * rstd[:, None]
    if weight is not None:
        y *= weight.to(tl.float32)
    if bias is not None:
        y += bias.to(tl.float32)
    if DROPOUT:
        keep = kept(row_bits(dropout.seed, row), column_bits(cols), dropout.threshold)
        y = tl.where(keep, y * dropout.factor, 0.0)
    y = round_to(y, out.dtype.element_ty)
    tl.store(out + row * n_cols + cols, y, mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["rows", "seed", "threshold"])
def _layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    mean_out,
    var_out,
    rows,
    stride_x,
    n_cols,
    eps,
    seed,
    threshold,
    factor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    WELFORD: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = index[:, None]
    in_rows = row < rows
    lane = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        wide, mask = _tile(x, row, in_rows, lane, stride_x, n_cols, EVEN)
        if out is not None:
            # on their way during the reductions
            gain = _of_columns(weight, lane, n_cols, EVEN)
            shift = _of_columns(bias, lane, n_cols, EVEN)
        mean, squares = _stats_of(wide, mask, n_cols)
        var = squares / n_cols
    else:
        mean, var = _row_stats(x, row, in_rows, lane, stride_x, n_cols, ROWS, BLOCK, WELFORD)
    if mean_out is not None:
        tl.store(mean_out + index, mean, mask=index < rows)
        tl.store(var_out + index, var, mask=index < rows)
    if out is not None:
        rstd = tl.rsqrt(var + eps)
        dropout = _Dropout(seed, threshold, factor)
        if WHOLE:
            _write(wide, mask, mean, rstd, gain, shift, out, row, lane, n_cols, dropout, DROPOUT)
        else:
            for start in range(0, n_cols, BLOCK):
                cols = start + lane
                wide, mask = _tile(x, row, in_rows, cols, stride_x, n_cols)
                gain = _of_columns(weight, cols, n_cols)
                shift = _of_columns(bias, cols, n_cols)
                _write(
                    wide, mask, mean, rstd, gain, shift, out, row, cols, n_cols, dropout, DROPOUT
                )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    stats: tuple[torch.Tensor, torch.Tensor] | None = None,
    method: str = "two_pass",
    eps: float = 0.0,
    p: float = 0.0,
    seed: int = 0,
) -> None:
    if x.numel() == 0:
        return
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    tiles = row_tiles(n_cols, whole=method == "two_pass", pairs=True)
    mean, var = stats or (None, None)
    _layer_norm_kernel[(cdiv(n_rows, tiles.rows),)](
        rows,
        weight if weight is None else weight.contiguous(),
        bias if bias is None else bias.contiguous(),
        out,
        mean,
        var,
        n_rows,
        rows.stride(0),
        n_cols,
        eps,
        fold_seed(seed),
        drop_threshold(p),
        1.0 / (1.0 - p),
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        WHOLE=tiles.whole,
        EVEN=tiles.even(n_rows, n_cols),
        WELFORD=method == "welford",
        DROPOUT=p > 0,
        num_warps=tiles.warps,
        **pdl_options(x.device),
    )


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    method: str,
) -> torch.Tensor:
    """Normalised rows; see kernels/layer_norm for the contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out=out, method=method, eps=eps)
    return out


def layer_norm_stats(x: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each row; see kernels/layer_norm for the contract."""
    mean, var = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in "mv")
    _launch(x, stats=(mean, var), method=method)
    return mean, var


def layer_norm_dropout(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    p: float,
    seed: int,
) -> torch.Tensor:
    """Normalised rows with dropout; see kernels/layer_norm for the contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out=out, eps=eps, p=p, seed=seed)
    return out
