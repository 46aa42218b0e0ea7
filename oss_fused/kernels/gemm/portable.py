# SPDX-License-Identifier: MIT
"""FP8 GEMM on tensor cores in plain Triton: out = (a @ b.T) * a_scale * b_scale.T + bias.

One kernel, three ways to launch it:

- ``gemm_tile`` takes any shape: pointers, masked at the edges.
- ``gemm_large`` is for many rows: persistent CTAs with operands through tensor descriptors (TMA),
  so that the next tile's loads run under the epilogue of the last. Triton 3.6's warp specialisation
  compiles this loop but hangs on Hopper, so it is not used.
- ``gemm_swap`` is for some tens of rows: [N, K] @ [K, M], so that a few rows fill the narrow side
  of a wgmma tile. Several stages of TMA are under way: few CTAs keep memory busy. Splitting K over
  CTAs was measured and did not pay; nor did asking L2 for weights before the wait.

a [M, K], b [N, K] float8_e4m3fn with unit stride along K. The tensor cores sum in their own
accumulator over all of K (as CUTLASS's fast accumulation and cuBLASLt do).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.scales import scale_column, scale_row
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import (
    multiprocessors,
    pdl_options,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.numerics import dot_fp8, round_to
from oss_fused.kernels.tma import row_descriptor


class _Tile(NamedTuple):
    """What the kernel is compiled for: a tile's sizes, and row blocks that share columns in L2.

    ``tma``: operands are tensor descriptors, not pointers; ``swap``: a tile is [columns, rows].
    """

    m: int
    n: int
    k: int
    group: int = 8
    tma: bool = True
    swap: bool = False


@triton.jit
def tile_of(index, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """Row and column block: GROUP_M row blocks at a time, so that their operands stay in L2."""
    group = index // (GROUP_M * blocks_n)
    inside = index % (GROUP_M * blocks_n)
    size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % size, inside // size


@triton.jit
def load_box(source, first, end, k, stride, start, ROWS: tl.constexpr, TILE: tl.constexpr):
    """A box [ROWS, TILE.k] of an operand; zero outside of it."""
    if TILE.tma:
        return source.load([first, start])
    else:
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        columns = start + tl.arange(0, TILE.k)
        mask = (rows < end)[:, None] & (columns < k)[None, :]
        return tl.load(source + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _sums(a, b, first_m, first_n, sizes, strides, TILE: tl.constexpr):
    """Products of a tile's rows and columns over all of K; [columns, rows] if swapped."""
    m, n, k = sizes
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    if TILE.swap:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, k, TILE.k):
            w = load_box(b, first_n, n, k, strides[1], start, BLOCK_N, TILE)
            x = load_box(a, first_m, m, k, strides[0], start, BLOCK_M, TILE)
            acc = dot_fp8(w, x.T, acc)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, k, TILE.k):
            x = load_box(a, first_m, m, k, strides[0], start, BLOCK_M, TILE)
            w = load_box(b, first_n, n, k, strides[1], start, BLOCK_N, TILE)
            acc = dot_fp8(x, w.T, acc)
    return acc


@triton.jit
def bias_of(bias, offs_n, n, SWAP: tl.constexpr):
    """Bias of a tile's columns, as a column where the tile is swapped; None without one."""
    shift = None
    if bias is not None:
        shift = tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)
        shift = shift[:, None] if SWAP else shift[None, :]
    return shift


