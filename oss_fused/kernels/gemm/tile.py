# SPDX-License-Identifier: MIT
"""FP8 GEMM on tensor cores, any shape: out = (a @ b.T) * a_scale * b_scale.T + bias.

a [M, K], b [N, K] float8_e4m3fn with unit stride along K, float32 accumulation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.numerics import dot_fp8, round_to


@triton.jit(do_not_specialize=["m"])
def _gemm_tile_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k,
    stride_a,
    stride_b,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # tiles of GROUP_M row blocks share their columns of b in L2
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    group_m = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    block_m = group * GROUP_M + (pid % (GROUP_M * blocks_n)) % group_m
    block_n = (pid % (GROUP_M * blocks_n)) // group_m

    offs_m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a + offs_m[:, None] * stride_a + offs_k[None, :]
    b_ptrs = b + offs_n[None, :] * stride_b + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        in_k = offs_k < k - start
        tile_a = tl.load(a_ptrs + start, mask=(offs_m[:, None] < m) & in_k[None, :], other=0.0)
        tile_b = tl.load(b_ptrs + start, mask=(offs_n[None, :] < n) & in_k[:, None], other=0.0)
        acc = dot_fp8(tile_a, tile_b, acc)

    if A_ROWS:
        acc *= tl.load(a_scale + offs_m, mask=offs_m < m, other=0.0)[:, None]
    else:
        acc *= tl.load(a_scale)
    if B_ROWS:
        acc *= tl.load(b_scale + offs_n, mask=offs_n < n, other=0.0)[None, :]
    else:
        acc *= tl.load(b_scale)
    if bias is not None:
        acc += tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m[:, None] < m) & (offs_n[None, :] < n)
    tl.store(
        out + offs_m[:, None] * n + offs_n[None, :],
        round_to(acc, out.dtype.element_ty),
        mask=mask,
    )


def gemm_tile(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch the tiled kernel into ``out`` [M, N]; arguments as in fp8_gemm, already checked."""
    m, k = a.shape
    n = b.shape[0]
    block_m = min(max(next_power_of_2(m), 16), 128)
    block_n = 128 if block_m >= 64 else 64
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    _gemm_tile_kernel[grid](
        a,
        b,
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=128,
        GROUP_M=8,
        num_warps=8 if block_m >= 128 else 4,
        num_stages=4,
    )
