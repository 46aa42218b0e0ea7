# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows in Gluon: two groups of warps take turns at the tensor cores.

Each has whole tiles of 128 x 128 for itself: while one multiplies, the other scales and stores
the tile before, so that the tensor cores do not wait for a result to leave. One warp loads for
both through a ring of shared-memory buffers; CTAs are persistent.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.gemm.large import tile_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.pipeline import (
    chunk_descriptor,
    copy_box,
    descriptor,
    free_previous,
    make_buffers,
    make_ring,
    next_slot,
    ring_stages,
    store_chunks,
    store_tile,
    sums_layout,
)

# rows and columns of a tile, bytes of K in a block, columns of a result's chunk
_TILE = 128
_BLOCK_K = 128
_CHUNK = 64
# blocks before a tile's end at which the other consumer may begin
_EARLY = 2


@gluon.jit
def _load(a_desc, b_desc, ring, sizes, GROUP_M: gl.constexpr):
    """The loading warp: every K block of every tile of this CTA, as soon as a slot is free."""
    rows, columns, full, empty, _turn = ring
    blocks_m, blocks_n, _m, _n, k = sizes
    STAGES: gl.constexpr = columns.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    BLOCK_K: gl.constexpr = columns.type.shape[2]
    wait_for_inputs()
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        for start in range(0, k, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            copy_box(b_desc, [block_n * BLOCK_N, start], ready, columns.index(slot))
            copy_box(a_desc, [block_m * ROWS, start], ready, rows.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _finish(
    acc,
    target,
    first_m,
    first_n,
    m,
    n,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    PART: gl.constexpr,
):
    """Scale the sums, add the bias, round and write."""
    a_scale, b_scale, bias, out, out_desc, buffers = target
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
    if out_desc is None:
        store_tile(acc, out, first_m, first_n, m, n)
    else:
        rounded = acc.to(out.dtype.element_ty)
        store_chunks(rounded, buffers, out_desc, first_m, first_n, PART, 0)


@gluon.jit
def _multiply(
    ring,
    target,
    sizes,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    EARLY: gl.constexpr,
    GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):
    rows, columns, full, empty, turn = ring
    blocks_m, blocks_n, m, n, k = sizes
    STAGES: gl.constexpr = columns.type.shape[0]
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    BLOCK_K: gl.constexpr = columns.type.shape[2]
    blocks_k = gl.cdiv(k, BLOCK_K)
    # the other consumer gets ready under the last blocks; fewer than STAGES, see below
    hand_over = gl.maximum(blocks_k - 1 - EARLY, 0) * BLOCK_K
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
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=sums_layout(BLOCK_N, 8))
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
        first_m, first_n = block_m * ROWS, block_n * BLOCK_N
        _finish(acc, target, first_m, first_n, m, n, A_ROWS, B_ROWS, PART)
        before += 2 * blocks_k
        turn_phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m"])
def _gemm_pingpong_kernel(
    a_desc,
    b_desc,
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
    EARLY: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    rows, columns, _more, full, empty = make_ring(a_desc, b_desc, None, STAGES, 1)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2):
        mbarrier.init(turn.index(part), count=1)
    ring = (rows, columns, full, empty, turn)
    sizes = (gl.cdiv(m, ROWS), gl.cdiv(n, BLOCK_N), m, n, k)
    target = (a_scale, b_scale, bias, out, out_desc, make_buffers(out_desc, ring, 1))
    gl.warp_specialize(
        [
            (_multiply, (ring, target, sizes, A_ROWS, B_ROWS, EARLY, GROUP_M, 0)),
            (_multiply, (ring, target, sizes, A_ROWS, B_ROWS, EARLY, GROUP_M, 1)),
            (_load, (a_desc, b_desc, ring, sizes, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
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
    m, k = a.shape
    n = b.shape[0]
    tiles = cdiv(m, _TILE) * cdiv(n, _TILE)
    _gemm_pingpong_kernel[(min(tiles, multiprocessors(a.device)),)](
        descriptor(a, _TILE, _BLOCK_K),
        descriptor(b, _TILE, _BLOCK_K),
        chunk_descriptor(out, _TILE, _CHUNK),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        STAGES=ring_stages(2 * _TILE * _BLOCK_K, 2 * _TILE * _CHUNK * 2),
        EARLY=_EARLY,
        GROUP_M=group_m,
        num_warps=4,
        **pdl_options(a.device),
    )
