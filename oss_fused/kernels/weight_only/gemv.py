# SPDX-License-Identifier: MIT
"""Weight-only product of one or two rows: weights streamed once, float32 arithmetic.

A CTA takes ROWS_N weight rows and all of K. A thread takes 16 neighbouring codes of each row, in
four words, and asks for the next ones before it multiplies. The values of x that meet them come in
two loads of eight, so that nothing leaves its thread before the sums of a row are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.gemv import byte_of, half_of
from oss_fused.kernels.gemm.scales import scale_row
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.numerics import INTERPRETED, round_to

MAX_ROWS = 2

_UNPACK = tl.constexpr("""
{
.reg .b16 low, high, v0, v1, v2, v3;
.reg .b32 pair;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 pair, low;
mov.b32 {v0, v1}, pair;
cvt.rn.f16x2.e4m3x2 pair, high;
mov.b32 {v2, v3}, pair;
cvt.f32.f16 $0, v0;
cvt.f32.f16 $1, v1;
cvt.f32.f16 $2, v2;
cvt.f32.f16 $3, v3;
}
""")


@triton.jit
def _load_words(rows_w, offs, words):
    """Words of four codes; no other program reads them."""
    mask = (offs < words)[None, :]
    return tl.load(rows_w + offs[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _load_pairs(row, start, words, BLOCK_W: tl.constexpr):
    """Both pairs of values that meet each of BLOCK_W words of codes: two [BLOCK_W] of words."""
    offs = tl.arange(0, BLOCK_W // 4)[:, None] * 8 + tl.arange(0, 4)[None, :] + 2 * start
    low = tl.load(row + offs, mask=offs < 2 * words, other=0)
    high = tl.load(row + offs + 4, mask=offs + 4 < 2 * words, other=0)
    ordered = tl.join(low, high).permute(0, 2, 1)
    return tl.split(ordered.reshape([BLOCK_W, 2]))


@triton.jit
def _unpack(words):
    """The four codes of each word, as float32."""
    if INTERPRETED:
        return byte_of(words, 0), byte_of(words, 1), byte_of(words, 2), byte_of(words, 3)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK,
            "=&f,=&f,=&f,=&f,r",
            [words],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _add_products(acc, codes, pairs, BF16: tl.constexpr):
    """acc [R, W] + the products of four codes each [R, W] and of their values, in pairs [W]."""
    acc += codes[0] * half_of(pairs[0], False, BF16)[None, :]
    acc += codes[1] * half_of(pairs[0], True, BF16)[None, :]
    acc += codes[2] * half_of(pairs[1], False, BF16)[None, :]
    return acc + codes[3] * half_of(pairs[1], True, BF16)[None, :]


@triton.jit
def _store_row(acc, row, channel, shift, offs_n, n, in_n):
    """Scale a row's sums, add the bias, round and write."""
    total = tl.sum(acc, 1) * channel
    if shift is not None:
        total += shift
    tl.store(row + offs_n, round_to(total, row.dtype.element_ty), mask=in_n)


@triton.jit
def _gemv_kernel(
    x,
    w,
    scale,
    bias,
    out,
    n,
    words,
    stride_x,
    stride_w,
    W_ROWS: tl.constexpr,
    BF16: tl.constexpr,
    ROWS_M: tl.constexpr,
    ROWS_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    offs_n = tl.program_id(0) * ROWS_N + tl.arange(0, ROWS_N)
    offs_w = tl.arange(0, BLOCK_W)
    rows_w = w + tl.minimum(offs_n, n - 1).to(tl.int64)[:, None] * stride_w
    in_n = offs_n < n
    wait_unless(PREFETCH)
    following = _load_words(rows_w, offs_w, words)
    # everything that the epilogue needs arrives while the weights do
    channel = scale_row(scale, offs_n, in_n, W_ROWS)
    shift = None
    if bias is not None:
        shift = tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)
    wait_for_inputs()
    start_next()
    first = tl.zeros([ROWS_N, BLOCK_W], tl.float32)
    second = tl.zeros([ROWS_N, BLOCK_W], tl.float32)
    for start in range(0, words, BLOCK_W):
        codes = _unpack(following)
        following = _load_words(rows_w, start + BLOCK_W + offs_w, words)
        first = _add_products(first, codes, _load_pairs(x, start, words, BLOCK_W), BF16)
        if ROWS_M == 2:
            pairs = _load_pairs(x + stride_x, start, words, BLOCK_W)
            second = _add_products(second, codes, pairs, BF16)
    if W_ROWS:
        channel = channel.reshape([ROWS_N])
    _store_row(first, out, channel, shift, offs_n, n, in_n)
    if ROWS_M == 2:
        _store_row(second, out + n, channel, shift, offs_n, n, in_n)


def product_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows_n: int = 4,
    block_k: int = 2048,
    num_warps: int = 4,
    prefetch_weights: bool = False,
) -> None:
    """Launch into ``out`` [M, N] for M <= MAX_ROWS; K is a multiple of 16, rows are aligned."""
    m, k = x.shape
    n = w.shape[0]
    _gemv_kernel[(cdiv(n, rows_n),)](
        x.view(torch.int32),
        w.view(torch.int32),
        scale,
        bias,
        out,
        n,
        k // 4,
        x.stride(0) // 2,
        w.stride(0) // 4,
        W_ROWS=scale.numel() != 1,
        BF16=x.dtype == torch.bfloat16,
        ROWS_M=m,
        ROWS_N=rows_n,
        BLOCK_W=block_k // 4,
        PREFETCH=prefetch_weights,
        num_warps=num_warps,
        **pdl_options(x.device),
    )
