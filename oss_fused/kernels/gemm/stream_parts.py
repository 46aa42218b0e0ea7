# SPDX-License-Identifier: MIT
"""Parts of the decode projections in Gluon: weights first, tokens quantised on the way.

A CTA asks for its weights, before it waits for the kernel before where the caller allows it, then
takes codes from memory or makes them itself, which every CTA repeats (one CTA making them for all
costs more: 2 us until the others have seen its count). The product is gemm_stream's: [rows of the
weight, K] @ [K, tokens], tokens on the narrow side.
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

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import runs_gluon

MAX_ROWS = 16
BLOCK_K = 128
# weight tiles that arrive together: every wait costs the whole CTA two barriers
SLABS = 2
# tokens arrive in tiles of so many columns
GROUP_K = 4 * BLOCK_K
# rows of the weight in one wgmma tile
TILE_N = 64
# bytes of shared memory for a CTA's weights and tokens
_SHARED = 220 * 1024
# fewer weight tiles in flight than these stream no faster than the separate kernels
_MIN_STAGES = 4


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _load_tokens(x, residual, at, mask, stride_x, stride_r, rows, cols):
    """x, or x + residual rounded as it is written, float32."""
    dtype: gl.constexpr = x.dtype.element_ty
    h = gl.load(x + rows * stride_x + at + cols, mask=mask, other=0.0).to(gl.float32)
    if residual is not None:
        h += gl.load(residual + rows * stride_r + at + cols, mask=mask, other=0.0).to(gl.float32)
        h = h.to(dtype).to(gl.float32)
    return h


@gluon.jit
def _norm(h, rstd, gain, at, cols, k, dtype: gl.constexpr):
    if gain is not None:
        weight = gl.load(gain + at + cols, mask=at + cols < k, other=0.0).to(gl.float32)
        h = ((h * rstd).to(dtype).to(gl.float32) * weight).to(dtype).to(gl.float32)
    return h


@gluon.jit
def quantize_tokens(
    x, residual, gain, residual_out, tokens, m, k, stride_x, stride_r, eps, ROWS: gl.constexpr
):  # fmt: skip
    """Fill ``tokens`` with add_rms_norm_quant of x (of x alone without ``gain``), in every CTA.

    ROWS, a power of two, holds all m tokens; they repeat over the rows of the tile. Three passes
    over inputs that stay in L1. Each CTA writes its share of the new residual. Returns the scales
    of the tile's rows.
    """
    GROUPS: gl.constexpr = tokens.shape[0]
    BLOCK_M: gl.constexpr = tokens.shape[1]
    WIDTH: gl.constexpr = tokens.shape[2]
    dtype: gl.constexpr = x.dtype.element_ty
    whole: gl.constexpr = gl.BlockedLayout(
        [1, 1, WIDTH // (32 * gl.num_warps())], [1, 1, 32], [1, 1, gl.num_warps()], [2, 1, 0]
    )
    layout: gl.constexpr = gl.SliceLayout(0, whole)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None].to(gl.int64)
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    rstd = gl.full([ROWS, 1], 1.0, gl.float32, layout)
    if gain is not None:
        squares = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        for group in gl.static_range(GROUPS):
            mask = (rows < m) & (group * WIDTH + cols < k)
            h = _load_tokens(x, residual, group * WIDTH, mask, stride_x, stride_r, rows, cols)
            squares += h * h
            if group % gl.num_programs(0) == gl.program_id(0):
                gl.store(residual_out + rows * k + group * WIDTH + cols, h.to(dtype), mask=mask)
        rstd = gl.rsqrt(gl.reduce(squares, 1, _sum) / k + eps)[:, None]
    bits = gl.zeros([ROWS, WIDTH], gl.int32, layout)
    for group in gl.static_range(GROUPS):
        mask = (rows < m) & (group * WIDTH + cols < k)
        h = _load_tokens(x, residual, group * WIDTH, mask, stride_x, stride_r, rows, cols)
        y = _norm(h, rstd, gain, group * WIDTH, cols, k, dtype)
        bits = gl.maximum(bits, y.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = gl.reduce(bits, 1, _larger)
    scale = gl.div_rn(amax.to(gl.float32, bitcast=True), 448.0)
    scale = gl.maximum(scale.to(gl.int32, bitcast=True), 0x00800000).to(gl.float32, bitcast=True)
    scale = gl.where(amax == 0, 1.0, scale)
    inv = gl.div_rn(1.0, scale)[:, None]
    for group in gl.static_range(GROUPS):
        mask = (rows < m) & (group * WIDTH + cols < k)
        h = _load_tokens(x, residual, group * WIDTH, mask, stride_x, stride_r, rows, cols)
        y = _norm(h, rstd, gain, group * WIDTH, cols, k, dtype)
        repeated = (y * inv).expand_dims(0) + gl.zeros([BLOCK_M // ROWS, 1, 1], gl.float32, whole)
        codes = repeated.to(gl.float8e4nv).reshape([BLOCK_M, WIDTH])
        tokens.index(group).store(codes)
    fence_async_shared()
    # the products that read the tokens may be another thread's
    gl.thread_barrier()
    repeated = scale.expand_dims(1).expand_dims(0)
    repeated += gl.zeros([BLOCK_M // ROWS, 1, 1], gl.float32, whole)
    return repeated.reshape([BLOCK_M])


@gluon.jit
def request_weights(desc, first, second, step, slot, full, boxes, SLABS: gl.constexpr):
    """Ask for SLABS tiles, each of the rows from ``first`` and from ``second``, into ``slot``."""
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    barrier = full.index(slot)
    mbarrier.expect(barrier, 2 * SLABS * desc.block_type.shape[0] * WIDTH)
    for slab in gl.static_range(SLABS):
        at = (step * SLABS + slab) * WIDTH
        box = 2 * (slot * SLABS + slab)
        tma.async_copy_global_to_shared(desc, [first, at], barrier, boxes.index(box))
        tma.async_copy_global_to_shared(desc, [second, at], barrier, boxes.index(box + 1))


@gluon.jit
def request_tokens(desc, full, tokens, STAGES: gl.constexpr):
    """Ask for all tokens, counted by the barrier behind those of the ring."""
    GROUPS: gl.constexpr = tokens.shape[0]
    mbarrier.expect(full.index(STAGES), GROUPS * tokens.shape[1] * tokens.shape[2])
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            desc, [0, group * tokens.shape[2]], full.index(STAGES), tokens.index(group)
        )


@gluon.jit
def product(
    desc, first, second, full, tokens, boxes, STEPS: gl.constexpr, STAGES: gl.constexpr,
    SLABS: gl.constexpr,
):  # fmt: skip
    """[64, tokens] float32: rows of both boxes, then what happens to lie behind them."""
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    BLOCK_M: gl.constexpr = tokens.shape[1]
    PER_GROUP: gl.constexpr = tokens.shape[2] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32])
    acc = gl.zeros([64, BLOCK_M], gl.float32, layout=layout)
    for step in gl.static_range(STEPS):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) % 2)
        for slab in gl.static_range(SLABS):
            weights = boxes.index(2 * (step % STAGES * SLABS + slab))
            weights = weights._reinterpret(gl.float8e4nv, [64, WIDTH], desc.layout)
            x = tokens.index((step * SLABS + slab) // PER_GROUP)
            x = x.slice((step * SLABS + slab) % PER_GROUP * WIDTH, WIDTH, 1)
            acc = warpgroup_mma(weights, x.permute((1, 0)), acc, is_async=True)
        if step >= 1 and step - 1 + STAGES < STEPS:
            # the products of the step before have left its slot
            acc = warpgroup_mma_wait(SLABS, deps=[acc])
            request_weights(
                desc, first, second, step - 1 + STAGES, (step - 1) % STAGES, full, boxes, SLABS
            )
    return warpgroup_mma_wait(0, deps=[acc])


def runs_on(device: torch.device) -> bool:
    """Whether these kernels run on ``device``; a newer Triton may lack the view they need."""
    return runs_gluon(device) and hasattr(gl.shared_memory_descriptor, "_reinterpret")


def aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can address the rows of ``tensor``."""
    return tensor.stride(0) % 16 == 0 and tensor.data_ptr() % 16 == 0 and tensor.stride(1) == 1


def block_m(rows: int) -> int:
    """Narrow side of the tile."""
    return 8 if rows <= 8 else 16


def steps(k: int) -> int:
    """Waits for weights along K."""
    return cdiv(k, BLOCK_K * SLABS)


def groups(k: int) -> int:
    """Tiles of tokens along K."""
    return cdiv(k, GROUP_K)


def stages(rows: int, k: int, box: int) -> int:
    """Weight tiles in flight: all of K, or what shared memory leaves beside the tokens."""
    room = _SHARED - groups(k) * block_m(rows) * GROUP_K - (TILE_N - 2 * box) * BLOCK_K
    return min(steps(k), room // (2 * box * BLOCK_K * SLABS))


def fits(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, box: int) -> bool:
    """Whether these kernels take ``x`` [tokens, K] @ ``weight`` [N, K]."""
    rows, k = x.shape
    return (
        runs_on(x.device)
        and 0 < rows <= MAX_ROWS
        and weight.shape[1] == k
        and x.stride(1) == 1
        and weight_scale.numel() == weight.shape[0]
        and stages(rows, k, box) >= min(_MIN_STAGES, steps(k))
        and aligned(weight)
    )
