# SPDX-License-Identifier: MIT
"""Parts of persistent, warp-specialised products in Gluon: one warp loads, others multiply.

A ring of shared-memory buffers lies between them. A consumer (four warps) owns ROWS rows of a
tile; all share the tile's columns, which come from one weight or, as two halves, from two. The
consumers run apart by as much as the ring allows, so that one stores its result while the tensor
cores work for the other, and the loading warp is ahead of both.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.gemm.portable import tile_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import wait_for_inputs, wait_unless

# of 227 KB that a CTA can have; barriers take the rest
_SHARED_BYTES = 225 * 1024
# chunks of a result that each consumer may have under way to memory
CHUNK_BUFFERS = gl.constexpr(2)
# Triton 3.9 renamed them
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
meet = getattr(gl, "barrier", None) or gl.thread_barrier
_Shared = gl.shared_memory_descriptor
view_as = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of boxes [rows, columns] of ``tensor`` [M, K]; zeros outside of it."""
    size = tensor.element_size()
    layout = gl.NVMMASharedLayout(min(columns * size, 128), 8 * size)
    shape, strides = list(tensor.shape), [tensor.stride(0), 1]
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def token_descriptor(tokens: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of boxes [rows, columns] of ``tokens`` [M, K], whose last rows may lie behind M.

    Those are read as far as the storage of ``tokens`` has them (token_tiles.py), whatever they
    hold: a product leaves out their results.
    """
    boxes = descriptor(tokens, rows, columns)
    m, k = tokens.shape
    if m % rows == 0:
        return boxes
    held = tokens.untyped_storage().nbytes() // tokens.element_size() - tokens.storage_offset()
    boxes.shape[0] = min(cdiv(m, rows) * rows, (held - k) // tokens.stride(0) + 1)
    return boxes


def chunk_descriptor(out: torch.Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Descriptor of boxes [rows, columns] of a 16-bit result, or None if TMA cannot write it."""
    if out.element_size() != 2 or out.stride(0) % 8 or out.data_ptr() % 16:
        return None
    layout = gl.NVMMASharedLayout(2 * columns, 16)
    return TensorDescriptor(out, list(out.shape), [out.stride(0), 1], [rows, columns], layout)


def ring_stages(stage_bytes: int, other_bytes: int = 5 * 1024, most: int = 8) -> int:
    """Stages of the ring that fit a CTA's shared memory beside ``other_bytes``."""
    return min((_SHARED_BYTES - other_bytes) // stage_bytes, most)


@gluon.constexpr_function
def sums_layout(columns, bits):
    """Layout of a consumer's sums over ``columns`` columns of operands of ``bits`` bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.jit
def barriers_of(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that ARRIVALS arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The ring's slot behind ``slot``; the phase of its barriers flips at the ring's end."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def free_previous(empty, slot, STAGES: gl.constexpr, pred):
    """Hand the slot before ``slot`` back to the loading warp.

    Computed, not remembered: Triton 3.6 drops a loop-carried copy of another carried variable.
    """
    previous = gl.where(slot == 0, STAGES - 1, slot - 1)
    mbarrier.arrive(empty.index(previous), count=1, pred=pred)


@gluon.jit
def make_ring(a_desc, b_desc, c_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers and barriers: (rows, columns, more columns or None, full, empty)."""
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    rows = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], a_desc.layout
    )
    columns = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    more = columns
    if c_desc is not None:
        BLOCK_C: gl.constexpr = c_desc.block_type.shape[0]
        more = gl.allocate_shared_memory(c_desc.dtype, [STAGES, BLOCK_C, BLOCK_K], c_desc.layout)
    return rows, columns, more, barriers_of(STAGES, 1), barriers_of(STAGES, CONSUMERS)


@gluon.jit
def make_buffers(out_desc, ring, BUFFERS: gl.constexpr):
    """Shared memory for the chunks of two consumers; without a descriptor something unused."""
    buffers = ring[0]
    if out_desc is not None:
        ROWS: gl.constexpr = out_desc.block_type.shape[0]
        CHUNK: gl.constexpr = out_desc.block_type.shape[1]
        buffers = gl.allocate_shared_memory(
            out_desc.dtype, [2 * BUFFERS, ROWS, CHUNK], out_desc.layout
        )
    return buffers


@gluon.jit
def _request_columns(
    a_desc, b_desc, c_desc, ring, slot, first_n, start, OFFSET: gl.constexpr, pred
):
    """Weights of a K block; announces the rows of ``a`` that follow into the same slot."""
    rows, columns, more, full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns.type.shape[0]
    SECOND: gl.constexpr = c_desc is not None
    WEIGHTS: gl.constexpr = b_desc.block_type.nbytes + (c_desc.block_type.nbytes if SECOND else 0)
    ready = full.index(slot)
    mbarrier.expect(ready, CONSUMERS * a_desc.block_type.nbytes + WEIGHTS, pred=pred)
    copy_box(b_desc, [first_n, start], ready, columns.index(slot), pred=pred)
    if SECOND:
        copy_box(c_desc, [first_n + OFFSET, start], ready, more.index(slot), pred=pred)


