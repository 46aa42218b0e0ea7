# SPDX-License-Identifier: MIT
"""Grouped products of the experts for tens of tokens each, in Gluon: one warp copies, others
multiply.

A persistent program takes as many 64-row groups of one expert's weight at a time as it has
consumers (four warps each). One warp copies their packed weights, scale words and the codes of a
tile's tokens, sorted by expert, into a ring of shared memory, chunk by chunk. A consumer unpacks
its group's weights into registers and multiplies. moe/gemm.py says what levels are, moe/tile.py in
which order columns lie.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.gluon_tile import (
    load_chunk,
    row_scale,
    step_layout,
    store_codes,
    unpack,
    word_layout,
)
from oss_fused.kernels.moe.router import Routing
from oss_fused.kernels.pipeline import copy_box, descriptor, next_slot, ring_stages, sums_layout

# packed weights and scale words of a group's chunk
_CHUNK_BYTES = 64 * 64 + 64 * 4
# of shared memory: barriers, and the exchange of a result's layout
_OTHER_BYTES = 12 * 1024


@gluon.constexpr_function
def _scale_layout():
    """Scale words [2, 32] of a chunk: a thread has those of rows p and p + 32."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0]], lanes, [[0, 8], [0, 16]], [], [2, 32])


@gluon.constexpr_function
def _result_layout(tokens, levels):
    """A product's sums as [row in memory, token]: a thread has rows p and p + 32."""
    columns = [1 << bit for bit in range(tokens.bit_length() - 1)]
    inside, across = (columns[:1], columns[1:3]) if levels == 1 else ([], columns[:2])
    beyond = columns[len(inside) + 2 :]
    registers = [[0, at] for at in inside] + [[32, 0]] + [[0, at] for at in beyond]
    lanes = [[0, at] for at in across] + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [64, tokens])


