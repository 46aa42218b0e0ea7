# SPDX-License-Identifier: MIT
"""Implicit GEMM for Hopper in Gluon: one warp loads by TMA, two or three consumers multiply.

A consumer (four warps) has 64 output positions: a box of rows, images and columns, which is a box
of the image under each tap of the window. TMA gathers it, zeros outside the image included, so that
no tap costs address arithmetic. x is seen as [H, N, W, C]: the positions of one tap then follow
those of the tap above by whole rows of a box, and a box with two more rows serves the three taps of
a column of a 3x3 window (SHARED), which halves what is read from L2. A stride of two reads the
image as four interleaved ones. A CTA walks over tiles; results leave by TMA as well.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oss_fused.kernels.launch import start_next, wait_for_inputs
from oss_fused.kernels.pipeline import (
    barriers_of,
    copy_box,
    free_previous,
    next_slot,
    store_box,
    sums_layout,
)

FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16))
# Views of shared memory that overlap; Triton 3.8 refuses them.
_OVERLAP = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
view_of: Any = gl.shared_memory_descriptor._reinterpret if _OVERLAP else None


@gluon.jit
def _box_of(index, counts, desc):
    """First output row, image and column of a box; columns of boxes follow each other first."""
    BOX: gl.constexpr = desc.block_type.shape
    across = counts[0]
    down = counts[1]
    row = index // across % down * BOX[0]
    image = index // (across * down) * BOX[1]
    return row, image, index % across * BOX[2]


@gluon.jit
def _load_box(descs, row, image, column, channel, barrier, target, STRIDE: gl.constexpr):
    """Positions [row * STRIDE, ...] of an image, of which ``descs`` has STRIDE * STRIDE parts."""
    if STRIDE == 1:
        copy_box(descs[0], [row, image, column, channel], barrier, target)
    else:
        part = (row & 1) * 2 + (column & 1)
        for index in gl.static_range(4):
            at = [row >> 1, image, column >> 1, channel]
            copy_box(descs[index], at, barrier, target, pred=part == index)


@gluon.jit
def _load(
    source,
    ring,
    sizes,
    window,
    KH: gl.constexpr,
    KW: gl.constexpr,
    STRIDE: gl.constexpr,
    SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """The loading warp: a box of each consumer and weights, once their slots are free."""
    descs, halo_desc, w_desc = source
    rows, columns, a_full, a_empty, b_full, b_empty = ring
    tiles, blocks_n, counts, blocks_k = sizes
    pad_h, pad_w, step_h, step_w = window
    A_STAGES: gl.constexpr = a_full.type.shape[0]
    B_STAGES: gl.constexpr = columns.type.shape[0]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    HEIGHT: gl.constexpr = rows.type.shape[0] // (A_STAGES * CONSUMERS)
    CHANNELS: gl.constexpr = columns.type.shape[2]
    TAPS: gl.constexpr = 3 if SHARED else 1
    SHAPE: gl.constexpr = descs[0].block_type.shape
    LAYOUT: gl.constexpr = descs[0].layout
    NBYTES: gl.constexpr = descs[0].block_type.nbytes + SHARED * halo_desc.block_type.nbytes
    a_slot = gl.to_tensor(0)
    a_phase = gl.to_tensor(1)
    b_slot = gl.to_tensor(0)
    b_phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n = tile % blocks_n * BLOCK_N
        for step in range(KH * KW // TAPS * blocks_k):
            tap = step // blocks_k
            channel = step % blocks_k * CHANNELS
            i = gl.to_tensor(0) if SHARED else tap // KW
            j = tap if SHARED else tap % KW
            mbarrier.wait(a_empty.index(a_slot), a_phase)
            ready = a_full.index(a_slot)
            mbarrier.expect(ready, CONSUMERS * NBYTES)
            for part in gl.static_range(CONSUMERS):
                index = tile // blocks_n * CONSUMERS + part
                row, image, column = _box_of(index, counts, descs[0])
                top = row * STRIDE + i * step_h - pad_h
                left = column * STRIDE + j * step_w - pad_w
                at = (a_slot * CONSUMERS + part) * HEIGHT
                target = rows.index(at)
                if SHARED:
                    target = view_of(target, rows.dtype, SHAPE, LAYOUT)
                    below = view_of(
                        rows.index(at + SHAPE[0]), rows.dtype, halo_desc.block_type.shape, LAYOUT
                    )
                    copy_box(halo_desc, [top + SHAPE[0], image, left, channel], ready, below)
                _load_box(descs, top, image, left, channel, ready, target, STRIDE)
            a_slot, a_phase = next_slot(a_slot, a_phase, A_STAGES)
            for down in gl.static_range(TAPS):
                mbarrier.wait(b_empty.index(b_slot), b_phase)
                mbarrier.expect(b_full.index(b_slot), w_desc.block_type.nbytes)
                copy_box(
                    w_desc,
                    [first_n, (i + down) * KW + j, channel],
                    b_full.index(b_slot),
                    columns.index(b_slot).reshape([BLOCK_N, 1, CHANNELS]),
                )
                b_slot, b_phase = next_slot(b_slot, b_phase, B_STAGES)


@gluon.jit
def _finish(acc, bias, first_n, channels, RELU: gl.constexpr):
    """Bias and ReLU."""
    if bias is not None:
        n = first_n + gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + n, mask=n < channels, other=0.0).to(gl.float32)[None, :]
    if RELU:
        # not a maximum with 0, which would swallow NaN
        acc = gl.where(acc < 0.0, 0.0, acc)
    return acc


@gluon.jit
def _consume(
    ring,
    target,
    sizes,
    STEPS: gl.constexpr,
    RELU: gl.constexpr,
    SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PART: gl.constexpr,
):
    """64 positions of every tile: products over taps and channels, bias, ReLU, store."""
    results, out_desc, bias, channels = target
    rows, columns, a_full, a_empty, b_full, b_empty = ring
    tiles, blocks_n, counts, blocks_k = sizes
    A_STAGES: gl.constexpr = a_full.type.shape[0]
    B_STAGES: gl.constexpr = columns.type.shape[0]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    CHANNELS: gl.constexpr = columns.type.shape[2]
    HEIGHT: gl.constexpr = rows.type.shape[0] // (A_STAGES * CONSUMERS)
    TAPS: gl.constexpr = 3 if SHARED else 1
    ROWS: gl.constexpr = results.type.shape[1] * results.type.shape[2] * results.type.shape[3]
    layout: gl.constexpr = sums_layout(BLOCK_N, 16)
    a_slot = gl.to_tensor(0)
    a_phase = gl.to_tensor(0)
    b_slot = gl.to_tensor(0)
    b_phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
        for step in range(STEPS * blocks_k):
            mbarrier.wait(a_full.index(a_slot), a_phase)
            at = (a_slot * CONSUMERS + PART) * HEIGHT
            for down in gl.static_range(TAPS):
                mbarrier.wait(b_full.index(b_slot), b_phase)
                if SHARED:
                    a = view_of(rows.index(at + down), rows.dtype, [ROWS, CHANNELS], FLAT)
                else:
                    a = rows.index(at).reshape([ROWS, CHANNELS])
                acc = warpgroup_mma(a, columns.index(b_slot).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                free_previous(b_empty, b_slot, B_STAGES, step + down > 0)
                if down == 0:
                    free_previous(a_empty, a_slot, A_STAGES, step > 0)
                b_slot, b_phase = next_slot(b_slot, b_phase, B_STAGES)
            a_slot, a_phase = next_slot(a_slot, a_phase, A_STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        free_previous(b_empty, b_slot, B_STAGES, True)
        free_previous(a_empty, a_slot, A_STAGES, True)
        first_n = tile % blocks_n * BLOCK_N
        acc = _finish(acc, bias, first_n, channels, RELU)
        row, image, column = _box_of(tile // blocks_n * CONSUMERS + PART, counts, out_desc)
        result = results.index(PART)
        tma.store_wait(0)
        result.reshape([ROWS, BLOCK_N]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store_box(out_desc, [row, image, column, first_n], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "blocks_n", "across", "down", "blocks_k"])
def convolution_hopper_kernel(
    desc_0,
    desc_1,
    desc_2,
    desc_3,
    halo_desc,
    w_desc,
    out_desc,
    bias,
    channels,
    tiles,
    blocks_n,
    across,
    down,
    blocks_k,
    pad_h,
    pad_w,
    step_h,
    step_w,
    KH: gl.constexpr,
    KW: gl.constexpr,
    STRIDE: gl.constexpr,
    RELU: gl.constexpr,
    SHARED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    A_STAGES: gl.constexpr,
    B_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    start_next()
    BOX: gl.constexpr = desc_0.block_type.shape
    CHANNELS: gl.constexpr = w_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    STEPS: gl.constexpr = KW if SHARED else KH * KW
    dtype: gl.constexpr = w_desc.dtype
    SLOTS: gl.constexpr = A_STAGES * CONSUMERS
    if SHARED:
        lines: gl.constexpr = [SLOTS * (BOX[0] + 2), BOX[1] * BOX[2], CHANNELS]
        rows = gl.allocate_shared_memory(dtype, lines, FLAT)
    else:
        boxes: gl.constexpr = [SLOTS, BOX[0], BOX[1], BOX[2], CHANNELS]
        rows = gl.allocate_shared_memory(dtype, boxes, desc_0.layout)
    columns = gl.allocate_shared_memory(dtype, [B_STAGES, BLOCK_N, CHANNELS], FLAT)
    results = gl.allocate_shared_memory(
        dtype, [CONSUMERS, BOX[0], BOX[1], BOX[2], BLOCK_N], out_desc.layout
    )
    a_full = barriers_of(A_STAGES, 1)
    a_empty = barriers_of(A_STAGES, CONSUMERS)
    b_full = barriers_of(B_STAGES, 1)
    b_empty = barriers_of(B_STAGES, CONSUMERS)
    ring = (rows, columns, a_full, a_empty, b_full, b_empty)
    sizes = (tiles, blocks_n, (across, down), blocks_k)
    window = (pad_h, pad_w, step_h, step_w)
    source = ((desc_0, desc_1, desc_2, desc_3), halo_desc, w_desc)
    wait_for_inputs()
    target = (results, out_desc, bias, channels)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, target, sizes, STEPS, RELU, SHARED, CONSUMERS, 0)),
                (_consume, (ring, target, sizes, STEPS, RELU, SHARED, CONSUMERS, 1)),
                (_load, (source, ring, sizes, window, KH, KW, STRIDE, SHARED, CONSUMERS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, target, sizes, STEPS, RELU, SHARED, CONSUMERS, 0)),
                (_consume, (ring, target, sizes, STEPS, RELU, SHARED, CONSUMERS, 1)),
                (_consume, (ring, target, sizes, STEPS, RELU, SHARED, CONSUMERS, 2)),
                (_load, (source, ring, sizes, window, KH, KW, STRIDE, SHARED, CONSUMERS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
