# SPDX-License-Identifier: MIT
"""Weight-only product of three rows and more on Hopper, in Gluon.

Computes out.T = (w @ x.T) * scale + bias, as tile.py does. One warp loads boxes of codes and of x
into a ring of shared memory. A consumer (four warps) owns 64 weight rows of a tile and all of its
rows of x. It asks the tensor cores for the product of a block of K, reads the codes of the next
block and converts them in registers. Consumers have different weight rows; or they have the same
ones, take blocks of K in turn and add their sums in shared memory (``depth``): smaller tiles where
there are few. CTAs are persistent: the next tile's operands arrive while a result leaves.

K can also be split over CTAs. They leave float32 sums, which parts.py adds.
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

from oss_fused.kernels.gemm.portable import tile_of
from oss_fused.kernels.gemm.scales import scale_column
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import (
    multiprocessors,
    pdl_options,
    start_next,
    wait_for_inputs,
    wait_unless,
)
from oss_fused.kernels.numerics import widened
from oss_fused.kernels.pipeline import (
    barriers_of,
    copy_box,
    descriptor,
    meet,
    next_slot,
    store_box,
    sums_layout,
)
from oss_fused.kernels.weight_only.parts import add_parts

# weight rows of a consumer
_ROWS = 64
# rows of x of a chunk of a result, and chunks that a consumer may have under way to memory
_CHUNK = 64
# blocks of rows of x that share weights in L2
_GROUP_M = gl.constexpr(8)
# bytes of shared memory of a multiprocessor that CTAs share, and of one for barriers
_SHARED_BYTES = 227 * 1024
_RESERVED = 2 * 1024


@gluon.jit
def _place(index, sizes):
    """First row and column of a tile, the part of K it is for, and that part's steps."""
    blocks_m, blocks_n, steps, each = sizes
    part = index // (blocks_m * blocks_n)
    block_m, block_n = tile_of(index % (blocks_m * blocks_n), blocks_m, blocks_n, _GROUP_M)
    begin = part * each
    return block_m, block_n, part, begin, gl.minimum(begin + each, steps)


@gluon.jit
def _request_codes(w_desc, x_desc, ring, slot, block_n, step, pred):
    """Codes of a step; announces the rows of x that follow into the same slot."""
    codes, tokens, full, _empty = ring
    GROUPS: gl.constexpr = codes.type.shape[0] // tokens.type.shape[0]
    ROWS: gl.constexpr = codes.type.shape[1]
    BLOCK_K: gl.constexpr = codes.type.shape[2]
    ready = full.index(slot)
    mbarrier.expect(ready, GROUPS * w_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=pred)
    for group in gl.static_range(GROUPS):
        first = (block_n * GROUPS + group) * ROWS
        box = codes.index(slot * GROUPS + group)
        copy_box(w_desc, [first, step * BLOCK_K], ready, box, pred=pred)


