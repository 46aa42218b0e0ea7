# SPDX-License-Identifier: MIT
"""FP8 GEMM for a few rows: packed half-precision arithmetic on weights streamed once.

Codes become float16 pairs (exact), four products are summed in a float16 lane (their partial
sums are below 2^12 because activations are scaled by 2^-6), everything after that in float32.
Each CTA takes ROWS_N weight rows and all of K, split over its threads in 16-byte pieces.

Without scales it takes bfloat16 or float16 activations: every CTA quantises them itself, while its
first weights are on their way, with the result of quantize_fp8 followed by the product.

Two levels of a row (kernels/levels.py) are added before they are multiplied: float16 holds their
eight significant bits, so a second level costs nothing but reading it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.scales import scale_column, scale_row
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.numerics import (
    INTERPRETED,
    from_fp8,
    magnitude_bits,
    round_to,
    scale_of_amax,
    to_fp8,
)

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
# the same of both levels of activations: the second level times 2^-10
_UNPACK_LEVELS = tl.constexpr("""
{
.reg .b16 low, high;
.reg .b32 factor, sixteenth, left, right;
mov.b32 factor, 0x24002400;
mov.b32 sixteenth, 0x14001400;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
mov.b32 {low, high}, $3;
cvt.rn.f16x2.e4m3x2 left, low;
cvt.rn.f16x2.e4m3x2 right, high;
mul.rn.f16x2 $0, $0, factor;
mul.rn.f16x2 $1, $1, factor;
fma.rn.f16x2 $0, left, sixteenth, $0;
fma.rn.f16x2 $1, right, sixteenth, $1;
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
# two activations of one word, times inv, to e4m3, to float16, times 2^-6
_QUANTIZE_BF16 = tl.constexpr("""
{
.reg .b32 bits, factor;
.reg .f32 low, high;
.reg .b16 codes;
mov.b32 factor, 0x24002400;
shl.b32 bits, $1, 16;
mov.b32 low, bits;
and.b32 bits, $1, 0xffff0000;
mov.b32 high, bits;
mul.rn.f32 low, low, $2;
mul.rn.f32 high, high, $2;
cvt.rn.satfinite.e4m3x2.f32 codes, high, low;
cvt.rn.f16x2.e4m3x2 $0, codes;
mul.rn.f16x2 $0, $0, factor;
}
""")
_QUANTIZE_FP16 = tl.constexpr("""
{
.reg .b32 factor;
.reg .f32 low, high;
.reg .b16 left, right, codes;
mov.b32 factor, 0x24002400;
mov.b32 {left, right}, $1;
cvt.f32.f16 low, left;
cvt.f32.f16 high, right;
mul.rn.f32 low, low, $2;
mul.rn.f32 high, high, $2;
cvt.rn.satfinite.e4m3x2.f32 codes, high, low;
cvt.rn.f16x2.e4m3x2 $0, codes;
mul.rn.f16x2 $0, $0, factor;
}
""")


@triton.jit
def byte_of(words, index: tl.constexpr):
    """The e4m3 code ``index`` of each word, as float32."""
    code = ((words >> (8 * index)) & 255).to(tl.uint8)
    return from_fp8(code.to(tl.float8e4nv, bitcast=True))


@triton.jit
def half_of(words, high: tl.constexpr, BF16: tl.constexpr):
    """The lower or higher 16-bit float of each word, as float32."""
    if BF16:
        bits = (words & -65536) if high else (words << 16)
        return bits.to(tl.float32, bitcast=True)
    else:
        bits = (words >> 16) if high else words
        return (bits & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _amax_bits(words, BF16: tl.constexpr):
    """Largest magnitude per row of pairs [rows, words], as float32 bits; NaN above Inf."""
    low = magnitude_bits(half_of(words, False, BF16))
    high = magnitude_bits(half_of(words, True, BF16))
    return tl.max(tl.maximum(low, high), 1)


@triton.jit
def _dot_words(x_low, x_high, w):
    """Sum over each group of four weight words [..., 4] -> [...]; x in scaled half2 words."""
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
def _dot_codes(x, w):
    """As _dot_words for x given as words of four codes [..., 4]."""
    if INTERPRETED:
        total = byte_of(x, 0) * byte_of(w, 0)
        for i in tl.static_range(1, 4):
            total += byte_of(x, i) * byte_of(w, i)
        return tl.sum(total, -1) * 0.015625
    else:
        x_low, x_high = tl.inline_asm_elementwise(
            _UNPACK_SCALED, "=&r,=&r,r", [x], (tl.int32, tl.int32), is_pure=True, pack=1
        )
        return _dot_words(x_low, x_high, w)


@triton.jit
def _dot_levels(first, second, w):
    """As _dot_codes for x given in two levels."""
    if INTERPRETED:
        total = (byte_of(first, 0) + byte_of(second, 0) * 0.0625) * byte_of(w, 0)
        for i in tl.static_range(1, 4):
            total += (byte_of(first, i) + byte_of(second, i) * 0.0625) * byte_of(w, i)
        return tl.sum(total, -1) * 0.015625
    else:
        x_low, x_high = tl.inline_asm_elementwise(
            _UNPACK_LEVELS,
            "=&r,=&r,r,r",
            [first, second],
            (tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _dot_words(x_low, x_high, w)


@triton.jit
def _dot_pairs(x, w, inv, BF16: tl.constexpr):
    """As _dot_words for x given as words of two 16-bit floats [..., 8], quantised on the way."""
    shape: tl.constexpr = x.shape
    if INTERPRETED:
        pairs = x.reshape([shape[0], shape[1], shape[2], 4, 2])
        first, second = tl.split(pairs)
        total = from_fp8(to_fp8(half_of(first, False, BF16) * inv)) * byte_of(w, 0)
        total += from_fp8(to_fp8(half_of(first, True, BF16) * inv)) * byte_of(w, 1)
        total += from_fp8(to_fp8(half_of(second, False, BF16) * inv)) * byte_of(w, 2)
        total += from_fp8(to_fp8(half_of(second, True, BF16) * inv)) * byte_of(w, 3)
        return tl.sum(total, -1) * 0.015625
    else:
        halves = tl.inline_asm_elementwise(
            _QUANTIZE_BF16 if BF16 else _QUANTIZE_FP16,
            "=&r,r,r",
            [x, inv],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        x_low, x_high = tl.split(halves.reshape([shape[0], shape[1], shape[2], 4, 2]))
        return _dot_words(x_low, x_high, w)


@triton.jit
def _split_words(words):
    """[A, B, C, 4] -> two halves [A, B, C, 2]; registers of one thread, nothing moves."""
    shape: tl.constexpr = words.shape
    return tl.split(words.reshape([shape[0], shape[1], shape[2], 2, 2]))


@triton.jit
def _load_weights(rows_b, offs, k_words):
    """Words of a block of columns; no other program reads them."""
    mask = (offs < k_words)[None, :]
    return tl.load(rows_b + offs[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _load_tokens(rows_a, offs, words):
    return tl.load(rows_a + offs[None, :], mask=(offs < words)[None, :], other=0)


@triton.jit
def _token_scales(rows_a, words, ROWS_M: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    """Scales [ROWS_M, 1] of the rows' largest magnitudes."""
    offs = tl.arange(0, BLOCK)
    bits = tl.zeros([ROWS_M], tl.int32)
    for start in range(0, words, BLOCK):
        bits = tl.maximum(bits, _amax_bits(_load_tokens(rows_a, start + offs, words), BF16))
    return scale_of_amax(bits)[:, None]


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
    QUANTIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    BF16: tl.constexpr,
    ROWS_M: tl.constexpr,
    ROWS_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    X_WORDS: tl.constexpr = 2 if QUANTIZE else 1
    offs_n = tl.program_id(0) * ROWS_N + tl.arange(0, ROWS_N)
    offs_m = tl.arange(0, ROWS_M)
    offs_w = tl.arange(0, BLOCK_W)
    rows_b = b + tl.minimum(offs_n, n - 1).to(tl.int64)[:, None] * stride_b
    rows_a = a + (tl.minimum(offs_m, m - 1) * LEVELS)[:, None] * stride_a
    wait_unless(PREFETCH)
    words = _load_weights(rows_b, offs_w, k_words)
    in_n = offs_n < n
    # everything that the epilogue needs arrives while the weights do
    channel = scale_row(b_scale, offs_n, in_n, B_ROWS)
    if bias is not None:
        shift = tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    wait_for_inputs()
    start_next()
    if QUANTIZE:
        token = _token_scales(rows_a, k_words * 2, ROWS_M, BLOCK_W * 2, BF16)
        inv = tl.div_rn(1.0, token)[:, :, None, None]
    else:
        token = scale_column(a_scale, tl.minimum(offs_m, m - 1), None, A_ROWS)
    offs_x = tl.arange(0, BLOCK_W * X_WORDS)
    acc = tl.zeros([ROWS_M, ROWS_N, BLOCK_W // 4], tl.float32)
    for start in range(0, k_words, BLOCK_W):
        x = _load_tokens(rows_a, start * X_WORDS + offs_x, k_words * X_WORDS)
        x = x.reshape([ROWS_M, 1, BLOCK_W // 4, 4 * X_WORDS])
        current = words.reshape([1, ROWS_N, BLOCK_W // 4, 4])
        words = _load_weights(rows_b, start + BLOCK_W + offs_w, k_words)
        if QUANTIZE:
            acc += _dot_pairs(x, current, inv, BF16)
        elif LEVELS == 2:
            second = _load_tokens(rows_a + stride_a, start + offs_x, k_words)
            acc += _dot_levels(x, second.reshape(x.shape), current)
        else:
            acc += _dot_codes(x, current)
    total = tl.sum(acc, 2) * 64.0 * token * channel
    if bias is not None:
        total += shift
    tl.store(
        out + offs_m[:, None] * n + offs_n[None, :],
        round_to(total, out.dtype.element_ty),
        mask=(offs_m < m)[:, None] & in_n[None, :],
    )


def gemm_gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows_n: int = 4,
    block_k: int = 1024,
    num_warps: int = 2,
    prefetch_weights: bool = False,
    levels: int = 1,
) -> None:
    """Launch for M <= MAX_ROWS; K and the row strides must be multiples of 16.

    Args:
        a: codes, ``levels`` rows for each row of ``out``; without ``a_scale`` bfloat16 or float16,
            quantised per token in the kernel.
        b, a_scale, b_scale, bias, out: of fp8_gemm.
        rows_n, block_k, num_warps: weight rows and columns of a step, warps.
        prefetch_weights: of fp8_gemm.
        levels: of ``a``.
    """
    m, n = out.shape
    k = a.shape[1]
    _gemv_kernel[(cdiv(n, rows_n),)](
        a.view(torch.int32),
        b.view(torch.int32),
        a_scale,
        b_scale,
        bias,
        out,
        m,
        n,
        k // 4,
        a.stride(0) * a.element_size() // 4,
        b.stride(0) // 4,
        A_ROWS=a_scale is not None and a_scale.numel() != 1,
        B_ROWS=b_scale.numel() != 1,
        QUANTIZE=a_scale is None,
        LEVELS=levels,
        BF16=a.dtype == torch.bfloat16,
        ROWS_M=next_power_of_2(m),
        ROWS_N=rows_n,
        BLOCK_W=block_k // 4,
        PREFETCH=prefetch_weights,
        num_warps=num_warps,
        **pdl_options(a.device),
    )
