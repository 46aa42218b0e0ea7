# SPDX-License-Identifier: MIT
"""Parts of persistent, warp-specialised products in Gluon: one warp loads, others multiply.

A ring of shared-memory buffers lies between them. A consumer (four warps) owns ROWS rows of a
tile; all share the tile's columns. These are one or several parts of one weight, or as many columns
of each of two weights. The consumers run apart by as much as the ring allows, so that one stores
its result while the tensor cores work for the other, and the loading warp is ahead of both.
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
def early_stages(stages):
    """Stages of a ring whose weights are requested before the wait for the kernel ahead.

    The others come behind the first tokens: memory would bring all weights before what the kernel
    ahead still reads, and before the tokens.
    """
    return stages - stages // 4


@gluon.constexpr_function
def part_widths(columns):
    """Powers of two that add up to ``columns``, the widest first: parts of a tile's columns."""
    return [1 << bit for bit in reversed(range(columns.bit_length())) if columns >> bit & 1]


@gluon.constexpr_function
def part_start(columns, part):
    """First column of a part of a tile of ``columns`` columns."""
    return sum(part_widths(columns)[:part])


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
def boxes_of(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_ring(a_desc, b_descs, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers and barriers: (rows, columns by the parts of ``b_descs``, full, empty)."""
    rows = boxes_of(a_desc, STAGES * CONSUMERS)
    columns = [boxes_of(desc, STAGES) for desc in b_descs]
    return rows, columns, barriers_of(STAGES, 1), barriers_of(STAGES, CONSUMERS)


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
    a_desc, b_descs, ring, slot, first_n, start, STEP_N: gl.constexpr, JOINED: gl.constexpr, pred
):
    """Weights of a K block; announces the rows of ``a`` that follow into the same slot."""
    rows, columns, full, _empty = ring
    CONSUMERS: gl.constexpr = rows.type.shape[0] // columns[0].type.shape[0]
    COLUMNS: gl.constexpr = STEP_N if JOINED else STEP_N * len(b_descs)
    OF_COLUMN: gl.constexpr = b_descs[0].block_type.nbytes // b_descs[0].block_type.shape[0]
    WEIGHTS: gl.constexpr = COLUMNS * OF_COLUMN
    ready = full.index(slot)
    mbarrier.expect(ready, CONSUMERS * a_desc.block_type.nbytes + WEIGHTS, pred=pred)
    for part in gl.static_range(len(b_descs)):
        at = first_n + (part_start(STEP_N, part) if JOINED else 0)
        copy_box(b_descs[part], [at, start], ready, columns[part].index(slot), pred=pred)


@gluon.jit
def load_tiles(
    a_desc,
    b_descs,
    ring,
    sizes,
    STEP_N: gl.constexpr,
    JOINED: gl.constexpr,
    GROUP_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """The loading warp: every K block of every tile of this CTA, as soon as a slot is free.

    With PREFETCH the first weights are requested before the wait. JOINED: ``b_descs`` are parts of
    one weight, whose columns lie side by side in a tile of STEP_N; else each has STEP_N of its own.
    ``sizes`` are the blocks of rows and of columns, M, N and K.
    """
    blocks_m, blocks_n, _m, _n, k = sizes
    rows, columns, full, empty = ring
    STAGES: gl.constexpr = columns[0].type.shape[0]
    CONSUMERS: gl.constexpr = rows.type.shape[0] // STAGES
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_K: gl.constexpr = rows.type.shape[2]
    EARLY: gl.constexpr = early_stages(STAGES)
    _first, block_n = tile_of(gl.program_id(0), blocks_m, blocks_n, GROUP_M)
    wait_unless(PREFETCH)
    for slot in gl.static_range(EARLY):
        start = slot * BLOCK_K
        _request_columns(
            a_desc, b_descs, ring, slot, block_n * STEP_N, start, STEP_N, JOINED, start < k
        )
    requested = gl.minimum(EARLY, gl.cdiv(k, BLOCK_K))
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
                a_desc, b_descs, ring, slot, first_n, start, STEP_N, JOINED, requested <= 0
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
def _no_sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr, BITS: gl.constexpr):
    layout: gl.constexpr = sums_layout(COLUMNS, BITS)
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout=layout)


@gluon.jit
def _add_block(a, columns, slot, sums, INDEX: gl.constexpr):
    """Products of ``a`` with a slot's columns from part INDEX on, under way to their sums."""
    b = columns[INDEX].index(slot).permute((1, 0))
    acc = warpgroup_mma(a, b, sums[INDEX], is_async=True)
    if len(columns) == INDEX + 1:
        return (acc,)
    else:
        # Triton knows no starred expression
        return (acc,) + _add_block(a, columns, slot, sums, INDEX + 1)  # noqa: RUF005


@gluon.jit
def _wait_for(sums, PENDING: gl.constexpr):
    if len(sums) == 1:
        return (warpgroup_mma_wait(PENDING, deps=[sums[0]]),)
    else:
        return warpgroup_mma_wait(PENDING, deps=sums)


@gluon.jit
def multiply_tile(ring, slot, phase, k, PART: gl.constexpr):
    """Sums of one tile over all of K, by the parts of its columns; the next slot, phase.

    A block's product is issued before the last one ends; waiting for each measured the same.
    """
    rows, columns, full, empty = ring
    STAGES: gl.constexpr = columns[0].type.shape[0]
    CONSUMERS: gl.constexpr = rows.type.shape[0] // STAGES
    ROWS: gl.constexpr = rows.type.shape[1]
    BLOCK_K: gl.constexpr = rows.type.shape[2]
    BITS: gl.constexpr = rows.dtype.primitive_bitwidth
    sums = [_no_sums(ROWS, part.type.shape[1], BITS) for part in columns]
    for start in range(0, k, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        a = rows.index(slot * CONSUMERS + PART)
        sums = _wait_for(_add_block(a, columns, slot, sums, 0), len(columns))
        free_previous(empty, slot, STAGES, start > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    sums = _wait_for(sums, 0)
    free_previous(empty, slot, STAGES, True)
    return sums, slot, phase


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
        # where a tile has an odd number of chunks, its first one finds the last one's buffer
        PENDING: gl.constexpr = 0 if AT == 0 else BUFFERS - 1
        tma.store_wait(PENDING)
        buffer = buffers.index(PART * BUFFERS + AT // CHUNK % BUFFERS)
        buffer.store(part)
        fence_async_shared()
        store_box(out_desc, [first_m, first_n + AT], buffer)
    else:
        left, right = part.reshape([part.type.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        store_chunks(left, buffers, out_desc, first_m, first_n, PART, AT)
        store_chunks(right, buffers, out_desc, first_m, first_n, PART, AT + HALF)
