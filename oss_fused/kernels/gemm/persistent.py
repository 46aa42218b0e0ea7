# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows in Gluon: the warp-specialised pipeline of pipeline.py, in two schedules.

- ``gemm_cooperative``: both groups of four warps share a tile of 128 rows, and its columns: a power
  of two, or parts that are, as 192 = 128 + 64, which fills the multiprocessors where 256 columns
  leave a third of them idle. Scales are requested before a tile's product, and its result goes to
  shared memory, from where it is copied while the next one runs.
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

from oss_fused.errors import TritonKernelError
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
    part_start,
    part_widths,
    ring_stages,
    store_chunks,
    store_tile,
    sums_layout,
    token_descriptor,
)

# rows and columns of a tile whose consumers take turns
_TURN_TILE = 128
# parts of a tile's columns that the kernel has arguments for
_MOST_PARTS = 3
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
def _token_scales(
    pointer, first, end, EACH: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr
):
    """Scales of the rows of sums over ``COLUMNS`` columns."""
    layout: gl.constexpr = gl.SliceLayout(1, sums_layout(COLUMNS, 8))
    return _load_scale(pointer, first, end, EACH, SIZE, layout)


@gluon.jit
def _channel_scales(
    pointer, first, end, columns, EACH: gl.constexpr, STEP_N: gl.constexpr, INDEX: gl.constexpr
):
    """Scales of a tile's columns from part INDEX on, by parts."""
    SIZE: gl.constexpr = columns[INDEX].type.shape[1]
    layout: gl.constexpr = gl.SliceLayout(0, sums_layout(SIZE, 8))
    channel = _load_scale(pointer, first + part_start(STEP_N, INDEX), end, EACH, SIZE, layout)
    if len(columns) == INDEX + 1:
        return (channel,)
    else:
        others = _channel_scales(pointer, first, end, columns, EACH, STEP_N, INDEX + 1)
        return (channel,) + others  # noqa: RUF005


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
    STEP_N: gl.constexpr,
    PART: gl.constexpr,
):
    """A consumer of the cooperative schedule: ROWS rows of every tile of this CTA."""
    ring, scales, target, sizes = operands
    a_scale, b_scale = scales
    blocks_m, blocks_n, m, n, k = sizes
    rows, columns, _full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns[0].type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        at_m = (block_m * CONSUMERS + PART) * ROWS
        at_n = block_n * STEP_N
        token = _token_scales(a_scale, at_m, m, A_ROWS, ROWS, columns[0].type.shape[1])
        channels = _channel_scales(b_scale, at_n, n, columns, B_ROWS, STEP_N, 0)
        sums, slot, phase = multiply_tile(ring, slot, phase, k, PART)
        for part in gl.static_range(len(columns)):
            if part > 0:
                # the same rows for another layout: from L1
                token = _token_scales(a_scale, at_m, m, A_ROWS, ROWS, columns[part].type.shape[1])
            _finish(
                sums[part],
                token,
                channels[part],
                target,
                at_m,
                at_n,
                m,
                n,
                PART,
                part_start(STEP_N, part),
            )
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
    rows, parts, full, empty = ring
    columns = parts[0]
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


@gluon.jit
def _given(b_desc, c_desc, d_desc):
    """Those that are no None; Triton 3.6 launches no kernel with a tuple of descriptors."""
    if d_desc is not None:
        return b_desc, c_desc, d_desc
    elif c_desc is not None:
        return b_desc, c_desc
    else:
        return (b_desc,)


@gluon.jit(do_not_specialize=["m"])
def _gemm_persistent_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
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
    STEP_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TURNS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    b_descs = _given(b_desc, c_desc, d_desc)
    ROWS: gl.constexpr = a_desc.block_type.shape[0] * (1 if TURNS else 2)
    ring = make_ring(a_desc, b_descs, STAGES, 1 if TURNS else 2)
    buffers = make_buffers(out_desc, ring, 1 if TURNS else CHUNK_BUFFERS)
    scales = (a_scale, b_scale)
    target = (bias, out, out_desc, buffers)
    sizes = (gl.cdiv(m, ROWS), gl.cdiv(n, STEP_N), m, n, k)
    if TURNS:
        # a barrier for each consumer: the other one lets it begin
        in_turn = (ring, barriers_of(2, 1), scales, target, sizes)
        gl.warp_specialize(
            [
                (_multiply_in_turn, (in_turn, A_ROWS, B_ROWS, GROUP_M, 0)),
                (_multiply_in_turn, (in_turn, A_ROWS, B_ROWS, GROUP_M, 1)),
                (load_tiles, (a_desc, b_descs, ring, sizes, STEP_N, True, GROUP_M, PREFETCH)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        operands = (ring, scales, target, sizes)
        gl.warp_specialize(
            [
                (_multiply_together, (operands, A_ROWS, B_ROWS, GROUP_M, STEP_N, 0)),
                (_multiply_together, (operands, A_ROWS, B_ROWS, GROUP_M, STEP_N, 1)),
                (load_tiles, (a_desc, b_descs, ring, sizes, STEP_N, True, GROUP_M, PREFETCH)),
            ],
            [4, 1],
            [240, 24],
        )


def _launch(
    operands: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    columns: int,
    turns: bool,
    **options: Any,
) -> None:
    """Launch with as many stages as fit, for consumers of ``rows`` rows each."""
    a, b, a_scale, b_scale = operands
    (m, n), k = out.shape, a.shape[1]
    widths = part_widths(columns)
    if not 0 < len(widths) <= _MOST_PARTS:
        expected = f"a sum of at most {_MOST_PARTS} powers of two"
        raise TritonKernelError(f"columns={columns}: expected {expected}")
    weights = [descriptor(b, width, 128) for width in widths]
    chunk = min(widths[-1], 64)
    tile_rows = rows if turns else 2 * rows
    buffers = 2 * (1 if turns else CHUNK_BUFFERS.value) * rows * chunk * 2
    stages = ring_stages((tile_rows + columns) * 128, buffers)
    if stages < 2:
        # the product of a stage ends only after the next one has begun
        expected = "a tile of which shared memory holds two stages"
        raise TritonKernelError(f"rows={rows}, columns={columns}: expected {expected}")
    tiles = cdiv(m, tile_rows) * cdiv(n, columns)
    _gemm_persistent_kernel[(min(tiles, multiprocessors(a.device)),)](
        token_descriptor(a, rows, 128),
        *weights,
        *[None] * (_MOST_PARTS - len(weights)),
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
        STEP_N=columns,
        STAGES=stages,
        TURNS=turns,
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
    """Launch; K and the row strides must be multiples of 16.

    Raises:
        TritonKernelError: ``columns`` is no sum of at most three powers of two, or shared memory
            does not hold two stages of a tile.
    """
    options = {"GROUP_M": group_m, "PREFETCH": prefetch_weights}
    _launch((a, b, a_scale, b_scale), bias, out, rows, columns, False, **options)


def gemm_pingpong(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_m: int = 8,
) -> None:
    """Launch; K and the row strides must be multiples of 16."""
    options = {"GROUP_M": group_m, "PREFETCH": False}
    _launch((a, b, a_scale, b_scale), bias, out, _TURN_TILE, _TURN_TILE, True, **options)
