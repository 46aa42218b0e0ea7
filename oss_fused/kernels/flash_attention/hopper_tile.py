# SPDX-License-Identifier: MIT
"""What the kernels of attention for Hopper share: buffers, barriers and blocks in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.pipeline import barriers_of, copy_box

# rows that a consumer keeps
ROWS_EACH = 64
# of shared memory: barriers, and the exchange of a result's layout
OTHER_BYTES = 24 * 1024


@gluon.jit
def key_blocks(first, keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of keys that all queries of the CTA see whole, and those that any of them sees."""
    end = keys
    full = keys
    if CAUSAL:
        end = gl.minimum(end, first + BLOCK_M)
        full = gl.minimum(full, first + 1)
    return full // BLOCK_N, gl.cdiv(end, BLOCK_N)


@gluon.jit
def flat(box):
    """A box [1, 1, rows, columns] of shared memory as [rows, columns]."""
    return box.reshape([box.type.shape[2], box.type.shape[3]])


@gluon.jit
def buffers_of(desc, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT, 1, 1, desc.block_type.shape[2], desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def make_turns(CONSUMERS: gl.constexpr):
    """A barrier for each consumer: the one before lets it begin; the first one may."""
    turn = barriers_of(CONSUMERS, 1)
    mbarrier.arrive(turn.index(0), count=1)
    return turn


@gluon.jit
def load_held(x_desc, y_desc, held, b, head, first):
    """A tile of each of two operands for every consumer."""
    xs, ys, ready = held
    ROWS: gl.constexpr = xs.type.shape[3]
    for part in gl.static_range(2):
        full = ready.index(part)
        mbarrier.expect(full, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
        copy_box(x_desc, [b, head, first + part * ROWS, 0], full, xs.index(part))
        copy_box(y_desc, [b, head, first + part * ROWS, 0], full, ys.index(part))


@gluon.jit
def load_block(x_desc, y_desc, ring, slot, phase, b, head, at):
    """The next block of each of two operands, once its slot is free."""
    xs, ys, x_full, x_empty, y_full, y_empty = ring
    mbarrier.wait(x_empty.index(slot), phase)
    mbarrier.expect(x_full.index(slot), x_desc.block_type.nbytes)
    copy_box(x_desc, [b, head, at, 0], x_full.index(slot), xs.index(slot))
    mbarrier.wait(y_empty.index(slot), phase)
    mbarrier.expect(y_full.index(slot), y_desc.block_type.nbytes)
    copy_box(y_desc, [b, head, at, 0], y_full.index(slot), ys.index(slot))


@gluon.jit
def make_held(x_desc, y_desc):
    return buffers_of(x_desc, 2), buffers_of(y_desc, 2), barriers_of(2, 1)


@gluon.jit
def make_blocks(x_desc, y_desc, STAGES: gl.constexpr):
    xs = buffers_of(x_desc, STAGES)
    ys = buffers_of(y_desc, STAGES)
    x_full = barriers_of(STAGES, 1)
    x_empty = barriers_of(STAGES, 2)
    y_full = barriers_of(STAGES, 1)
    y_empty = barriers_of(STAGES, 2)
    return xs, ys, x_full, x_empty, y_full, y_empty


def columns_of(t: torch.Tensor) -> int:
    """Columns of a tile of ``t``'s heads."""
    return 64 if t.shape[3] <= 64 else 128


def box_descriptor(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` rows of a head of ``t`` [B, heads, rows, D]; zeros outside."""
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    box = [1, 1, rows, columns_of(t)]
    return TensorDescriptor(t, list(t.shape), list(t.stride()), box, layout)
