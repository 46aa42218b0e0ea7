# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows in Gluon: the warp-specialised pipeline of pipeline.py, in two schedules.

- ``gemm_cooperative``: both groups of four warps share a tile of 128 rows, and its columns: a power
  of two, or 192 as 128 + 64, which fills the multiprocessors where 256 columns leave a third of
  them idle. Scales are requested before a tile's product, and its result goes to shared memory,
  from where it is copied while the next one runs.
- ``gemm_pingpong``: the groups take turns at the tensor cores. Each has whole tiles of 128 x 128
  for itself: while one multiplies, the other scales and stores the tile before, so that the tensor
  cores do not wait for a result to leave.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.gemm.portable import tile_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.pipeline import (
    CHUNK_BUFFERS,
    barriers_of,
    chunk_descriptor,
    descriptor,
    free_previous,
    load_tiles,
    make_buffers,
    make_ring,
    multiply_tile,
    next_slot,
    ring_stages,
    store_chunks,
    store_tile,
    sums_layout,
    token_descriptor,
)

# rows and columns of a tile whose consumers take turns
_TURN_TILE = 128
# blocks before a tile's end at which the other consumer may begin
_EARLY = gl.constexpr(2)


@gluon.jit
def _load_scale(pointer, first, end, EACH: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Scales of rows or columns ``first`` to ``first + SIZE``, or the one scale of all of them."""
    if EACH:
        offs = first + gl.arange(0, SIZE, layout)
        return gl.load(pointer + offs, mask=offs < end, other=0.0)
    return gl.full([SIZE], gl.load(pointer), gl.float32, layout)


@gluon.jit
def _finish(
    acc, token, channel, target, first_m, first_n, m, n, PART: gl.constexpr, AT: gl.constexpr
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
def _multiply_together(
    operands,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    SECOND: gl.constexpr,
    PART: gl.constexpr,
):
    """A consumer of the cooperative schedule: ROWS rows of every tile of this CTA."""
    ring, scales, target, sizes = operands
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


@gluon.jit
def _multiply_in_turn(
    operands,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):
    """A consumer of the other schedule: every second tile of this CTA."""
    ring, turn, scales, target, sizes = operands
    blocks_m, blocks_n, m, n, k = sizes
    rows, columns, _more, full, empty = ring
    STAGES: gl.constexpr = columns.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    BLOCK_K: gl.constexpr = columns.type.shape[2]
    layout: gl.constexpr = sums_layout(BLOCK_N, 8)
    blocks_k = gl.cdiv(k, BLOCK_K)
    # the other consumer gets ready under the last blocks; fewer than STAGES, see below
    hand_over = gl.maximum(blocks_k - 1 - _EARLY, 0) * BLOCK_K
    # K blocks before this consumer's next tile: every second tile is the other's
    before = gl.to_tensor(PART) * blocks_k
    turn_phase = gl.to_tensor(1 - PART)
    wait_for_inputs()
    start_next()
    first = gl.program_id(0) + PART * gl.num_programs(0)
    for index in range(first, blocks_m * blocks_n, 2 * gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        slot = before % STAGES
        phase = before // STAGES & 1
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
        # without turns a consumer would wait for a slot whose phase, two laps behind, looks passed
        mbarrier.wait(turn.index(PART), turn_phase)
        for start in range(0, k, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            b = columns.index(slot).permute((1, 0))
            acc = warpgroup_mma(rows.index(slot), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            free_previous(empty, slot, STAGES, start > 0)
            mbarrier.arrive(turn.index(1 - PART), count=1, pred=start == hand_over)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        free_previous(empty, slot, STAGES, True)
        at_m, at_n = block_m * ROWS, block_n * BLOCK_N
        token = _load_scale(scales[0], at_m, m, A_ROWS, ROWS, gl.SliceLayout(1, layout))
        channel = _load_scale(scales[1], at_n, n, B_ROWS, BLOCK_N, gl.SliceLayout(0, layout))
        _finish(acc, token, channel, target, at_m, at_n, m, n, PART, 0)
        before += 2 * blocks_k
        turn_phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m"])
def _gemm_persistent_kernel(
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
    GROUP_M: gl.constexpr,
    TURNS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    SECOND: gl.constexpr = c_desc is not None
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    STEP_N: gl.constexpr = BLOCK_N + (c_desc.block_type.shape[0] if SECOND else 0)
    ROWS: gl.constexpr = a_desc.block_type.shape[0] * (1 if TURNS else 2)
    ring = make_ring(a_desc, b_desc, c_desc, STAGES, 1 if TURNS else 2)
    buffers = make_buffers(out_desc, ring, 1 if TURNS else CHUNK_BUFFERS)
    scales = (a_scale, b_scale)
    target = (bias, out, out_desc, buffers)
    sizes = (gl.cdiv(m, ROWS), gl.cdiv(n, STEP_N), m, n, k)
    loads = (a_desc, b_desc, c_desc, ring, sizes, STEP_N, BLOCK_N, GROUP_M, PREFETCH)
    if TURNS:
        # a barrier for each consumer: the other one lets it begin
        in_turn = (ring, barriers_of(2, 1), scales, target, sizes)
        gl.warp_specialize(
            [
                (_multiply_in_turn, (in_turn, A_ROWS, B_ROWS, GROUP_M, 0)),
                (_multiply_in_turn, (in_turn, A_ROWS, B_ROWS, GROUP_M, 1)),
                (load_tiles, loads),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        operands = (ring, scales, target, sizes)
        gl.warp_specialize(
            [
                (_multiply_together, (operands, A_ROWS, B_ROWS, GROUP_M, SECOND, 0)),
                (_multiply_together, (operands, A_ROWS, B_ROWS, GROUP_M, SECOND, 1)),
                (load_tiles, loads),
            ],
            [4, 1],
            [240, 24],
        )


def _launch(
    operands: tuple[torch.Tensor, ...],
    descriptors: tuple[Any, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: int,
    **options: Any,
) -> None:
    a, b, a_scale, b_scale = operands
    a_desc, b_desc, c_desc, out_desc = descriptors
    _gemm_persistent_kernel[(min(tiles, multiprocessors(a.device)),)](
        a_desc,
        b_desc,
        c_desc,
        out_desc,
        a_scale,
        b_scale,
        bias,
        out,
        a.shape[0],
        b.shape[0],
        a.shape[1],
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        num_warps=4,
        **options,
        **pdl_options(a.device),
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
    m, n = out.shape
    first = 1 << (columns.bit_length() - 1)
    chunk = min(columns - first or 64, 64)
    descriptors = (
        token_descriptor(a, rows, 128),
        descriptor(b, first, 128),
        descriptor(b, columns - first, 128) if columns > first else None,
        chunk_descriptor(out, rows, chunk),
    )
    _launch(
        (a, b, a_scale, b_scale),
        descriptors,
        bias,
        out,
        cdiv(m, 2 * rows) * cdiv(n, columns),
        STAGES=ring_stages((2 * rows + columns) * 128, 2 * CHUNK_BUFFERS.value * rows * chunk * 2),
        GROUP_M=group_m,
        TURNS=False,
        PREFETCH=prefetch_weights,
    )


def gemm_pingpong(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_m: int = 8,
) -> None:
    """Launch with as many stages as fit; K and the row strides must be multiples of 16."""
    m, n = out.shape
    size, chunk = _TURN_TILE, 64
    descriptors = (
        token_descriptor(a, size, 128),
        descriptor(b, size, 128),
        None,
        chunk_descriptor(out, size, chunk),
    )
    _launch(
        (a, b, a_scale, b_scale),
        descriptors,
        bias,
        out,
        cdiv(m, size) * cdiv(n, size),
        STAGES=ring_stages(2 * size * 128, 2 * size * chunk * 2),
        GROUP_M=group_m,
        TURNS=True,
        PREFETCH=False,
    )