@gluon.jit
def _load(
    descs, ring, tiles, n_tiles, units, N: gl.constexpr, K: gl.constexpr, LEVELS: gl.constexpr
):
    """The loading warp: every chunk of every unit of this program, once a slot is free."""
    w_desc, s_desc, x_desc = descs
    weights, words, codes, full, empty = ring
    STAGES: gl.constexpr = codes.type.shape[0]
    CONSUMERS: gl.constexpr = weights.type.shape[0] // STAGES
    WHOLE: gl.constexpr = K // 128
    CHUNKS: gl.constexpr = (K + 127) // 128
    WEIGHTS: gl.constexpr = CONSUMERS * (w_desc.block_type.nbytes + s_desc.block_type.nbytes)
    TOKENS: gl.constexpr = x_desc.block_type.nbytes
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), n_tiles * units, gl.num_programs(0)):
        tile = index // units
        expert = gl.load(tiles + tile * 3)
        if expert >= 0:
            begin = gl.load(tiles + tile * 3 + 1) * LEVELS
            for chunk in range(CHUNKS):
                mbarrier.wait(empty.index(slot), phase)
                ready = full.index(slot)
                # the consumers load a chunk that is not whole themselves
                whole = chunk < WHOLE
                mbarrier.expect(ready, WEIGHTS + TOKENS, pred=whole)
                mbarrier.expect(ready, TOKENS, pred=chunk >= WHOLE)
                copy_box(x_desc, [begin, chunk * 128], ready, codes.index(slot))
                for part in gl.static_range(CONSUMERS):
                    group = gl.minimum(index % units * CONSUMERS + part, N // 64 - 1)
                    group += expert * (N // 64)
                    at = slot * CONSUMERS + part
                    row = group * (K // 2) + chunk * 64
                    copy_box(w_desc, [row, 0], ready, weights.index(at), pred=whole)
                    row = (group * CHUNKS + chunk) * 2
                    copy_box(s_desc, [row, 0], ready, words.index(at), pred=whole)
                slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _multiply(weight, words, ring, slot, phase, K: gl.constexpr, PART: gl.constexpr):
    """Products [64, columns] over all of K, and the ring's next slot and phase."""
    weights, scales, codes, full, empty = ring
    STAGES: gl.constexpr = codes.type.shape[0]
    COLUMNS: gl.constexpr = codes.type.shape[1]
    CONSUMERS: gl.constexpr = weights.type.shape[0] // STAGES
    WHOLE: gl.constexpr = K // 128
    row: gl.constexpr = gl.SliceLayout(1, step_layout())
    product: gl.constexpr = sums_layout(COLUMNS, 8)
    if WHOLE * 128 < K:
        # on their way while the others are multiplied
        tail, tail_steps = load_chunk(weight, words, WHOLE, K)
    acc = gl.zeros([64, COLUMNS], gl.float32, layout=product)
    for _ in range(WHOLE):
        mbarrier.wait(full.index(slot), phase)
        packed = weights.index(slot * CONSUMERS + PART).load(word_layout())
        steps = scales.index(slot * CONSUMERS + PART).load(_scale_layout()).reshape([64])
        a = unpack(packed, gl.convert_layout(steps, row, assert_trivial=True), product)
        token = warpgroup_mma(a, codes.index(slot).permute((1, 0)), acc, is_async=True)
        # nothing may run past this: the next weights take the registers of these
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    if WHOLE * 128 < K:
        a = unpack(tail, tail_steps, product)
        mbarrier.wait(full.index(slot), phase)
        token = warpgroup_mma(a, codes.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _scaled(acc, words, shift, x_scale, begin, count, LEVELS: gl.constexpr):
    """[row in memory, token] of [64, columns] products, with scales and bias.

    x_scale None is the static 1/8.
    """
    TOKENS: gl.constexpr = acc.type.shape[1] // LEVELS
    layout: gl.constexpr = _result_layout(TOKENS, LEVELS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if LEVELS == 2:
        first, second = gl.split(acc.reshape([64, TOKENS, 2]))
        acc = first + second * 0.0625
    # rows p and p + 32 of the group in memory are rows r and r + 8 of the product
    acc = acc.reshape([4, 2, 8, TOKENS]).permute((1, 0, 2, 3)).reshape([64, TOKENS])
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    acc *= gl.convert_layout(row_scale(words), rows, assert_trivial=True)[:, None]
    if x_scale is None:
        acc *= 0.125
    else:
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
        acc *= gl.load(x_scale + begin + token, mask=token < count, other=0.0)[None, :]
    if shift is not None:
        acc += gl.convert_layout(shift.to(gl.float32), rows, assert_trivial=True)[:, None]
    return acc


@gluon.jit
def _store_rows(acc, out, group, begin, count, N: gl.constexpr):
    """out[begin + token, group * 64 + row] of [64, tokens], rounded to out's dtype.

    Eight threads of a warp hold eight adjacent numbers.
    """
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    token = gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
    target = out + (begin + token).to(gl.int64)[None, :] * N + (group * 64 + row)[:, None]
    mask = (token < count)[None, :] & (row >= 0)[:, None]
    gl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(
    work,
    N: gl.constexpr,
    K: gl.constexpr,
    OP: gl.constexpr,
    LEVELS: gl.constexpr,
    DTYPE: gl.constexpr,
    PART: gl.constexpr,
):
    """A consumer: row group ``CONSUMERS * unit + PART`` of every unit of this program."""
    ring, tensors, tiles, n_tiles, units = work
    x_scale, weight, weight_scale, bias, out = tensors
    CONSUMERS: gl.constexpr = ring[0].type.shape[0] // ring[2].type.shape[0]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    for index in range(gl.program_id(0), n_tiles * units, gl.num_programs(0)):
        tile = index // units
        expert = gl.load(tiles + tile * 3).to(gl.int64)
        if expert >= 0:
            begin = gl.load(tiles + tile * 3 + 1)
            count = gl.load(tiles + tile * 3 + 2)
            # of groups that are not there the last is computed again: same inputs, same values
            group = gl.minimum(index % units * CONSUMERS + PART, N // 64 - 1)
            of_group = expert * (N // 64) + group
            words = weight_scale + of_group * ((K + 127) // 128 * 64)
            # what the sums will be multiplied with and moved by comes along with the weights
            row = gl.arange(0, 64, gl.SliceLayout(1, step_layout()))
            first_words = gl.load(words + row)
            shift = None
            if bias is not None:
                # with w13 a group holds 32 gates, then their ups
                column = row if OP is None else row % 32 * 2 + row // 32
                shift = gl.load(bias + expert * N + group * 64 + column)
            packed = weight + of_group * (8 * K)
            acc, slot, phase = _multiply(packed, words, ring, slot, phase, K, PART)
            acc = _scaled(acc, first_words, shift, x_scale, begin, count, LEVELS)
            if OP is None:
                _store_rows(acc, out, group, begin, count, N)
            else:
                LAST: gl.constexpr = N // 64 - 1
                TOKENS: gl.constexpr = acc.type.shape[1]
                gate, up = gl.split(acc.reshape([2, 32, TOKENS]).permute((1, 2, 0)))
                store_codes(gate, up, out, group, begin, count, OP, LAST, LEVELS, DTYPE)


@gluon.jit
def _make_ring(w_desc, s_desc, x_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Packed weights, scale words, codes; barriers between the loading warp and the consumers."""
    COLUMNS: gl.constexpr = x_desc.block_type.shape[0]
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CONSUMERS, 64, 16], w_desc.layout)
    words = gl.allocate_shared_memory(s_desc.dtype, [STAGES * CONSUMERS, 2, 32], s_desc.layout)
    codes = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return weights, words, codes, full, empty


@gluon.jit(do_not_specialize=["n_tiles"])
def _stream_kernel(
    w_desc,
    s_desc,
    x_desc,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tiles,
    n_tiles,
    N: gl.constexpr,
    K: gl.constexpr,
    OP: gl.constexpr,
    LEVELS: gl.constexpr,
    DTYPE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products of sorted rows with w13, gated (OP codes a row), or with w2 (OP None)."""
    units: gl.constexpr = (N // 64 + CONSUMERS - 1) // CONSUMERS
    ring = _make_ring(w_desc, s_desc, x_desc, STAGES, CONSUMERS)
    descs = (w_desc, s_desc, x_desc)
    work = (ring, (x_scale, weight, weight_scale, bias, out), tiles, n_tiles, units)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 0)),
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 1)),
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 2)),
                (_load, (descs, ring, tiles, n_tiles, units, N, K, LEVELS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 0)),
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 1)),
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 2)),
                (_consume, (work, N, K, OP, LEVELS, DTYPE, 3)),
                (_load, (descs, ring, tiles, n_tiles, units, N, K, LEVELS)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )


