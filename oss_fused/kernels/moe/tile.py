# SPDX-License-Identifier: MIT
"""Pieces of the expert kernels: MXFP4 words to e4m3 tiles, row scales, the order of columns.

The tensor cores take the weights as their 64-row operand from registers (``A``) and the tokens as
``B`` from shared memory. In a chunk of 128 columns the thread that holds k = 4t..4t+3 and
16+4t..16+4t+3 of every 32-wide step is given the 32 weights of block t, so that it needs one
block scale a row. The activations lie in memory in the matching order: actual column
``32t + 8j + 4h + i`` at ``32j + 16h + 4t + i``.

e2m1 * 2^(step - 11) * 2^6 is an e4m3 code for every step 0..11: the code of ``value * 2^-5`` plus
``8 * step``, zero aside. Eight bytes of such codes are the table from which PRMT picks four
weights at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.numerics import INTERPRETED, finished, from_fp8

# e4m3 codes of 2^-5 * (0, 0.5, 1, 1.5) and of 2^-5 * (2, 3, 4, 6), lowest byte first
UNPACK_TABLE = tl.constexpr((0x14100800, 0x24201C18))

# $2: eight nibbles; $3, $7: the table (each given four times, once per packed byte). The upper
# selectors come down by adding -0 to a float16, which a nibble below 8 keeps from being Inf or
# NaN: shifts, logic and PRMT share a unit of half rate, this addition has another of full rate.
UNPACK_ASM = tl.constexpr(
    """
    {
    .reg .b32 sel, mag, neg, zero;
    .reg .b16 lower, upper;
    mov.b32 zero, 0x80008000;
    and.b32 sel, $2, 0x77777777;
    prmt.b32 mag, $3, $7, sel;
    lop3.b32 $0, mag, $2, 0x80808080, 0xF8;
    mov.b32 {lower, upper}, sel;
    mov.b32 sel, {upper, upper};
    add.rn.f16x2 sel, sel, zero;
    prmt.b32 mag, $3, $7, sel;
    shl.b32 neg, $2, 4;
    lop3.b32 $1, mag, neg, 0x80808080, 0xF8;
    }
    """
)


@triton.jit
def activation_position(column):
    """Where the activation of a column lies in memory."""
    chunk = column // 128
    within = column % 128
    block = within // 32
    word = within // 8 % 4
    return chunk * 128 + word * 32 + within // 4 % 2 * 16 + block * 4 + within % 4


@triton.jit
def in_activation_order(values):
    """``values`` of columns 0, 1, ..., whole chunks, as they lie in memory."""
    # [chunk, block, word, half, byte] -> [chunk, word, half, block, byte]
    chunks = values.reshape(values.shape[0] // 128, 4, 4, 2, 4).permute(0, 2, 3, 1, 4)
    return chunks.reshape(values.shape[0])


@triton.jit
def group_row(row):
    """Row of a 64-row group in memory for a row of the tile: the MMA's row pairs (r, r + 8)
    hold row p and p + 32, a gate and its up."""
    return row // 64 * 64 + row // 8 % 2 * 32 + row // 16 % 4 * 8 + row % 8


@triton.jit
def row_scale(words):
    """float32 scale of rows, from their scale words of chunk 0."""
    exponent = (words & 3) | (words >> 6 & 12) | (words >> 12 & 48) | (words >> 18 & 192)
    # a code is value * 2^(step - 11) * 2^6
    scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True) * 0.015625
    return tl.where(exponent == 255, float("nan"), scale)


@triton.jit
def unpack_weights(
    weight, words, GROUPS: tl.constexpr, DEPTH: tl.constexpr, WARPGROUPS: tl.constexpr
):
    """Tile of e4m3 weights [64 * GROUPS, 128 * DEPTH] from packed bytes and scale words.

    Args:
        weight: uint8 [64 * GROUPS * DEPTH, 64] and
        words: int32 [64 * GROUPS * DEPTH], both with rows in the order (pair, turn, chunk,
            warpgroup, warp, row): row ``32 * pair + 8 * warp + row`` of group
            ``turn * WARPGROUPS + warpgroup`` in memory. A thread then loads the very bytes that
            it unpacks.
        GROUPS: groups of 64 rows, a multiple of WARPGROUPS.
        DEPTH: chunks of 128 columns.
        WARPGROUPS: of the program, four warps each.
    """
    ROWS: tl.constexpr = 64 * GROUPS
    TURNS: tl.constexpr = GROUPS // WARPGROUPS
    words = words.reshape(2, TURNS, DEPTH, WARPGROUPS, 4, 8).permute(1, 3, 4, 0, 5, 2)
    words = words.reshape(ROWS, DEPTH)
    block = tl.arange(0, 4)
    step = (words[:, :, None] >> (8 * block)[None, None, :]) & 0x78
    weight = weight.reshape(2, TURNS, DEPTH, WARPGROUPS, 4, 8, 4, 4, 4)
    weight = weight.permute(1, 3, 4, 0, 5, 2, 7, 6, 8)
    if INTERPRETED:
        # the same codes without PRMT: find each value's nibble and sign in its word
        weight = weight.reshape(ROWS * DEPTH, 4, 4, 4).to(tl.int32)
        word = tl.sum(weight << (8 * tl.arange(0, 4))[None, None, None, :], 3)
        value = tl.arange(0, 8)
        magnitude = (word[:, :, :, None] >> (4 * value)[None, None, None, :]) & 7
        sign_bit = tl.where(value < 4, 8 * value + 7, 8 * value - 29)
        sign = (word[:, :, :, None] >> sign_bit[None, None, None, :]) & 1
        table = tl.where(magnitude < 4, UNPACK_TABLE[0], UNPACK_TABLE[1]) >> (8 * (magnitude & 3))
        code = (table & 255) + step.reshape(ROWS * DEPTH, 4)[:, None, :, None]
        code = tl.where(magnitude == 0, 0, code) | (sign << 7)
        # [row, word, block, half, byte] -> [row, word, half, block, byte]
        code = code.reshape(ROWS * DEPTH, 4, 4, 2, 4).permute(0, 1, 3, 2, 4)
        return code.reshape(ROWS, 128 * DEPTH).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        low = (UNPACK_TABLE[0] + step * 0x01010100)[:, :, None, :, None]
        high = (UNPACK_TABLE[1] + step * 0x01010101)[:, :, None, :, None]
        weight = weight.reshape(ROWS, DEPTH, 4, 4, 4)
        low, weight = tl.broadcast(low, weight)
        high, weight = tl.broadcast(high, weight)
        first, second = tl.inline_asm_elementwise(
            UNPACK_ASM,
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [weight, low, high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        code = tl.join(first, second).permute(0, 1, 2, 5, 3, 4).reshape(ROWS, 128 * DEPTH)
        return code.to(tl.float8e4nv, bitcast=True)


@triton.jit
def dot_tile(weight, tokens, acc, PROMOTE: tl.constexpr):
    """acc + weight [M, K] @ tokens [K, N], both e4m3.

    Hopper's FP8 tensor cores keep about 14 bits of a running sum; PROMOTE adds the sum of each
    tile's K to ``acc`` in float32 instead.
    """
    if INTERPRETED:
        return tl.dot(from_fp8(weight), from_fp8(tokens), acc, input_precision="ieee")
    elif PROMOTE:
        return acc + tl.dot(weight, tokens, max_num_imprecise_acc=weight.shape[1])
    else:
        return tl.dot(weight, tokens, acc)


@triton.jit
def dot_unpacked(weight, tokens, acc, PROMOTE: tl.constexpr):
    """``dot_tile`` of weights that were unpacked into registers."""
    acc = dot_tile(weight, tokens, acc, PROMOTE)
    # a sum that PROMOTE adds is used, and so waited for, anyway
    if not PROMOTE:
        acc = finished(acc)
    return acc
