# SPDX-License-Identifier: MIT
"""Weight-only product for some tens of rows and more on Hopper, in Gluon.

Computes out.T = (w @ x.T) * scale + bias, as tile.py does. One warp loads boxes of codes and of x
into a ring of shared memory. A consumer (four warps) owns 64 weight rows of a tile and all of its
rows of x. It asks the tensor cores for the product of a block of K, reads the codes of the next
block and converts them in registers while that product runs. CTAs are persistent: the loading warp
fetches the next tile's operands while a result leaves.

Where a result has few tiles, K is split over CTAs. They leave float32 sums, which parts.py adds.
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
from oss_fused.kernels.pipeline import copy_box, descriptor, next_slot, store_box, sums_layout
from oss_fused.kernels.weight_only.parts import add_parts

# weight rows of a consumer
_ROWS = 64
# rows of x of a chunk of a result, and chunks that a consumer may have under way to memory
_CHUNK = 64
# bytes of shared memory of a multiprocessor that CTAs share, and of one for barriers
_SHARED_BYTES = 227 * 1024
_RESERVED = 2 * 1024


@gluon.jit
def _place(index, sizes, GROUP_M: gl.constexpr):
    """First row and column of a tile, the part of K it is for, and that part's steps."""
    blocks_m, blocks_n, steps, each = sizes
    part = index // (blocks_m * blocks_n)
    block_m, block_n = tile_of(index % (blocks_m * blocks_n), blocks_m, blocks_n, GROUP_M)
    begin = part * each
    return block_m, block_n, part, begin, gl.minimum(begin + each, steps)


@gluon.jit
def _load(w_desc, x_desc, ring, sizes, tiles, GROUP_M: gl.constexpr, PREFETCH: gl.constexpr):
    """The loading warp: every step of every tile of this CTA, as soon as a slot is free."""
    codes, tokens, full, empty = ring
    STAGES: gl.constexpr = tokens.type.shape[0]
    CONSUMERS: gl.constexpr = codes.type.shape[0] // STAGES
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    BLOCK_K: gl.constexpr = tokens.type.shape[2]
    ROWS: gl.constexpr = codes.type.shape[1]
    BYTES: gl.constexpr = CONSUMERS * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    wait_unless(PREFETCH)
    _m, block_n, _part, begin, end = _place(gl.program_id(0), sizes, GROUP_M)
    for slot in gl.static_range(STAGES):
        wanted = begin + slot < end
        mbarrier.expect(full.index(slot), BYTES, pred=wanted)
        for part in gl.static_range(CONSUMERS):
            copy_box(
                w_desc,
                [(block_n * CONSUMERS + part) * ROWS, (begin + slot) * BLOCK_K],
                full.index(slot),
                codes.index(slot * CONSUMERS + part),
                pred=wanted,
            )
    requested = gl.minimum(STAGES, end - begin)
    wait_for_inputs()
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block_m, block_n, _part, begin, end = _place(index, sizes, GROUP_M)
        for step in range(begin, end):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            fresh = requested <= 0
            mbarrier.expect(ready, BYTES, pred=fresh)
            for part in gl.static_range(CONSUMERS):
                copy_box(
                    w_desc,
                    [(block_n * CONSUMERS + part) * ROWS, step * BLOCK_K],
                    ready,
                    codes.index(slot * CONSUMERS + part),
                    pred=fresh,
                )
            requested -= 1
            copy_box(x_desc, [block_m * BLOCK_M, step * BLOCK_K], ready, tokens.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _widened(box, DTYPE: gl.constexpr, product: gl.constexpr):
    """Codes [ROWS, BLOCK_K] of shared memory as left operand."""
    return widened(box.load(gl.DotOperandLayout(0, product, 2)), DTYPE)


@gluon.jit
def _multiply(ring, slot, phase, begin, end, PART: gl.constexpr):
    """Sums [ROWS, BLOCK_M] over the steps of a tile, and the ring's next slot and phase."""
    codes, tokens, full, empty = ring
    STAGES: gl.constexpr = tokens.type.shape[0]
    CONSUMERS: gl.constexpr = codes.type.shape[0] // STAGES
    DTYPE: gl.constexpr = tokens.dtype
    ROWS: gl.constexpr = codes.type.shape[1]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    product: gl.constexpr = sums_layout(BLOCK_M, 16)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=product)
    mbarrier.wait(full.index(slot), phase)
    wide = _widened(codes.index(slot * CONSUMERS + PART), DTYPE, product)
    for _step in range(begin, end - 1):
        acc = warpgroup_mma(wide, tokens.index(slot).permute((1, 0)), acc, is_async=True)
        used = slot
        slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        following = _widened(codes.index(slot * CONSUMERS + PART), DTYPE, product)
        # passed long ago; it keeps the assembler from waiting before it converts
        mbarrier.wait(full.index(slot), phase)
        acc, wide, following = warpgroup_mma_wait(0, deps=[acc, wide, following])
        mbarrier.arrive(empty.index(used), count=1)
        wide = following
    acc = warpgroup_mma(wide, tokens.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


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
def _consume(
    work,
    GROUP_M: gl.constexpr,
    W_ROWS: gl.constexpr,
    PART: gl.constexpr,
):
    """A consumer: 64 weight rows of every tile of this CTA."""
    ring, target, scales, sizes, tiles, n = work
    codes, tokens, _full, _empty = ring
    out_desc, buffers, parts = target
    scale, bias = scales
    blocks_m, _blocks_n, _steps, _each = sizes
    CONSUMERS: gl.constexpr = codes.type.shape[0] // tokens.type.shape[0]
    BLOCK_M: gl.constexpr = tokens.type.shape[1]
    ROWS: gl.constexpr = codes.type.shape[1]
    BUFFERS: gl.constexpr = buffers.type.shape[0] // CONSUMERS
    product: gl.constexpr = sums_layout(BLOCK_M, 16)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    wait_for_inputs()
    start_next()
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block_m, block_n, part, begin, end = _place(index, sizes, GROUP_M)
        at_n = (block_n * CONSUMERS + PART) * ROWS
        row = at_n + gl.arange(0, ROWS, gl.SliceLayout(1, product))
        if parts is None:
            channel = scale_column(scale, row, row < n, W_ROWS)
            if bias is not None:
                shift = gl.load(bias + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
        acc, slot, phase = _multiply(ring, slot, phase, begin, end, PART)
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
    if parts is None:
        tma.store_wait(0)


@gluon.jit
def _make_ring(w_desc, x_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    codes = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], w_desc.layout
    )
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return codes, tokens, full, empty


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
    BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    ring = _make_ring(w_desc, x_desc, STAGES, CONSUMERS)
    buffers = ring[1]
    if parts is None:
        buffers = gl.allocate_shared_memory(
            out_desc.dtype,
            [CONSUMERS * BUFFERS, out_desc.block_type.shape[0], ROWS],
            out_desc.layout,
        )
    steps = gl.cdiv(k, x_desc.block_type.shape[1])
    blocks_m, blocks_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, ROWS * CONSUMERS)
    sizes = (blocks_m, blocks_n, steps, gl.cdiv(steps, splits))
    tiles = blocks_m * blocks_n * splits
    target = (out_desc, buffers, parts)
    scales = (scale, bias)
    loads = (w_desc, x_desc, ring, sizes, tiles, GROUP_M, PREFETCH)
    work = (ring, target, scales, sizes, tiles, n)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (work, GROUP_M, W_ROWS, 0)),
                (_consume, (work, GROUP_M, W_ROWS, 1)),
                (_consume, (work, GROUP_M, W_ROWS, 2)),
                (_load, loads),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (work, GROUP_M, W_ROWS, 0)),
                (_consume, (work, GROUP_M, W_ROWS, 1)),
                (_load, loads),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize([(_consume, (work, GROUP_M, W_ROWS, 0)), (_load, loads)], [1], [24])