def stream_product(
    codes: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    inner: int,
    dtype: torch.dtype,
    rows: int,
) -> None:
    """Fill ``out`` as ``large_product`` does, for tiles of 32 or 64 tokens.

    Args:
        codes: e4m3 [P, levels, KP], sorted by expert.
        x_scale: float32 [P], or None for the static 1/8 of the gated codes.
        weight: repacked [E, N, K/2].
        weight_scale: repacked [E, N/64, chunks, 64].
        bias: [E, N] or None.
        out: float8_e4m3fn for the first product; [P, N] of any dtype for the second.
        routing: with tiles of ``rows`` tokens.
        inner: K.
        dtype: of the model, to which the intermediate is rounded.
        rows: tokens of a tile.
    """
    pairs, levels, padded = codes.shape
    width, n_tiles = weight.shape[1], routing.tiles.shape[0]
    # the sums of more columns take the registers of a fourth
    consumers = 4 if rows * levels <= 64 else 3
    programs = min(multiprocessors(codes.device), n_tiles * cdiv(width // 64, consumers))
    packed, words = weight.view(torch.int32).view(-1, 16), weight_scale.view(-1, 32)
    w_layout, s_layout = gl.NVMMASharedLayout(64, 32), gl.NVMMASharedLayout(0, 32)
    _stream_kernel[(programs,)](
        TensorDescriptor(packed, list(packed.shape), [16, 1], [64, 16], w_layout),
        TensorDescriptor(words, list(words.shape), [32, 1], [2, 32], s_layout),
        descriptor(codes.view(pairs * levels, padded), rows * levels, 128),
        x_scale,
        weight.view(torch.int32),
        weight_scale,
        bias,
        out,
        routing.tiles,
        n_tiles,
        N=width,
        K=inner,
        OP=out.shape[2] if out.dim() == 3 else None,
        LEVELS=levels,
        DTYPE=gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        CONSUMERS=consumers,
        STAGES=ring_stages(consumers * _CHUNK_BYTES + rows * levels * 128, _OTHER_BYTES),
        num_warps=4,
        **pdl_options(codes.device),
    )