@gluon.jit
def _load(w_desc, x_desc, ring, sizes, tiles, PREFETCH: gl.constexpr):
    """The loading warp: every step of every tile of this CTA, as soon as a slot is free."""
    _codes, tokens, full, empty = ring
    STAGES: gl.constexpr = tokens.type.shape[0]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    BLOCK_K: gl.constexpr = tokens.type.shape[2]
    wait_unless(PREFETCH)
    _m, block_n, _part, begin, end = _place(gl.program_id(0), sizes)
    for slot in gl.static_range(STAGES):
        _request_codes(w_desc, x_desc, ring, slot, block_n, begin + slot, begin + slot < end)
    requested = gl.minimum(STAGES, end - begin)
    wait_for_inputs()
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block_m, block_n, _part, begin, end = _place(index, sizes)
        for step in range(begin, end):
            mbarrier.wait(empty.index(slot), phase)
            _request_codes(w_desc, x_desc, ring, slot, block_n, step, requested <= 0)
            requested -= 1
            at = [block_m * BLOCK_M, step * BLOCK_K]
            copy_box(x_desc, at, full.index(slot), tokens.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _widened(box, DTYPE: gl.constexpr, product: gl.constexpr):
    """Codes [ROWS, BLOCK_K] of shared memory as left operand."""
    return widened(box.load(gl.DotOperandLayout(0, product, 2)), DTYPE)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr, COUNT: gl.constexpr):
    for _ in gl.static_range(COUNT):
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _multiply(ring, slot, phase, steps, DEPTH: gl.constexpr, PART: gl.constexpr):
    """Sums [ROWS, BLOCK_M] of this consumer's steps of a tile; the ring's slot behind the tile.

    ``slot`` is that of the tile's first step. Of DEPTH consumers of the same rows each takes every
    DEPTH-th step.
    """
    codes, tokens, full, empty = ring
    STAGES: gl.constexpr = tokens.type.shape[0]
    GROUPS: gl.constexpr = codes.type.shape[0] // STAGES
    GROUP: gl.constexpr = PART % GROUPS
    FIRST: gl.constexpr = PART // GROUPS
    DTYPE: gl.constexpr = tokens.dtype
    ROWS: gl.constexpr = codes.type.shape[1]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    product: gl.constexpr = sums_layout(BLOCK_M, 16)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=product)
    slot, phase = _advance(slot, phase, STAGES, FIRST)
    mbarrier.wait(full.index(slot), phase)
    wide = _widened(codes.index(slot * GROUPS + GROUP), DTYPE, product)
    for _step in range(FIRST + DEPTH, steps, DEPTH):
        acc = warpgroup_mma(wide, tokens.index(slot).permute((1, 0)), acc, is_async=True)
        used = slot
        slot, phase = _advance(slot, phase, STAGES, DEPTH)
        mbarrier.wait(full.index(slot), phase)
        following = _widened(codes.index(slot * GROUPS + GROUP), DTYPE, product)
        # passed long ago; it keeps the assembler from waiting before it converts
        mbarrier.wait(full.index(slot), phase)
        acc, wide, following = warpgroup_mma_wait(0, deps=[acc, wide, following])
        mbarrier.arrive(empty.index(used), count=1)
        wide = following
    acc = warpgroup_mma(wide, tokens.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    # steps of the tile that others took after this one's last
    rest = (steps - 1 - FIRST) % DEPTH
    slot, phase = next_slot(slot, phase, STAGES)
    for other in gl.static_range(DEPTH - 1):
        after, after_phase = next_slot(slot, phase, STAGES)
        slot = gl.where(other < rest, after, slot)
        phase = gl.where(other < rest, after_phase, phase)
    return acc, slot, phase


@gluon.jit
def _sum_up(acc, exchange, turn, PART: gl.constexpr):
    """The first consumer's sums and the others', in order; the others' own are of no use then."""
    sums, there, free = exchange
    OTHERS: gl.constexpr = sums.type.shape[0]
    layout: gl.constexpr = acc.type.layout
    if PART > 0:
        mbarrier.wait(free.index(PART - 1), turn ^ 1)
        sums.index(PART - 1).store(acc)
        meet()
        mbarrier.arrive(there.index(PART - 1), count=1)
    else:
        for other in gl.static_range(OTHERS):
            mbarrier.wait(there.index(other), turn)
            acc = acc + sums.index(other).load(layout)
            meet()
            mbarrier.arrive(free.index(other), count=1)
    return acc


@gluon.jit
def _store_chunks(
    sums, buffers, out_desc, at_m, at_n, BUFFERS: gl.constexpr, PART: gl.constexpr, AT: gl.constexpr
):
    """Write ``sums`` [ROWS, rows of x from AT on] transposed, through this consumer's buffers.

    The copies to memory run under the next tile's product; a buffer is waited for when its turn
    comes again, and ``store_wait(0)`` must follow the last tile.
    """
    CHUNK: gl.constexpr = out_desc.block_type.shape[0]
    HALF: gl.constexpr = sums.type.shape[1] // 2
    if HALF < CHUNK:
        tma.store_wait(BUFFERS - 1)
        buffer = buffers.index(PART * BUFFERS + AT // CHUNK % BUFFERS)
        buffer.permute((1, 0)).store(sums)
        fence_async_shared()
        store_box(out_desc, [at_m + AT, at_n], buffer)
    else:
        left, right = sums.reshape([sums.type.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        _store_chunks(left, buffers, out_desc, at_m, at_n, BUFFERS, PART, AT)
        _store_chunks(right, buffers, out_desc, at_m, at_n, BUFFERS, PART, AT + HALF)


@gluon.jit
def _consume(work, W_ROWS: gl.constexpr, DEPTH: gl.constexpr, PART: gl.constexpr):
    """A consumer: 64 weight rows of every tile of this CTA."""
    ring, exchange, target, scales, sizes, tiles, n = work
    codes, tokens, _full, _empty = ring
    out_desc, buffers, parts = target
    scale, bias = scales
    blocks_m, _blocks_n, _steps, _each = sizes
    GROUPS: gl.constexpr = codes.type.shape[0] // tokens.type.shape[0]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    ROWS: gl.constexpr = codes.type.shape[1]
    BUFFERS: gl.constexpr = buffers.type.shape[0] // GROUPS
    product: gl.constexpr = sums_layout(BLOCK_M, 16)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block_m, block_n, part, begin, end = _place(index, sizes)
        at_n = (block_n * GROUPS + PART % GROUPS) * ROWS
        row = at_n + gl.arange(0, ROWS, gl.SliceLayout(1, product))
        if parts is None:
            channel = scale_column(scale, row, row < n, W_ROWS)
            if bias is not None:
                shift = gl.load(bias + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
        acc, slot, phase = _multiply(ring, slot, phase, end - begin, DEPTH, PART)
        if DEPTH > 1:
            acc = _sum_up(acc, exchange, turn, PART)
            turn ^= 1
        if PART < GROUPS:
            if parts is None:
                acc = acc * channel
                if bias is not None:
                    acc = acc + shift
                rounded = acc.to(tokens.dtype)
                _store_chunks(rounded, buffers, out_desc, block_m * BLOCK_M, at_n, BUFFERS, PART, 0)
            else:
                column = block_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, product))
                line = (part * n + row).to(gl.int64) * (blocks_m * BLOCK_M)
                gl.store(parts + line[:, None] + column[None, :], acc, mask=(row < n)[:, None])
    if parts is None and PART < GROUPS:
        tma.store_wait(0)


@gluon.jit
def _make_ring(w_desc, x_desc, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    codes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS, ROWS, BLOCK_K], w_desc.layout)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    return codes, tokens, barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)


@gluon.jit
def _make_exchange(ring, DEPTH: gl.constexpr):
    """Where consumers of the same rows leave their sums; without such something unused."""
    codes, tokens, full, empty = ring
    exchange = (tokens, full, empty)
    if DEPTH > 1:
        # eight columns of a row lie with four threads
        layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        shape: gl.constexpr = [DEPTH - 1, codes.type.shape[1], tokens.type.shape[1]]
        sums = gl.allocate_shared_memory(gl.float32, shape, layout)
        exchange = (sums, barriers_of(DEPTH - 1, 1), barriers_of(DEPTH - 1, 1))
    return exchange


@gluon.jit(do_not_specialize=["m"])
def _mixed_pipeline_kernel(
    w_desc,
    x_desc,
    out_desc,
    parts,
    scale,
    bias,
    m,
    n,
    k,
    splits,
    W_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    DEPTH: gl.constexpr,
    BUFFERS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    GROUPS: gl.constexpr = CONSUMERS // DEPTH
    ring = _make_ring(w_desc, x_desc, STAGES, GROUPS)
    exchange = _make_exchange(ring, DEPTH)
    buffers = ring[1]
    if parts is None:
        CHUNK: gl.constexpr = out_desc.block_type.shape[0]
        buffers = gl.allocate_shared_memory(
            out_desc.dtype, [GROUPS * BUFFERS, CHUNK, ROWS], out_desc.layout
        )
    steps = gl.cdiv(k, x_desc.block_type.shape[1])
    sizes = (gl.cdiv(m, BLOCK_M), gl.cdiv(n, ROWS * GROUPS), steps, gl.cdiv(steps, splits))
    tiles = sizes[0] * sizes[1] * splits
    loads = (w_desc, x_desc, ring, sizes, tiles, PREFETCH)
    work = (ring, exchange, (out_desc, buffers, parts), (scale, bias), sizes, tiles, n)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, W_ROWS, DEPTH, 0)),
                (_consume, (work, W_ROWS, DEPTH, 1)),
                (_consume, (work, W_ROWS, DEPTH, 2)),
                (_load, loads),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (work, W_ROWS, DEPTH, 0)),
                (_consume, (work, W_ROWS, DEPTH, 1)),
                (_load, loads),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize([(_consume, (work, W_ROWS, DEPTH, 0)), (_load, loads)], [1], [24])


