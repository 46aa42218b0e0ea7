# SPDX-License-Identifier: MIT
"""FP8 GEMM for some tens of rows: FP8 tensor cores with swapped operands, weights streamed once.

Computes [N, K] @ [K, M], so that a few rows fill the narrow side of a wgmma tile. Both operands
come through tensor descriptors (TMA), several stages deep: few CTAs keep memory busy. Splitting
K over CTAs was measured and did not pay; nor did asking L2 for weights before the wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.numerics import dot_fp8, round_to
from oss_fused.kernels.tma import row_descriptor


@triton.jit(do_not_specialize=["m"])
def _gemm_swap_kernel(
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
    PREFETCH: tl.constexpr,
):
    first_n = tl.program_id(0) * BLOCK_N
    first_m = tl.program_id(1) * BLOCK_M
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    in_n = offs_n < n
    in_m = offs_m < m
    wait_unless(PREFETCH)
    # everything that the epilogue needs arrives while the weights do
    if B_ROWS:
        channel = tl.load(b_scale + offs_n, mask=in_n, other=0.0)[:, None]
    else:
        channel = tl.load(b_scale)
    if bias is not None:
        shift = tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    wait_for_inputs()
    start_next()
    if A_ROWS:
        token = tl.load(a_scale + offs_m, mask=in_m, other=0.0)[None, :]
    else:
        token = tl.load(a_scale)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, k, BLOCK_K):
        w = b_desc.load([first_n, start])
        x = a_desc.load([first_m, start])
        acc = dot_fp8(w, x.T, acc)

    acc *= token
    acc *= channel
    if bias is not None:
        acc += shift
    tl.store(
        out + offs_m.to(tl.int64)[None, :] * n + offs_n[:, None],
        round_to(acc, out.dtype.element_ty),
        mask=in_m[None, :] & in_n[:, None],
    )


def gemm_swap(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 16,
    block_n: int = 64,
    block_k: int = 256,
    num_stages: int = 5,
    num_warps: int = 4,
    prefetch_weights: bool = False,
) -> None:
    """Launch; K and the row strides must be multiples of 16."""
    m, k = a.shape
    n = b.shape[0]
    _gemm_swap_kernel[(cdiv(n, block_n), cdiv(m, block_m))](
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
        PREFETCH=prefetch_weights,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(a.device),
    )
