# SPDX-License-Identifier: MIT
"""Pieces of the expert kernels for one to four tokens in Gluon (few.py): steps, tokens, sums.

A product of the tensor cores has eight columns: the levels of PARTS chunks' tokens lie side by
side, which saves their room. A thread has two neighbouring columns of the sums, so it adds what
belongs to the chunk at hand and drops the rest. moe/gemm.py says what levels are, moe/tile.py in
which order columns lie, moe/mxfp4.py how weights are packed.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.moe.gluon_tile import step_layout, unpack, word_layout
from oss_fused.kernels.pipeline import copy_box, meet, view_as

# chunks of a step
STEP_CHUNKS = 2
# columns of a product
COLUMNS = gl.constexpr(8)


@gluon.constexpr_function
def _padded(experts):
    """The next power of two."""
    return 1 << (experts - 1).bit_length()


@gluon.constexpr_function
def _box_layout(depth):
    """Words [4 * depth, 256] of a step's chunks: a chunk's are those of word_layout."""
    registers = [[0, 1], [0, 2], [2, 0]] + ([[4, 0]] if depth == 2 else [])
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    warps = [[0, 128], [1, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4 * depth, 256])


@gluon.constexpr_function
def _scale_layout(depth):
    """Scale words [depth, 64] of a step: those that _unpack wants, four threads the same."""
    registers = [[0, 32]] + ([[1, 0]] if depth == 2 else [])
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8], [0, 16]], [], [depth, 64])


@gluon.constexpr_function
def product_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])


@gluon.constexpr_function
def token_layout():
    """Codes [rows, 128] of tokens on their way to shared memory."""
    return gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def result_layout():
    """Sums [rows, tokens] as they are stored."""
    return gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])


@gluon.jit
def make_buffers(desc, s_desc, SLOTS: gl.constexpr, TILES: gl.constexpr):
    """Steps' chunks, their scale words, tokens, and a barrier for each slot."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    chunks = gl.allocate_shared_memory(gl.int32, [SLOTS, 4 * DEPTH, 256], desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, DEPTH, 64], s_desc.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [TILES, COLUMNS, 128], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    return chunks, words, tokens, full


@gluon.jit
def request(desc, s_desc, buffers, slot, at, step, pred):
    """Ask for a step of the group whose boxes and scale words begin at the rows ``at``."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    chunks, words, _tokens, full = buffers
    row, s_row = at
    ready = full.index(slot)
    mbarrier.expect(ready, desc.block_type.nbytes + s_desc.block_type.nbytes, pred=pred)
    copy_box(desc, [row + step * (4 * DEPTH), 0], ready, chunks.index(slot), pred=pred)
    copy_box(s_desc, [s_row + step * DEPTH, 0], ready, words.index(slot), pred=pred)


@gluon.constexpr_function
def _most(count):
    """The largest power of two up to ``count``."""
    return 1 << (count.bit_length() - 1)


@gluon.jit
def load_tokens(
    x,
    order,
    begin,
    count,
    first,
    K: gl.constexpr,
    tokens,
    PER: gl.constexpr,
    TOP_K: gl.constexpr,
    TILE: gl.constexpr = 0,
):
    """Codes of tokens, chunks ``first`` and on, into shared memory from tile TILE on.

    ``order``: of pairs, of which ``begin`` and ``count - 1`` more have the tokens; None: these are
    rows of x. Row r of a tile is level r % 2 of token r // 2 % PER and belongs to its chunk
    r // (2 * PER).
    """
    KP: gl.constexpr = (K + 127) // 128 * 128
    PARTS: gl.constexpr = COLUMNS // (2 * PER)
    COUNT: gl.constexpr = tokens.type.shape[0]
    TILES: gl.constexpr = _most(COUNT - TILE)
    layout: gl.constexpr = token_layout()
    row = gl.arange(0, TILES * COLUMNS, gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, gl.SliceLayout(0, layout))
    nth = row // 2 % PER
    source = begin + nth
    if order is not None:
        source = gl.load(order + begin + nth, mask=nth < count, other=0) // TOP_K
    chunk = first + (TILE + row // COLUMNS) * PARTS + row % COLUMNS // (2 * PER)
    inside = ((nth < count) & (chunk < KP // 128))[:, None] & (column >= 0)[None, :]
    base = x + (source * 2 + row % 2).to(gl.int64) * KP + chunk * 128
    codes = gl.load(base[:, None] + column[None, :], mask=inside, other=0)
    if COUNT > TILE + TILES:
        load_tokens(x, order, begin, count, first, K, tokens, PER, TOP_K, TILE + TILES)
    # tiles lie one below the other: one store, where one for each would wait for the one before
    shape: gl.constexpr = [COUNT // TILES, TILES * COLUMNS, 128]
    below = view_as(tokens, gl.float8e4nv, shape, tokens.layout).index(TILE // TILES)
    below.store(codes.to(gl.float8e4nv, bitcast=True))
    if TILE == 0:
        # the tensor cores read what threads wrote
        fence_async_shared()
        meet()


@gluon.jit
def load_slot(buffers, slot):
    """Packed weights and scale words of a slot's chunks, one after the other."""
    chunks, words, _tokens, _full = buffers
    DEPTH: gl.constexpr = words.type.shape[1]
    packed = chunks.index(slot).load(_box_layout(DEPTH))
    steps = words.index(slot).load(_scale_layout(DEPTH))
    if DEPTH == 1:
        return _of_chunk(packed, steps)
    else:
        left, right = gl.split(packed.reshape([2, 4, 256]).permute((1, 2, 0)))
        left_steps, right_steps = gl.split(steps.permute((1, 0)))
        return _of_chunk(left, left_steps) + _of_chunk(right, right_steps)


