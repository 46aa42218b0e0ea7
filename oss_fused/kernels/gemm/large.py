# SPDX-License-Identifier: MIT
"""FP8 GEMM for many rows: persistent CTAs, operands through tensor descriptors (TMA).

One CTA per multiprocessor walks over output tiles, GROUP_M row blocks at a time so that their
operands stay in L2; the next tile's loads run under the epilogue of the last. The tensor cores
sum in their own accumulator over all of K (as CUTLASS's fast accumulation and cuBLASLt do).
Triton 3.6's warp specialisation compiles this loop but hangs on Hopper, so it is not used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors
from oss_fused.kernels.numerics import dot_fp8, round_to
from oss_fused.kernels.tma import row_descriptor


@triton.jit
def tile_of(index, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """Row and column block: GROUP_M row blocks at a time, so that their operands stay in L2."""
    group = index // (GROUP_M * blocks_n)
    inside = index % (GROUP_M * blocks_n)
    size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % size, inside // size


@triton.jit
def _store_tile(acc, offs_m, offs_n, a_scale, b_scale, bias, out, m, n, A_ROWS, B_ROWS):
    in_m = offs_m < m
    in_n = offs_n < n
    if A_ROWS:
        acc *= tl.load(a_scale + offs_m, mask=in_m, other=0.0)[:, None]
    else:
        acc *= tl.load(a_scale)
    if B_ROWS:
        acc *= tl.load(b_scale + offs_n, mask=in_n, other=0.0)[None, :]
    else:
        acc *= tl.load(b_scale)
    if bias is not None:
        acc += tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + offs_m.to(tl.int64)[:, None] * n + offs_n[None, :],
        round_to(acc, out.dtype.element_ty),
        mask=in_m[:, None] & in_n[None, :],
    )


@triton.jit(do_not_specialize=["m"])
def _gemm_large_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    for index in tl.range(
        tl.program_id(0),
        blocks_m * blocks_n,
        tl.num_programs(0),
        flatten=True,
    ):
        block_m, block_n = tile_of(index, blocks_m, blocks_n, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, k, BLOCK_K):
            tile_a = a_desc.load([block_m * BLOCK_M, start])
            tile_b = b_desc.load([block_n * BLOCK_N, start])
            acc = dot_fp8(tile_a, tile_b.T, acc)
        offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        _store_tile(acc, offs_m, offs_n, a_scale, b_scale, bias, out, m, n, A_ROWS, B_ROWS)


def gemm_large(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 128,
    block_n: int = 256,
    block_k: int = 128,
    group_m: int = 8,
    num_stages: int = 3,
    num_warps: int = 8,
) -> None:
    """Launch; K and the row strides must be multiples of 16."""
    m, k = a.shape
    n = b.shape[0]
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    _gemm_large_kernel[(min(tiles, multiprocessors(a.device)),)](
        row_descriptor(a, block_m, block_k),
        row_descriptor(b, block_n, block_k),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=group_m,
        num_stages=num_stages,
        num_warps=num_warps,
    )