def product_pipeline(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 256,
    block_k: int = 64,
    consumers: int = 2,
    ctas: int = 1,
    splits: int = 1,
    group_m: int = 8,
    prefetch_weights: bool = False,
) -> None:
    """Launch into ``out`` [M, N]; K, N and the row strides make whole 16-byte words.

    ``ctas``: those that share a multiprocessor. ``splits``: parts of K, of which none may be empty
    (``tiles.splits_of``).
    """
    (m, k), n = x.shape, w.shape[0]
    blocks_m = cdiv(m, block_m)
    tiles = blocks_m * cdiv(n, _ROWS * consumers) * splits
    chunk = min(block_m, _CHUNK)
    buffers = min(block_m // chunk, 2)
    parts, out_desc = None, None
    free = _SHARED_BYTES // ctas - _RESERVED
    if splits > 1:
        parts = out.new_empty(splits, n, blocks_m * block_m, dtype=torch.float32)
    else:
        out_desc = descriptor(out, chunk, _ROWS)
        free -= consumers * buffers * chunk * _ROWS * 2
    stages = min(free // ((_ROWS * consumers + 2 * block_m) * block_k), 12)
    _mixed_pipeline_kernel[(min(tiles, ctas * multiprocessors(x.device)),)](
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
        BUFFERS=buffers,
        GROUP_M=group_m,
        PREFETCH=prefetch_weights,
        num_warps=4,
        maxnreg={1: 65536 // (256 * ctas) // 8 * 8, 2: 168, 3: 128}[consumers],
        **pdl_options(x.device),
    )
    if parts is not None:
        add_parts(parts, scale, bias, out)