@triton.jit
def store_tile(acc, token, channel, shift, out, offs_m, offs_n, m, n, SWAP: tl.constexpr):
    """Scale the sums, add the bias, round, and write what lies inside out [m, n]."""
    acc *= token
    acc *= channel
    if shift is not None:
        acc += shift
    rows, columns = offs_m.to(tl.int64), offs_n
    if SWAP:
        target = out + rows[None, :] * n + columns[:, None]
        mask = (offs_m < m)[None, :] & (offs_n < n)[:, None]
    else:
        target = out + rows[:, None] * n + columns[None, :]
        mask = (offs_m < m)[:, None] & (offs_n < n)[None, :]
    tl.store(target, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m"])
def _gemm_portable_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    strides,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    sizes = (m, n, k)
    range_m = tl.arange(0, TILE.m)
    range_n = tl.arange(0, TILE.n)
    if TILE.swap:
        first_n, first_m = tl.program_id(0) * TILE.n, tl.program_id(1) * TILE.m
        offs_m, offs_n = first_m + range_m, first_n + range_n
        wait_unless(PREFETCH)
        # everything that the epilogue needs arrives while the weights do
        channel = scale_column(b_scale, offs_n, offs_n < n, B_ROWS)
        shift = bias_of(bias, offs_n, n, True)
        wait_for_inputs()
        start_next()
        token = scale_row(a_scale, offs_m, offs_m < m, A_ROWS)
        acc = _sums(a, b, first_m, first_n, sizes, strides, TILE)
        store_tile(acc, token, channel, shift, out, offs_m, offs_n, m, n, True)
    else:
        wait_for_inputs()
        start_next()
        blocks_m, blocks_n = tl.cdiv(m, TILE.m), tl.cdiv(n, TILE.n)
        tiles = blocks_m * blocks_n
        for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            block_m, block_n = tile_of(index, blocks_m, blocks_n, TILE.group)
            first_m, first_n = block_m * TILE.m, block_n * TILE.n
            acc = _sums(a, b, first_m, first_n, sizes, strides, TILE)
            offs_m, offs_n = first_m + range_m, first_n + range_n
            token = scale_column(a_scale, offs_m, offs_m < m, A_ROWS)
            channel = scale_row(b_scale, offs_n, offs_n < n, B_ROWS)
            shift = bias_of(bias, offs_n, n, False)
            store_tile(acc, token, channel, shift, out, offs_m, offs_n, m, n, False)


def _launch(
    operands: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    grid: tuple[int, ...],
    tile: _Tile,
    prefetch: bool = False,
    **options: Any,
) -> None:
    a, b, a_scale, b_scale = operands
    _gemm_portable_kernel[grid](
        row_descriptor(a, tile.m, tile.k) if tile.tma else a,
        row_descriptor(b, tile.n, tile.k) if tile.tma else b,
        a_scale,
        b_scale,
        bias,
        out,
        a.shape[0],
        b.shape[0],
        a.shape[1],
        (a.stride(0), b.stride(0)),
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        TILE=tile,
        PREFETCH=prefetch,
        **options,
        **pdl_options(a.device),
    )


def gemm_tile(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch into ``out`` [M, N] for any shape; arguments as in fp8_gemm, already checked."""
    m, n = out.shape
    block_m = min(max(next_power_of_2(m), 16), 128)
    tile = _Tile(block_m, 128 if block_m >= 64 else 64, 128, tma=False)
    grid = (cdiv(m, tile.m) * cdiv(n, tile.n),)
    options: dict[str, Any] = {"num_warps": 8 if block_m >= 128 else 4, "num_stages": 4}
    _launch((a, b, a_scale, b_scale), bias, out, grid, tile, **options)


def gemm_large(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 128,
    block_n: int = 256,
    block_k: int = 128,
    group_m: int = 8,
    num_stages: int = 3,
    num_warps: int = 8,
) -> None:
    """Launch persistent CTAs; K and the row strides must be multiples of 16."""
    m, n = out.shape
    if out.element_size() > 2:
        # the exchange of a float32 tile's layout takes the room of its other half
        block_n = min(block_n, 128)
    tile = _Tile(block_m, block_n, block_k, group_m)
    grid = (min(cdiv(m, block_m) * cdiv(n, block_n), multiprocessors(a.device)),)
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    _launch((a, b, a_scale, b_scale), bias, out, grid, tile, **options)


def gemm_swap(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 16,
    block_n: int = 64,
    block_k: int = 256,
    num_stages: int = 5,
    num_warps: int = 4,
    prefetch_weights: bool = False,
) -> None:
    """Launch with swapped operands; K and the row strides must be multiples of 16."""
    m, n = out.shape
    tile = _Tile(block_m, block_n, block_k, swap=True)
    grid = (cdiv(n, block_n), cdiv(m, block_m))
    options = {"num_warps": num_warps, "num_stages": num_stages}
    _launch((a, b, a_scale, b_scale), bias, out, grid, tile, prefetch_weights, **options)
