# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows in Gluon: the warp-specialised pipeline of warp_pipeline.py.

A tile has ``columns`` columns: a power of two, or 192 as 128 + 64, which fills the
multiprocessors where 256 columns leave a third of them idle. Scales are requested before a tile's
product, and its result goes to shared memory, from where it is copied while the next one runs.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from oss_fused.kernels.gemm.large import tile_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.pipeline import (
    CHUNK_BUFFERS,
    chunk_descriptor,
    descriptor,
    load_tiles,
    make_buffers,
    make_ring,
    multiply_tile,
    ring_stages,
    store_chunks,
    store_tile,
    sums_layout,
)


@gluon.jit
def _load_scale(pointer, first, end, EACH: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Scales of rows or columns ``first`` to ``first + SIZE``, or the one scale of all of them."""
    if EACH:
        offs = first + gl.arange(0, SIZE, layout)
        return gl.load(pointer + offs, mask=offs < end, other=0.0)
    return gl.full([SIZE], gl.load(pointer), gl.float32, layout)


@gluon.jit
def _finish(
    acc,
    token,
    channel,
    target,
    first_m,
    first_n,
    m,
    n,
    PART: gl.constexpr,
    AT: gl.constexpr,
):
    """Scale the sums of a tile's columns AT and on, add the bias, round and write."""
    bias, out, out_desc, buffers = target
    layout: gl.constexpr = acc.type.layout
    acc = acc * token[:, None] * channel[None, :]
    if bias is not None:
        offs_n = first_n + AT + gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
        acc += gl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(gl.float32)[None, :]
    if out_desc is None:
        store_tile(acc, out, first_m, first_n + AT, m, n)
    else:
        rounded = acc.to(out.dtype.element_ty)
        store_chunks(rounded, buffers, out_desc, first_m, first_n, PART, AT)


@gluon.jit
def _multiply(
    ring,
    scales,
    target,
    sizes,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    SECOND: gl.constexpr,
    PART: gl.constexpr,
):
    a_scale, b_scale = scales
    blocks_m, blocks_n, m, n, k = sizes
    rows, columns, more, _full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    BLOCK_C: gl.constexpr = more.type.shape[1]
    STEP_N: gl.constexpr = BLOCK_N + (BLOCK_C if SECOND else 0)
    first: gl.constexpr = sums_layout(BLOCK_N, 8)
    second: gl.constexpr = sums_layout(BLOCK_C, 8)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        at_m = (block_m * CONSUMERS + PART) * ROWS
        at_n = block_n * STEP_N
        token = _load_scale(a_scale, at_m, m, A_ROWS, ROWS, gl.SliceLayout(1, first))
        channel = _load_scale(b_scale, at_n, n, B_ROWS, BLOCK_N, gl.SliceLayout(0, first))
        if SECOND:
            rest: gl.constexpr = gl.SliceLayout(0, second)
            others = _load_scale(b_scale, at_n + BLOCK_N, n, B_ROWS, BLOCK_C, rest)
        acc, other, slot, phase = multiply_tile(ring, slot, phase, k, PART, SECOND)
        _finish(acc, token, channel, target, at_m, at_n, m, n, PART, 0)
        if SECOND:
            # the same rows for another layout: from L1
            token = _load_scale(a_scale, at_m, m, A_ROWS, ROWS, gl.SliceLayout(1, second))
            _finish(other, token, others, target, at_m, at_n, m, n, PART, BLOCK_N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m"])
def _gemm_cooperative_kernel(
    a_desc,
    b_desc,
    c_desc,
    out_desc,
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
    BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    SECOND: gl.constexpr = c_desc is not None
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    STEP_N: gl.constexpr = BLOCK_N + (c_desc.block_type.shape[0] if SECOND else 0)
    blocks_m = gl.cdiv(m, 2 * a_desc.block_type.shape[0])
    blocks_n = gl.cdiv(n, STEP_N)
    ring = make_ring(a_desc, b_desc, c_desc, STAGES, 2)
    scales = (a_scale, b_scale)
    target = (bias, out, out_desc, make_buffers(out_desc, ring, BUFFERS))
    sizes = (blocks_m, blocks_n, m, n, k)
    gl.warp_specialize(
        [
            (_multiply, (ring, scales, target, sizes, A_ROWS, B_ROWS, GROUP_M, SECOND, 0)),
            (_multiply, (ring, scales, target, sizes, A_ROWS, B_ROWS, GROUP_M, SECOND, 1)),
            (
                load_tiles,
                (
                    a_desc,
                    b_desc,
                    c_desc,
                    ring,
                    blocks_m,
                    blocks_n,
                    k,
                    STEP_N,
                    BLOCK_N,
                    GROUP_M,
                    PREFETCH,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def gemm_cooperative(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int = 64,
    columns: int = 256,
    group_m: int = 8,
    prefetch_weights: bool = False,
) -> None:
    """Launch with as many stages as fit; K and the row strides must be multiples of 16."""
    m, k = a.shape
    n = b.shape[0]
    tiles = cdiv(m, 2 * rows) * cdiv(n, columns)
    first = 1 << (columns.bit_length() - 1)
    chunk = min(columns - first or 64, 64)
    _gemm_cooperative_kernel[(min(tiles, multiprocessors(a.device)),)](
        descriptor(a, rows, 128),
        descriptor(b, first, 128),
        descriptor(b, columns - first, 128) if columns > first else None,
        chunk_descriptor(out, rows, chunk),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        STAGES=ring_stages((2 * rows + columns) * 128, 2 * CHUNK_BUFFERS * rows * chunk * 2),
        BUFFERS=CHUNK_BUFFERS,
        GROUP_M=group_m,
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(a.device),
    )
