# SPDX-License-Identifier: MIT
"""Conversions shared by the kernels, with one result on a GPU and under the interpreter.

The interpreter (Triton 3.9) truncates float32 -> bfloat16, loses carries in float32 -> e4m3 and
reads the NaN code as 480; there the same conversions are spelled out in integer arithmetic.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_fp8(x):
    """float32 -> e4m3, round to nearest even; |x| <= 448 or NaN."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        # adding 1.5 * 2^20 times the value's power of two leaves three mantissa bits
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(power, 0.015625) * 1572864.0
        rounded = (magnitude + magic) - magic
        normal = (rounded.to(tl.int32, bitcast=True) >> 20) - 960
        code = tl.where(rounded < 0.015625, (rounded * 512.0).to(tl.int32), normal)
        code = tl.where(x == x, code, 127) | ((bits >> 24) & 128)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def from_fp8(q):
    """e4m3 -> float32, exact."""
    x = q.to(tl.float32)
    if INTERPRETED:
        code = q.to(tl.uint8, bitcast=True) & 127
        x = tl.where(code == 127, float("nan"), x)
    return x


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> ``dtype``, round to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, even.to(tl.float32, bitcast=True), x).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """e4m3 or e5m2 -> float16 or bfloat16, exact; for a GPU.

    By float16, which hardware converts in pairs, and float32, whose upper half is the bfloat16: the
    conversion of float32 to bfloat16 has a quarter of the throughput of a byte permutation.
    """
    wide = codes.to(tl.float16)
    if dtype == tl.bfloat16:
        bits = wide.to(tl.float32).to(tl.int32, bitcast=True) >> 16
        wide = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return wide


@triton.jit
def magnitude_bits(x):
    """|x| as int32: ordered like the values, with NaN above Inf, so an integer max keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(bits):
    """Scale of an amax given as magnitude bits: max(amax / 448, 2**-126), 1 where it is 0."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
    # an integer max again keeps NaN; 0x00800000 is 2**-126
    scale = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00800000)
    return tl.where(bits == 0, 1.0, scale.to(tl.float32, bitcast=True))


@triton.jit
def quantize_dynamic(x, inv):
    """Codes of float32 ``x`` for its own amax: an Inf meets inv = 0 and becomes NaN."""
    return to_fp8(x * inv)


@triton.jit
def two_levels(x, bits):
    """Codes of both levels of float32 ``x`` and its scale, from the bits of its amax.

    See kernels/levels.py. The scale puts the amax into [128, 256). A row with Inf or NaN has zeros
    for codes and NaN for its scale.
    """
    exponent = tl.maximum(bits >> 23, 8)
    finite = exponent < 255
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(finite, scale, float("nan"))
    x = tl.where(finite, x * ((261 - exponent) << 23).to(tl.float32, bitcast=True), 0.0)
    # The value of the first code, without reading that code: where codes are stored as well, ptxas
    # of CUDA 12.8 widened every second pair from a register that never held them. Adding
    # 1.5 * 2^20 times the value's power of two leaves three mantissa bits.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 0.015625) * 1572864.0
    nearest = (x + magic) - magic
    return to_fp8(x), to_fp8((x - nearest) * 16.0), scale


@triton.jit
def quantize_static(x, inv):
    """Codes of float32 ``x`` for a given scale: saturates finite values, keeps Inf and NaN out."""
    finite = magnitude_bits(x) < 0x7F800000
    y = tl.clamp(x * inv, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return to_fp8(tl.where(finite, y, float("nan")))


@triton.jit
def dot_fp8(a, b, acc):
    """acc + a @ b for e4m3 tiles, accumulated in float32."""
    if INTERPRETED:
        return tl.dot(from_fp8(a), from_fp8(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def finished(acc):
    """Sums of a step whose left operand lies in registers, after its products have read it.

    Triton 3.6 goes on to write the next operand to these registers before that
    (triton-lang/triton issue 9433). An empty use of the sums makes it wait.
    """
    if INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def used_from_here(x):
    """16-bit ``x``, which is exchanged between threads below this line, not above.

    Triton 3.6 moves an exchange up: of a loaded tile to its load, so that the loads below wait for
    it, and out of a branch. An empty use keeps it here.
    """
    if INTERPRETED:
        return x
    else:
        tl.static_assert(x.dtype.primitive_bitwidth == 16)
        return tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def mix_bits(x):
    """A permutation of uint32 whose output bits look independent; see kernels/random_mask.py."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_bits(seed, row):
    """Bits of rows for ``kept``: int64 ``row`` of the mask of the folded ``seed``."""
    low = row.to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    # a seed of 1 comes as a constant: Triton specialises numbers inside tuples
    seed = tl.full([], seed, tl.int32).to(tl.uint32)
    return mix_bits(seed ^ mix_bits(low ^ mix_bits(high)))


@triton.jit
def column_bits(column):
    """Bits of columns for ``kept``."""
    return mix_bits(column.to(tl.uint32) ^ 0x1E3779B9)


@triton.jit
def kept(rows, columns, threshold):
    """Whether dropout keeps an element; ``threshold`` = (share dropped) * 2**32."""
    return mix_bits(rows ^ columns).to(tl.int64) >= threshold


@triton.jit
def sort_keys(logits):
    """float32 values of ``logits``, and int32 keys that order like them with NaN above all."""
    # adding 0 turns -0 into 0, so that bits order like values
    value = logits.to(tl.float32) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return value, tl.where(value == value, key, 0x7FFFFFFF)