@gluon.jit
def _of_chunk(packed, steps):
    return (
        gl.convert_layout(packed.reshape([64, 16]), word_layout(), assert_trivial=True),
        gl.convert_layout(
            steps.reshape([64]), gl.SliceLayout(1, step_layout()), assert_trivial=True
        ),
    )


@gluon.jit
def unpack_all(loaded):
    """First operands of a step's products."""
    if len(loaded) == 2:
        return (unpack(loaded[0], loaded[1], product_layout()),)
    else:
        first = unpack(loaded[0], loaded[1], product_layout())
        return first, unpack(loaded[2], loaded[3], product_layout())


@gluon.jit
def _ask(a, tokens, nth, PARTS: gl.constexpr):
    nothing = gl.zeros([64, COLUMNS], gl.float32, layout=product_layout())
    b = tokens.index(nth // PARTS).permute((1, 0))
    return warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_step(acc, operands, tokens, nth, PER: gl.constexpr):
    """``acc`` [64, 8] plus the products of chunk ``nth`` of ``tokens`` and of the one behind."""
    PARTS: gl.constexpr = COLUMNS // (2 * PER)
    part = gl.arange(0, COLUMNS, gl.SliceLayout(0, product_layout())) // (2 * PER)
    # nothing may run past a wait: the next weights take the registers of these
    if len(operands) == 1:
        asked = _ask(operands[0], tokens, nth, PARTS)
        product = warpgroup_mma_wait(0, deps=[asked])
        return gl.where((part == nth % PARTS)[None, :], acc + product, acc)
    else:
        asked = _ask(operands[0], tokens, nth, PARTS)
        behind = _ask(operands[1], tokens, nth + 1, PARTS)
        product, product1 = warpgroup_mma_wait(0, deps=[asked, behind])
        acc = gl.where((part == nth % PARTS)[None, :], acc + product, acc)
        return gl.where((part == (nth + 1) % PARTS)[None, :], acc + product1, acc)


@gluon.jit
def add_parts(acc, PER: gl.constexpr):
    """Sums [4, 2, 8, PER] of rows (warp, pair, row), levels and parts added."""
    PARTS: gl.constexpr = COLUMNS // (2 * PER)
    first, second = gl.split(acc.reshape([64, PARTS, PER, 2]))
    return gl.sum(first + second * 0.0625, 1).reshape([4, 2, 8, PER])


@gluon.jit
def _keys(logits, column, EXPERTS: gl.constexpr):
    """As sort_keys of kernels/numerics.py; what no expert has lies below all."""
    value = gl.load(logits + column, mask=column < EXPERTS, other=0.0).to(gl.float32) + 0.0
    bits = value.to(gl.int32, bitcast=True)
    key = gl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return gl.where(column < EXPERTS, key, -2147483648)


@gluon.jit
def _chosen_expert(logits, slot, EXPERTS: gl.constexpr):
    """As chosen_expert of moe/choice.py."""
    PADDED: gl.constexpr = _padded(EXPERTS)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, PADDED, gl.SliceLayout(1, layout))
    column = gl.arange(0, PADDED, gl.SliceLayout(0, layout))
    own = _keys(logits, row, EXPERTS)[:, None]
    other = _keys(logits, column, EXPERTS)[None, :]
    ahead = (other > own) | ((other == own) & (column[None, :] < row[:, None]))
    rank = gl.sum(ahead.to(gl.int32), 1)
    return gl.sum(gl.where(rank == slot, row, 0), 0)


@gluon.jit
def load_tile(tiles, EXPERTS: gl.constexpr):
    """As load_tile of moe/choice.py."""
    if EXPERTS > 0:
        slot = gl.program_id(1)
        return _chosen_expert(tiles, slot, EXPERTS), slot, gl.to_tensor(1)
    else:
        tile = tiles + gl.program_id(1) * 3
        return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)


def boxes(words: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of boxes [rows, columns] of int32 ``words``, which are contiguous."""
    flat = words.view(torch.int32).view(-1, columns)
    layout = gl.NVMMASharedLayout(0, 32)
    return TensorDescriptor(flat, list(flat.shape), [columns, 1], [rows, columns], layout)