def product_pipeline(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 256,
    block_k: int = 64,
    consumers: int = 2,
    depth: int = 1,
    ctas: int = 1,
    splits: int = 1,
    prefetch_weights: bool = False,
) -> None:
    """Launch into ``out`` [M, N]; K, N and the row strides make whole 16-byte words.

    ``depth``: consumers that share 64 weight rows and take blocks of K in turn, 1 or all of them.
    ``ctas``: those that share a multiprocessor. ``splits``: parts of K, of which none may have less
    than ``depth`` blocks (``tiles.splits_of``).
    """
    (m, k), n = x.shape, w.shape[0]
    blocks_m, groups, steps = cdiv(m, block_m), consumers // depth, cdiv(k, block_k)
    tiles, parts, out_desc = blocks_m * cdiv(n, _ROWS * groups) * splits, None, None
    chunk = min(block_m, _CHUNK)
    buffers = min(block_m // chunk, 2)
    free = _SHARED_BYTES // ctas - _RESERVED - (depth - 1) * _ROWS * block_m * 4
    if splits > 1:
        parts = out.new_empty(splits, n, blocks_m * block_m, dtype=torch.float32)
    else:
        out_desc = descriptor(out, chunk, _ROWS)
        free -= groups * buffers * chunk * _ROWS * 2
    stages = min(free // ((_ROWS * groups + 2 * block_m) * block_k), 12)
    # a slot belongs to one consumer, behind a tile too: a barrier's parity repeats after two laps
    # of the ring, so who waits at it must have waited there in the lap before
    stages -= stages % depth
    whole = steps % depth == cdiv(steps, splits) % depth == 0
    programs = ctas * multiprocessors(x.device) if whole else tiles
    _mixed_pipeline_kernel[(min(tiles, programs),)](
        descriptor(w, _ROWS, block_k),
        descriptor(x, block_m, block_k),
        out_desc,
        parts,
        scale,
        bias,
        m,
        n,
        k,
        splits,
        W_ROWS=scale.numel() != 1,
        STAGES=stages,
        CONSUMERS=consumers,
        DEPTH=depth,
        BUFFERS=buffers,
        PREFETCH=prefetch_weights,
        num_warps=4,
        maxnreg={1: 65536 // (256 * ctas) // 8 * 8, 2: 168, 3: 128}[consumers],
        **pdl_options(x.device),
    )
    if parts is not None:
        add_parts(parts, scale, bias, out)
