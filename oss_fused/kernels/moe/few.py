# SPDX-License-Identifier: MIT
"""MXFP4 experts for one to four tokens, in Gluon: weights by TMA as soon as experts are known.

A CTA of four warps takes 64 weight rows of one expert; of w2, a share of K. w13's CTAs wait for the
choice of experts. Before that they touch each expert's weights once, so that the translation of
their addresses is at hand, and of one token ask L2 for the first weights of the expert that they
expect. w2's CTAs start while w13 runs, ask for all of their weights and then
wait for it. moe/few_tile.py has the pieces.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.launch import (
    KEPT,
    pdl_options,
    prefetch_line,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.moe.few_tile import (
    COLUMNS,
    STEP_CHUNKS,
    add_parts,
    add_step,
    boxes,
    load_slot,
    load_tile,
    load_tokens,
    make_buffers,
    product_layout,
    request,
    result_layout,
    unpack_all,
)
from oss_fused.kernels.moe.gluon_tile import (
    activate,
    activation_position,
    load_chunk,
    row_scale,
)
from oss_fused.kernels.moe.place import Routing
from oss_fused.kernels.pipeline import meet

# shares of K of w2: few enough for the sum of the shares, enough for 132 multiprocessors
SHARES = 3
# steps of w13 that a CTA has under way, by tokens: three CTAs with six of them fit a
# multiprocessor, and one wave then has all groups of one token; four CTAs with four
_SLOTS = {1: 6, 2: 4}


@gluon.jit
def _touch(weight, words, EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    """Ask L2 for a line of this group's packed weights and of its scale words, of every expert (at
    most 64)."""
    CHUNKS: gl.constexpr = (K + 127) // 128
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    group = gl.minimum(lane % 64, EXPERTS - 1).to(gl.int64) * (N // 64) + gl.program_id(0)
    packed = (weight + group * (8 * K)).to(gl.int64)
    prefetch_line(gl.where(lane < 64, packed, (words + group * (CHUNKS * 64)).to(gl.int64)))


@gluon.jit
def _prefetch_expected(weight, expected, EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    """Ask L2 for the first 16 KB of this program's weights if the logits ``expected`` hold.

    More bytes keep the router and the weights of the kernel ahead waiting.
    """
    expert, _, _ = load_tile(expected, EXPERTS)
    # logits that change while they are read have no order
    expert = gl.minimum(expert, EXPERTS - 1)
    packed = weight + (expert.to(gl.int64) * (N // 64) + gl.program_id(0)) * (8 * K)
    line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    prefetch_line((packed + gl.minimum(line, K // 4 - 1) * 32).to(gl.int64))


@gluon.jit
def _ask_first(
    desc, s_desc, buffers, weight, words, expert, base, N: gl.constexpr, K: gl.constexpr
):
    """Ask for as many steps of this program's group as there are slots, from step ``base`` on.

    Returns where its boxes and scale words begin, a pointer to the latter, and the chunk that K
    does not fill (packed weights, scale words), if any.
    """
    CHUNKS: gl.constexpr = (K + 127) // 128
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    STEPS: gl.constexpr = K // 128 // DEPTH
    SLOTS: gl.constexpr = buffers[3].type.shape[0]
    of_group = expert * (N // 64) + gl.program_id(0)
    at = (of_group * (K // 32), of_group * CHUNKS)
    for slot in gl.static_range(SLOTS):
        request(desc, s_desc, buffers, slot, at, base + slot, base + slot < STEPS)
    words += of_group.to(gl.int64) * (CHUNKS * 64)
    last = ()
    if K % 128 != 0:
        last = load_chunk(weight + of_group.to(gl.int64) * (8 * K), words, K // 128, K)
    return at, words, last


@gluon.jit
def _sum_steps(desc, s_desc, buffers, at, last, K: gl.constexpr, PER: gl.constexpr):
    """Sums [64, COLUMNS] over all of K, whose first steps have been asked for."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    STEPS: gl.constexpr = K // 128 // DEPTH
    SLOTS: gl.constexpr = buffers[3].type.shape[0]
    acc = gl.zeros([64, COLUMNS], gl.float32, layout=product_layout())
    for step in range(STEPS):
        slot = step % SLOTS
        if (step > 0) & (step - 1 + SLOTS < STEPS):
            # every thread has read the slot of the step before
            meet()
            behind = step - 1 + SLOTS
            request(desc, s_desc, buffers, behind % SLOTS, at, behind, True)
        mbarrier.wait(buffers[3].index(slot), step // SLOTS % 2)
        operands = unpack_all(load_slot(buffers, slot))
        acc = add_step(acc, operands, buffers[2], step * DEPTH, PER)
    if K % 128 != 0:
        acc = add_step(acc, unpack_all(last), buffers[2], STEPS * DEPTH, PER)
    return acc


@gluon.jit
def _store_codes(act, out, column, position, mask, group, WIDTH: gl.constexpr):
    """Codes of both levels of ``act`` [32, tokens] for the static scale 1/8: out [P, 2, OP]."""
    OP: gl.constexpr = (WIDTH + 127) // 128 * 128
    act *= 8.0
    first = act.to(gl.float8e4nv)
    second = ((act - first.to(gl.float32)) * 16.0).to(gl.float8e4nv)
    rows = out + position.to(gl.int64)[None, :] * (2 * OP)
    inside = mask[None, :] & (column >= 0)[:, None]
    target = rows + activation_position(column)[:, None]
    gl.store(target, first, mask=inside, eviction_policy=KEPT)
    gl.store(target + OP, second, mask=inside, eviction_policy=KEPT)
    # the last group fills the chunk: what is not written could hold NaN codes
    if OP != WIDTH:  # noqa: SIM102
        if group == WIDTH // 32 - 1:
            zero = (first.to(gl.uint8, bitcast=True) * 0).to(gl.float8e4nv, bitcast=True)
            for block in gl.static_range(1, (OP - WIDTH) // 32 + 1):
                target = rows + activation_position(column + block * 32)[:, None]
                gl.store(target, zero, mask=inside)
                gl.store(target + OP, zero, mask=inside)


@gluon.jit
def _gate_up_few_kernel(
    desc,
    s_desc,
    x,
    x_scale,
    weight,
    words,
    bias,
    out,
    order,
    tiles,
    expected,
    N: gl.constexpr,
    K: gl.constexpr,
    PER: gl.constexpr,
    TOP_K: gl.constexpr,
    SLOTS: gl.constexpr,
    TOUCHED: gl.constexpr,
    EXPERTS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Clamped SwiGLU of w13 @ x + bias of the pairs of a tile: codes [P, 2, OP]."""
    CHUNKS: gl.constexpr = (K + 127) // 128
    PARTS: gl.constexpr = COLUMNS // (2 * PER)
    buffers = make_buffers(desc, s_desc, SLOTS, (CHUNKS + PARTS - 1) // PARTS)
    group = gl.program_id(0)
    _touch(weight, words, TOUCHED, N, K)
    wait_unless(expected is not None)
    if expected is not None:
        _prefetch_expected(weight, expected, EXPERTS, N, K)
    wait_for_inputs()
    # not before: the kernel that follows reads the tiles ahead of its own wait
    start_next()
    expert, begin, count = load_tile(tiles, EXPERTS)
    if expert >= 0:
        at, words, last = _ask_first(desc, s_desc, buffers, weight, words, expert, 0, N, K)
        row = gl.arange(0, 32, gl.SliceLayout(1, result_layout()))
        column = group * 32 + row
        gate_scale, up_scale = row_scale(gl.load(words + row)), row_scale(gl.load(words + row + 32))
        if bias is not None:
            of_gate = bias + expert.to(gl.int64) * N + 2 * column
            gate_shift, up_shift = gl.load(of_gate).to(gl.float32), gl.load(of_gate + 1)
        token = gl.arange(0, PER, gl.SliceLayout(0, result_layout()))
        start, scaled = 0, token * 0
        if order is not None:
            start = begin
            scaled = gl.load(order + begin + token, mask=token < count, other=0) // TOP_K
        load_tokens(x, order, start, count, 0, K, buffers[2], PER, TOP_K)
        scale = gl.load(x_scale + scaled, mask=token < count, other=0.0)
        acc = _sum_steps(desc, s_desc, buffers, at, last, K, PER)
        # [warp, pair, row, token]: pair 0 are gates, pair 1 the ups of the same columns
        sums = add_parts(acc, PER).permute((0, 2, 3, 1)).reshape([32, PER, 2])
        gate, up = gl.split(sums)
        gate = gl.convert_layout(gate, result_layout()) * gate_scale[:, None] * scale[None, :]
        up = gl.convert_layout(up, result_layout()) * up_scale[:, None] * scale[None, :]
        if bias is not None:
            gate += gate_shift[:, None]
            up += up_shift.to(gl.float32)[:, None]
        act = activate(gate, up).to(DTYPE).to(gl.float32)
        _store_codes(act, out, column, begin + token, token < count, group, N // 2)


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
    EXPERTS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """w2 @ x + bias of the pairs of a tile, by shares of K: [SHARES, P, N]."""
    DEPTH: gl.constexpr = s_desc.block_type.shape[0]
    STEPS: gl.constexpr = K // 128 // DEPTH
    PARTS: gl.constexpr = COLUMNS // (2 * PER)
    SLOTS: gl.constexpr = (STEPS + SHARES - 1) // SHARES
    buffers = make_buffers(desc, s_desc, SLOTS, (SLOTS * DEPTH + PARTS) // PARTS)
    group = gl.program_id(0)
    share = gl.program_id(2)
    wait_unless(PREFETCH)
    # the routing kernels have finished: gate_up waited for them before it let others start
    expert, begin, count = load_tile(tiles, EXPERTS)
    if expert >= 0:
        base = share * SLOTS
        _, words, last = _ask_first(desc, s_desc, buffers, weight, words, expert, base, N, K)
        row = gl.arange(0, 64, gl.SliceLayout(1, result_layout()))
        scale = row_scale(gl.load(words + row)) * 0.125
        if bias is not None:
            shift = gl.load(bias + expert.to(gl.int64) * N + group * 64 + row).to(gl.float32)
            shift = gl.where(share == 0, shift, 0.0)
        wait_for_inputs()
        # not before: combine reads the routing ahead of its own wait
        start_next()
        load_tokens(x, None, begin, count, base * DEPTH, K, buffers[2], PER, 1)
        acc = gl.zeros([64, COLUMNS], gl.float32, layout=product_layout())
        here = gl.minimum(STEPS - base, SLOTS)
        for slot in range(here):
            mbarrier.wait(buffers[3].index(slot), 0)
            operands = unpack_all(load_slot(buffers, slot))
            acc = add_step(acc, operands, buffers[2], slot * DEPTH, PER)
        # the outer branch is decided when the kernel is compiled
        if K % 128 != 0:  # noqa: SIM102
            if share == SHARES - 1:
                acc = add_step(acc, unpack_all(last), buffers[2], here * DEPTH, PER)
        # rows (pair, warp, row) are those of memory
        total = add_parts(acc, PER).permute((1, 0, 2, 3)).reshape([64, PER])
        total = gl.convert_layout(total, result_layout()) * scale[:, None]
        if bias is not None:
            total += shift[:, None]
        token = gl.arange(0, PER, gl.SliceLayout(0, result_layout()))
        rows = out + (share * n_pairs + begin + token).to(gl.int64) * N
        inside = (token < count)[None, :] & (row >= 0)[:, None]
        target = rows[None, :] + (group * 64 + row)[:, None]
        gl.store(target, total, mask=inside, eviction_policy=KEPT)
    else:
        # the end of this grid must say that gate_up has ended, even where no expert is here
        wait_for_inputs()


def gate_up_few(
    routing: Routing,
    weight: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    counts: tuple[int, int, int],
    top_k: int,
    inner: int,
    dtype: torch.dtype,
) -> None:
    """Fill the codes ``out`` [P, 2, OP] of w13's gated products; see moe/triton.py.

    Args:
        routing: tiles, and the codes of x by token.
        weight: repacked [E, N, K/2] of at most 64 experts.
        words: repacked [E, N/64, chunks, 64].
        bias: [E, N] or None.
        out: see above.
        counts: tokens (one or two), tiles, and the experts of the model if ``routing.tiles`` are
            the logits of one token.
        top_k: experts of a token.
        inner: K.
        dtype: of the model, to which the activation is rounded.
    """
    assert routing.codes is not None
    tokens, n_tiles, chosen = counts
    experts, rows, _ = weight.shape
    _gate_up_few_kernel[(rows // 64, n_tiles)](
        boxes(weight, 4 * STEP_CHUNKS, 256),
        boxes(words, STEP_CHUNKS, 64),
        routing.codes.view(torch.uint8),
        routing.scale,
        weight.view(torch.int32),
        words,
        bias,
        out,
        routing.order,
        routing.tiles,
        routing.expected,
        N=rows,
        K=inner,
        PER=tokens,
        TOP_K=top_k,
        SLOTS=min(_SLOTS[tokens], inner // 128 // STEP_CHUNKS),
        TOUCHED=experts,
        EXPERTS=chosen,
        DTYPE=gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        num_warps=4,
        **pdl_options(weight.device),
    )


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
        counts: as of ``gate_up_few``, but up to four tokens.
        inner: K.
        prefetch_weights: weights may be read before the kernel ahead has ended.
    """
    tokens, n_tiles, experts = counts
    shares, pairs, rows = out.shape
    _down_few_kernel[(rows // 64, n_tiles, shares)](
        boxes(weight, 4 * STEP_CHUNKS, 256),
        boxes(words, STEP_CHUNKS, 64),
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
        EXPERTS=experts,
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(weight.device),
    )