@gluon.jit
def load_tiles(
    a_desc,
    b_desc,
    c_desc,
    ring,
    sizes,
    STEP_N: gl.constexpr,
    OFFSET: gl.constexpr,
    GROUP_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """The loading warp: every K block of every tile of this CTA, as soon as a slot is free.

    With PREFETCH the first weights are requested before the wait. ``sizes`` are the blocks of rows
    and of columns, M, N and K.
    """
    blocks_m, blocks_n, _m, _n, k = sizes
    rows, columns, _more, full, empty = ring
    STAGES: gl.constexpr = columns.type.shape[0]
    CONSUMERS: gl.constexpr = rows.type.shape[0] // STAGES
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_K: gl.constexpr = rows.type.shape[2]
    _first, block_n = tile_of(gl.program_id(0), blocks_m, blocks_n, GROUP_M)
    wait_unless(PREFETCH)
    for slot in gl.static_range(STAGES):
        start = slot * BLOCK_K
        _request_columns(
            a_desc, b_desc, c_desc, ring, slot, block_n * STEP_N, start, OFFSET, start < k
        )
    requested = gl.minimum(STAGES, gl.cdiv(k, BLOCK_K))
    wait_for_inputs()
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for index in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        first_m = block_m * CONSUMERS * ROWS
        first_n = block_n * STEP_N
        for start in range(0, k, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            _request_columns(
                a_desc, b_desc, c_desc, ring, slot, first_n, start, OFFSET, requested <= 0
            )
            requested -= 1
            for part in gl.static_range(CONSUMERS):
                copy_box(
                    a_desc,
                    [first_m + part * ROWS, start],
                    full.index(slot),
                    rows.index(slot * CONSUMERS + part),
                )
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def multiply_tile(ring, slot, phase, k, PART: gl.constexpr, SECOND: gl.constexpr):
    """Sums of one tile over all of K: (columns, more columns or the same, slot, phase).

    A block's product is issued before the last one ends; waiting for each measured the same.
    """
    rows, columns, more, full, empty = ring
    STAGES: gl.constexpr = columns.type.shape[0]
    CONSUMERS: gl.constexpr = rows.type.shape[0] // STAGES
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_N: gl.constexpr = columns.type.shape[1]
    BLOCK_C: gl.constexpr = more.type.shape[1]
    BLOCK_K: gl.constexpr = rows.type.shape[2]
    BITS: gl.constexpr = rows.dtype.primitive_bitwidth
    PENDING: gl.constexpr = 2 if SECOND else 1
    first: gl.constexpr = sums_layout(BLOCK_N, BITS)
    second: gl.constexpr = sums_layout(BLOCK_C, BITS)
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=first)
    if SECOND:
        other = gl.zeros([ROWS, BLOCK_C], gl.float32, layout=second)
    for start in range(0, k, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        a = rows.index(slot * CONSUMERS + PART)
        acc = warpgroup_mma(a, columns.index(slot).permute((1, 0)), acc, is_async=True)
        if SECOND:
            other = warpgroup_mma(a, more.index(slot).permute((1, 0)), other, is_async=True)
            acc, other = warpgroup_mma_wait(PENDING, deps=[acc, other])
        else:
            acc = warpgroup_mma_wait(PENDING, deps=[acc])
        free_previous(empty, slot, STAGES, start > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    if SECOND:
        acc, other = warpgroup_mma_wait(0, deps=[acc, other])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
        other = acc
    free_previous(empty, slot, STAGES, True)
    return acc, other, slot, phase


@gluon.constexpr_function
def stored_layout(rows, columns):
    """Eight columns a thread and 32 in four threads: 16-byte stores after an exchange in a warp."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    registers += [[8, 0]] + [[1 << bit, 0] for bit in range(6, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store_tile(acc, out, first_m, first_n, m, n):
    """Round ``acc`` to out's dtype and write what lies inside out [m, n]."""
    ROWS: gl.constexpr = acc.type.shape[0]
    BLOCK_N: gl.constexpr = acc.type.shape[1]
    layout: gl.constexpr = stored_layout(ROWS, BLOCK_N)
    result = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    offs_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    gl.store(
        out + offs_m.to(gl.int64)[:, None] * n + offs_n[None, :],
        result,
        mask=(offs_m < m)[:, None] & (offs_n < n)[None, :],
    )


@gluon.jit
def store_chunks(part, buffers, out_desc, first_m, first_n, PART: gl.constexpr, AT: gl.constexpr):
    """Write ``part``, a tile's columns AT and on, through this consumer's shared buffers.

    The copies to memory run under the next tile's product; a buffer is waited for when its turn
    comes again, and ``store_wait(0)`` must follow the last tile.
    """
    CHUNK: gl.constexpr = out_desc.block_type.shape[1]
    BUFFERS: gl.constexpr = buffers.type.shape[0] // 2
    HALF: gl.constexpr = part.type.shape[1] // 2
    if HALF < CHUNK:
        tma.store_wait(BUFFERS - 1)
        buffer = buffers.index(PART * BUFFERS + AT // CHUNK % BUFFERS)
        buffer.store(part)
        fence_async_shared()
        store_box(out_desc, [first_m, first_n + AT], buffer)
    else:
        left, right = part.reshape([part.type.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        store_chunks(left, buffers, out_desc, first_m, first_n, PART, AT)
        store_chunks(right, buffers, out_desc, first_m, first_n, PART, AT + HALF)
