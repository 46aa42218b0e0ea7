# SPDX-License-Identifier: MIT
"""w2 of MXFP4 experts for one to four tokens, in Gluon: weights on their way while w13 runs.

A CTA of four warps takes 64 weight rows of one expert and a share of K. It asks for all their
packed weights by TMA before it waits for w13's kernel, and unpacks the first ones meanwhile.

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

from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.moe.gluon_tile import (
    load_chunk,
    row_scale,
    step_layout,
    unpack,
    word_layout,
)
from oss_fused.kernels.pipeline import copy_box

# shares of K: few enough for the sum of the shares, enough for 132 multiprocessors
SHARES = 3
# chunks of a step
_DEPTH = 2
# Triton 3.7 renamed it
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# columns of a product
_COLUMNS = gl.constexpr(8)


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
def _product_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])


@gluon.constexpr_function
def _token_layout():
    """Rows of tokens' codes [8, 128] on their way to shared memory."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _result_layout():
    """Sums [rows, tokens] as they are stored."""
    return gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])


@gluon.jit
def _make_buffers(desc, s_desc, SLOTS: gl.constexpr, TILES: gl.constexpr):
    """Steps' chunks, their scale words, tokens, and a barrier for each slot."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    chunks = gl.allocate_shared_memory(gl.int32, [SLOTS, 4 * DEPTH, 256], desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, DEPTH, 64], s_desc.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [TILES, _COLUMNS, 128], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    return chunks, words, tokens, full


@gluon.jit
def _request(desc, s_desc, buffers, slot, at, step, pred):
    """Ask for a step of the group whose boxes and scale words begin at the rows ``at``."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    chunks, words, _tokens, full = buffers
    row, s_row = at
    ready = full.index(slot)
    mbarrier.expect(ready, desc.block_type.nbytes + s_desc.block_type.nbytes, pred=pred)
    copy_box(desc, [row + step * (4 * DEPTH), 0], ready, chunks.index(slot), pred=pred)
    copy_box(s_desc, [s_row + step * DEPTH, 0], ready, words.index(slot), pred=pred)


