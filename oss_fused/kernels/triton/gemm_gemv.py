# SPDX-License-Identifier: MIT
"""FP8 GEMM for a few rows: packed half-precision arithmetic on weights streamed once.

Codes become float16 pairs (exact), four products are summed in a float16 lane (their partial
sums are below 2^12 because activations are scaled by 2^-6), everything after that in float32.
Each CTA takes ROWS_N weight rows and all of K, split over its threads in 16-byte pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.triton.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.triton.numerics import INTERPRETED, from_fp8, round_to

MAX_ROWS = 4

_UNPACK = tl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
# activations times 2^-6, so that a float16 lane cannot overflow: 4 * 448 * 7 < 65504
_UNPACK_SCALED = tl.constexpr("""
{
.reg .b16 low, high;
.reg .b32 factor;
mov.b32 factor, 0x24002400;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
mul.rn.f16x2 $0, $0, factor;
mul.rn.f16x2 $1, $1, factor;
}
""")
_DOT8 = tl.constexpr("""
{
.reg .b32 sum;
.reg .b16 even, odd;
.reg .f32 left, right;
mul.rn.f16x2 sum, $1, $5;
fma.rn.f16x2 sum, $2, $6, sum;
fma.rn.f16x2 sum, $3, $7, sum;
fma.rn.f16x2 sum, $4, $8, sum;
mov.b32 {even, odd}, sum;
cvt.f32.f16 left, even;
cvt.f32.f16 right, odd;
add.f32 $0, left, right;
}
""")


@triton.jit
def _byte(words, index: tl.constexpr):
    code = ((words >> (8 * index)) & 255).to(tl.uint8)
    return from_fp8(code.to(tl.float8e4nv, bitcast=True))


@triton.jit
def _dot_words(x, w):
    """Sum over the last axis of sixteen products per group of four words: [..., 4] -> [...]."""
    if INTERPRETED:
        total = _byte(x, 0) * _byte(w, 0)
        for i in tl.static_range(1, 4):
            total += _byte(x, i) * _byte(w, i)
        return tl.sum(total, -1) * 0.015625
    else:
        x_low, x_high = tl.inline_asm_elementwise(
            _UNPACK_SCALED, "=&r,=&r,r", [x], (tl.int32, tl.int32), is_pure=True, pack=1
        )
        w_low, w_high = tl.inline_asm_elementwise(
            _UNPACK, "=&r,=&r,r", [w], (tl.int32, tl.int32), is_pure=True, pack=1
        )
        x0, x1 = _split_words(x_low)
        x2, x3 = _split_words(x_high)
        w0, w1 = _split_words(w_low)
        w2, w3 = _split_words(w_high)
        return tl.sum(
            tl.inline_asm_elementwise(
                _DOT8,
                "=r,r,r,r,r,r,r,r,r",
                [w0, w1, w2, w3, x0, x1, x2, x3],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            ),
            -1,
        )


@triton.jit
def _split_words(words):
    """[A, B, C, 4] -> two halves [A, B, C, 2]; registers of one thread, nothing moves."""
    shape: tl.constexpr = words.shape
    return tl.split(words.reshape([shape[0], shape[1], shape[2], 2, 2]))


@triton.jit(do_not_specialize=["m"])
def _gemv_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
    m,
    n,
    k_words,
    stride_a,
    stride_b,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    ROWS_M: tl.constexpr,
    ROWS_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    start_next()
    GROUPS: tl.constexpr = BLOCK_W // 4
    offs_n = tl.program_id(0) * ROWS_N + tl.arange(0, ROWS_N)
    offs_m = tl.arange(0, ROWS_M)
    offs_w = tl.arange(0, BLOCK_W)
    rows_b = b + tl.minimum(offs_n, n - 1).to(tl.int64)[:, None] * stride_b
    rows_a = a + tl.minimum(offs_m, m - 1)[:, None] * stride_a
    first = tl.load(
        rows_b + offs_w[None, :],
        mask=(offs_w < k_words)[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    wait_for_inputs()
    acc = tl.zeros([ROWS_M, ROWS_N, GROUPS], tl.float32)
    words = first
    for start in range(0, k_words, BLOCK_W):
        in_k = (start + offs_w < k_words)[None, :]
        x = tl.load(rows_a + start + offs_w[None, :], mask=in_k, other=0)
        current = words
        ahead = start + BLOCK_W + offs_w
        words = tl.load(
            rows_b + ahead[None, :],
            mask=(ahead < k_words)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        acc += _dot_words(
            x.reshape([ROWS_M, 1, GROUPS, 4]), current.reshape([1, ROWS_N, GROUPS, 4])
        )
    total = tl.sum(acc, 2) * 64.0

    if A_ROWS:
        total *= tl.load(a_scale + tl.minimum(offs_m, m - 1))[:, None]
    else:
        total *= tl.load(a_scale)
    in_n = offs_n < n
    if B_ROWS:
        total *= tl.load(b_scale + offs_n, mask=in_n, other=0.0)[None, :]
    else:
        total *= tl.load(b_scale)
    if bias is not None:
        total += tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + offs_m[:, None] * n + offs_n[None, :],
        round_to(total, out.dtype.element_ty),
        mask=(offs_m < m)[:, None] & in_n[None, :],
    )


def gemm_gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows_n: int = 4,
    block_k: int = 1024,
    num_warps: int = 2,
) -> None:
    """Launch for M <= MAX_ROWS; K and the row strides must be multiples of 16."""
    m, k = a.shape
    n = b.shape[0]
    _gemv_kernel[(triton.cdiv(n, rows_n),)](
        a.view(torch.int32),
        b.view(torch.int32),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k // 4,
        a.stride(0) // 4,
        b.stride(0) // 4,
        A_ROWS=a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        ROWS_M=triton.next_power_of_2(m),
        ROWS_N=rows_n,
        BLOCK_W=block_k // 4,
        num_warps=num_warps,
        **pdl_options(a.device),
    )
