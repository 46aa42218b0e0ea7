# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows in Gluon: the warp-specialised pipeline of warp_pipeline.py.

A tile has ``columns`` columns: a power of two, or 192 as 128 + 64, which fills the
multiprocessors where 256 columns leave a third of them idle.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oss_fused.kernels.triton.gemm_large import tile_of
from oss_fused.kernels.triton.launch import (
    multiprocessors,
    pdl_options,
    start_next,
    wait_for_inputs,
)
from oss_fused.kernels.triton.warp_pipeline import (
    descriptor,
    load_tiles,
    make_ring,
    multiply_tile,
    ring_stages,
    store_tile,
)


@gluon.jit
def _scale_and_store(
    acc,
    a_scale,
    b_scale,
    bias,
    out,
    first_m,
    first_n,
    m,
    n,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
):
    layout: gl.constexpr = acc.type.layout
    offs_m = first_m + gl.arange(0, acc.type.shape[0], gl.SliceLayout(1, layout))
    offs_n = first_n + gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
    if A_ROWS:
        acc *= gl.load(a_scale + offs_m, mask=offs_m < m, other=0.0)[:, None]
    else:
        acc *= gl.load(a_scale)
    if B_ROWS:
        acc *= gl.load(b_scale + offs_n, mask=offs_n < n, other=0.0)[None, :]
    else:
        acc *= gl.load(b_scale)
    if bias is not None:
        acc += gl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(gl.float32)[None, :]
    store_tile(acc, out, first_m, first_n, m, n)


@gluon.jit
def _multiply(
    ring,
    scales,
    blocks_m,
    blocks_n,
    m,
    n,
    k,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    SECOND: gl.constexpr,
    PART: gl.constexpr,
):
    a_scale, b_scale, bias, out = scales
    rows, columns, more, _full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    STEP_N: gl.constexpr = BLOCK_N + (more.type.shape[1] if SECOND else 0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        acc, other, slot, phase = multiply_tile(ring, slot, phase, k, PART, SECOND)
        first_m = (block_m * CONSUMERS + PART) * ROWS
        first_n = block_n * STEP_N
        _scale_and_store(acc, a_scale, b_scale, bias, out, first_m, first_n, m, n, A_ROWS, B_ROWS)
        if SECOND:
            first_n += BLOCK_N
            _scale_and_store(
                other, a_scale, b_scale, bias, out, first_m, first_n, m, n, A_ROWS, B_ROWS
            )


@gluon.jit(do_not_specialize=["m"])
def _gemm_specialized_kernel(
    a_desc,
    b_desc,
    c_desc,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    SECOND: gl.constexpr = c_desc is not None
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    STEP_N: gl.constexpr = BLOCK_N + (c_desc.block_type.shape[0] if SECOND else 0)
    blocks_m = gl.cdiv(m, 2 * a_desc.block_type.shape[0])
    blocks_n = gl.cdiv(n, STEP_N)
    ring = make_ring(a_desc, b_desc, c_desc, STAGES, 2)
    scales = (a_scale, b_scale, bias, out)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ring,
                    scales,
                    blocks_m,
                    blocks_n,
                    m,
                    n,
                    k,
                    A_ROWS,
                    B_ROWS,
                    GROUP_M,
                    SECOND,
                    0,
                ),
            ),
            (
                _multiply,
                (
                    ring,
                    scales,
                    blocks_m,
                    blocks_n,
                    m,
                    n,
                    k,
                    A_ROWS,
                    B_ROWS,
                    GROUP_M,
                    SECOND,
                    1,
                ),
            ),
            (
                load_tiles,
                (a_desc, b_desc, c_desc, ring, blocks_m, blocks_n, k, STEP_N, BLOCK_N, GROUP_M),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def gemm_specialized(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int = 64,
    columns: int = 256,
    group_m: int = 8,
) -> None:
    """Launch with as many stages as fit; K and the row strides must be multiples of 16."""
    m, k = a.shape
    n = b.shape[0]
    tiles = triton.cdiv(m, 2 * rows) * triton.cdiv(n, columns)
    first = 1 << (columns.bit_length() - 1)
    _gemm_specialized_kernel[(min(tiles, multiprocessors(a.device)),)](
        descriptor(a, rows, 128),
        descriptor(b, first, 128),
        descriptor(b, columns - first, 128) if columns > first else None,
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        STAGES=ring_stages((2 * rows + columns) * 128),
        GROUP_M=group_m,
        num_warps=4,
        **pdl_options(a.device),
    )