@gluon.jit
def _load_tokens(x, source, mask, first, K: gl.constexpr, tokens, PER: gl.constexpr):
    """Codes of ``source`` [8] tokens, chunks ``first`` and on, into shared memory.

    Row r of a tile is level r % 2 of token r // 2 % PER and belongs to its chunk r // (2 * PER).
    """
    KP: gl.constexpr = (K + 127) // 128 * 128
    PARTS: gl.constexpr = _COLUMNS // (2 * PER)
    TILES: gl.constexpr = tokens.type.shape[0]
    layout: gl.constexpr = _token_layout()
    row = gl.arange(0, _COLUMNS, gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, gl.SliceLayout(0, layout))
    base = x + (source * 2 + row % 2).to(gl.int64) * KP
    loaded = ()
    for tile in gl.static_range(TILES):
        chunk = first + tile * PARTS + row // (2 * PER)
        inside = (mask & (chunk < KP // 128))[:, None] & (column >= 0)[None, :]
        pointers = (base + chunk * 128)[:, None] + column[None, :]
        codes = gl.load(pointers, mask=inside, other=0)
        loaded = loaded + (codes,)  # type: ignore[assignment]  # noqa: RUF005
    for tile in gl.static_range(TILES):
        tokens.index(tile).store(loaded[tile].to(gl.float8e4nv, bitcast=True))
    # the tensor cores read what threads wrote
    fence_async_shared()
    _barrier()


@gluon.jit
def _load_slot(buffers, slot):
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
def _unpack_all(loaded):
    """First operands of a step's products."""
    if len(loaded) == 2:
        return (unpack(loaded[0], loaded[1], _product_layout()),)
    else:
        first = unpack(loaded[0], loaded[1], _product_layout())
        return first, unpack(loaded[2], loaded[3], _product_layout())


@gluon.jit
def _ask(a, tokens, nth, PARTS: gl.constexpr):
    nothing = gl.zeros([64, _COLUMNS], gl.float32, layout=_product_layout())
    b = tokens.index(nth // PARTS).permute((1, 0))
    return warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_step(acc, operands, tokens, nth, PER: gl.constexpr):
    """``acc`` [64, 8] plus the products of chunk ``nth`` of ``tokens`` and of the one behind."""
    PARTS: gl.constexpr = _COLUMNS // (2 * PER)
    part = gl.arange(0, _COLUMNS, gl.SliceLayout(0, _product_layout())) // (2 * PER)
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
def _add_parts(acc, PER: gl.constexpr):
    """Sums [4, 2, 8, PER] of rows (warp, pair, row), levels and parts added."""
    PARTS: gl.constexpr = _COLUMNS // (2 * PER)
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
def _load_tile(tiles, EXPERTS: gl.constexpr):
    """As _load_tile of moe/choice.py."""
    if EXPERTS > 0:
        slot = gl.program_id(1)
        return _chosen_expert(tiles, slot, EXPERTS), slot, gl.to_tensor(1)
    else:
        tile = tiles + gl.program_id(1) * 3
        return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)


@gluon.jit
def _ask_first(
    desc, s_desc, buffers, weight, words, expert, base, N: gl.constexpr, K: gl.constexpr
):
    """Ask for as many steps of this program's group as there are slots, from step ``base`` on.

    Returns a pointer to its scale words and the chunk that K does not fill (packed weights, scale
    words), if any.
    """
    CHUNKS: gl.constexpr = (K + 127) // 128
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    STEPS: gl.constexpr = K // 128 // DEPTH
    SLOTS: gl.constexpr = buffers[3].type.shape[0]
    of_group = expert * (N // 64) + gl.program_id(0)
    at = (of_group * (K // 32), of_group * CHUNKS)
    for slot in gl.static_range(SLOTS):
        _request(desc, s_desc, buffers, slot, at, base + slot, base + slot < STEPS)
    words += of_group.to(gl.int64) * (CHUNKS * 64)
    last = ()
    if K % 128 != 0:
        last = load_chunk(weight + of_group.to(gl.int64) * (8 * K), words, K // 128, K)
    return words, last


@gluon.jit(do_not_specialize=["n_pairs"])
def _down_few_kernel(
    desc,
    s_desc,
    x,
    weight,
    words,
    bias,
    out,
    tiles,
    n_pairs,
    N: gl.constexpr,
    K: gl.constexpr,
    PER: gl.constexpr,
    SHARES: gl.constexpr,
    PRE: gl.constexpr,
    EXPERTS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """w2 @ x + bias of the pairs of a tile, by shares of K: [SHARES, P, N]."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    STEPS: gl.constexpr = K // 128 // DEPTH
    PARTS: gl.constexpr = _COLUMNS // (2 * PER)
    SLOTS: gl.constexpr = (STEPS + SHARES - 1) // SHARES
    buffers = _make_buffers(desc, s_desc, SLOTS, (SLOTS * DEPTH + PARTS) // PARTS)
    group = gl.program_id(0)
    share = gl.program_id(2)
    wait_unless(PREFETCH)
    # the routing kernels have finished: gate_up waited for them before it let others start
    expert, begin, count = _load_tile(tiles, EXPERTS)
    if expert >= 0:
        base = share * SLOTS
        words, last = _ask_first(desc, s_desc, buffers, weight, words, expert, base, N, K)
        row = gl.arange(0, 64, gl.SliceLayout(1, _result_layout()))
        scale = row_scale(gl.load(words + row)) * 0.125
        if bias is not None:
            shift = gl.load(bias + expert.to(gl.int64) * N + group * 64 + row).to(gl.float32)
            shift = gl.where(share == 0, shift, 0.0)
        # the first weights are unpacked meanwhile
        ready = ()
        for slot in gl.static_range(PRE):
            mbarrier.wait(buffers[3].index(slot), 0)
            operands = _unpack_all(_load_slot(buffers, slot))
            ready = ready + (operands,)  # type: ignore[assignment]  # noqa: RUF005
        wait_for_inputs()
        # not before: combine reads the routing ahead of its own wait
        start_next()
        column = gl.arange(0, _COLUMNS, gl.SliceLayout(1, _token_layout()))
        nth = column // 2 % PER
        _load_tokens(x, begin + nth, nth < count, base * DEPTH, K, buffers[2], PER)
        acc = gl.zeros([64, _COLUMNS], gl.float32, layout=_product_layout())
        here = gl.minimum(STEPS - base, SLOTS)
        for slot in gl.static_range(PRE):
            acc = _add_step(acc, ready[slot], buffers[2], slot * DEPTH, PER)
        for slot in range(PRE, here):
            mbarrier.wait(buffers[3].index(slot), 0)
            operands = _unpack_all(_load_slot(buffers, slot))
            acc = _add_step(acc, operands, buffers[2], slot * DEPTH, PER)
        # the outer branch is decided when the kernel is compiled
        if K % 128 != 0:  # noqa: SIM102
            if share == SHARES - 1:
                acc = _add_step(acc, _unpack_all(last), buffers[2], here * DEPTH, PER)
        # rows (pair, warp, row) are those of memory
        total = _add_parts(acc, PER).permute((1, 0, 2, 3)).reshape([64, PER])
        total = gl.convert_layout(total, _result_layout()) * scale[:, None]
        if bias is not None:
            total += shift[:, None]
        token = gl.arange(0, PER, gl.SliceLayout(0, _result_layout()))
        rows = out + (share * n_pairs + begin + token).to(gl.int64) * N
        inside = (token < count)[None, :] & (row >= 0)[:, None]
        gl.store(rows[None, :] + (group * 64 + row)[:, None], total, mask=inside)
    else:
        # the end of this grid must say that gate_up has ended, even where no expert is here
        wait_for_inputs()


def _boxes(words: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of boxes [rows, columns] of int32 ``words``, which are contiguous."""
    flat = words.view(torch.int32).view(-1, columns)
    layout = gl.NVMMASharedLayout(0, 32)
    return TensorDescriptor(flat, list(flat.shape), [columns, 1], [rows, columns], layout)


def down_few(
    tiles: torch.Tensor,
    act: torch.Tensor,
    weight: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    counts: tuple[int, int, int],
    inner: int,
    prefetch_weights: bool,
) -> None:
    """Fill the shares ``out`` [SHARES, P, N] float32 of w2's products; see moe/triton.py.

    Args:
        tiles: list of tiles, or the logits of one token.
        act: e4m3 codes [P, 2, KP].
        weight: repacked [E, N, K/2].
        words: repacked [E, N/64, chunks, 64].
        bias: [E, N] or None.
        out: see above.
        counts: tokens (at most four), tiles, and the experts of the model if ``tiles`` are logits.
        inner: K.
        prefetch_weights: weights may be read before the kernel ahead has ended.
    """
    tokens, n_tiles, experts = counts
    shares, pairs, rows = out.shape
    _down_few_kernel[(rows // 64, n_tiles, shares)](
        _boxes(weight, 4 * _DEPTH, 256),
        _boxes(words, _DEPTH, 64),
        act.view(torch.uint8),
        weight.view(torch.int32),
        words,
        bias,
        out,
        tiles,
        pairs,
        N=rows,
        K=inner,
        PER=tokens if tokens <= 2 else 4,
        SHARES=shares,
        PRE=1,
        EXPERTS=experts,
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(weight.device),
    )
