# SPDX-License-Identifier: MIT
"""Pieces that the expert kernels in Gluon share: packed weights into registers, codes to memory.

A consumer is four warps with a group of 64 weight rows; moe/mxfp4.py says how these are packed,
moe/tile.py in which order columns lie.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oss_fused.kernels.moe.tile import UNPACK_ASM, UNPACK_TABLE

# that of moe/tile.py, with a word given four times as well
_UNPACK_ASM = gl.constexpr(UNPACK_ASM.value.replace("$7", "$10").replace("$3", "$6"))


@gluon.constexpr_function
def word_layout():
    """Words [64, 16] of a chunk: a thread has four, 16 bytes, of rows p and p + 32."""
    registers = [[0, 1], [0, 2], [32, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [64, 16])


@gluon.constexpr_function
def _byte_layout():
    """What unpacking a word's four bytes gives, as [row, block, word, byte]."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [32, 0, 0, 0]]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[8, 0, 0, 0], [16, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 4, 4])


@gluon.constexpr_function
def step_layout():
    """The block scales [64, 4] of a chunk, where their words are unpacked."""
    return gl.SliceLayout(2, gl.SliceLayout(3, _byte_layout()))


@gluon.jit
def load_chunk(weight, words, chunk, K: gl.constexpr):
    """Packed weights int32 [64, 16] and scale words [64] of one chunk of a 64-row group."""
    CHUNKS: gl.constexpr = (K + 127) // 128
    LAST: gl.constexpr = (K - (CHUNKS - 1) * 128) // 8
    chunk = gl.minimum(chunk, CHUNKS - 1)
    row = gl.arange(0, 64, gl.SliceLayout(1, word_layout()))
    word = gl.arange(0, 16, gl.SliceLayout(0, word_layout()))
    offset = (row * 16)[:, None] + word[None, :]
    if LAST != 16:
        # blocks that the rows lack repeat others: the tokens' codes are zero there
        short = (row * LAST)[:, None] + (word % LAST)[None, :]
        offset = gl.where(chunk == CHUNKS - 1, short, offset)
    row = gl.arange(0, 64, gl.SliceLayout(1, step_layout()))
    return gl.load(weight + chunk * 1024 + offset), gl.load(words + chunk * 64 + row)


@gluon.jit
def unpack(weight, words, product: gl.constexpr):
    """e4m3 weights [64, 128] as the first operand of ``product``, from one chunk."""
    block = gl.arange(0, 4, gl.SliceLayout(0, step_layout()))
    step = ((words[:, None] >> (8 * block)[None, :]) & 0x78)[:, :, None][:, :, :, None]
    layout: gl.constexpr = gl.SliceLayout(3, _byte_layout())
    weight = gl.convert_layout(weight.reshape([64, 4, 4]), layout, assert_trivial=True)
    # one word stands for the four bytes that it becomes
    inputs = [weight[:, :, :, None], UNPACK_TABLE[0] + step * 0x01010100]
    inputs += [UNPACK_TABLE[1] + step * 0x01010101]
    whole = gl.zeros([64, 4, 4, 4], gl.int32, layout=_byte_layout())
    first, second = gl.inline_asm_elementwise(
        _UNPACK_ASM,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [gl.broadcast(x, whole)[0] for x in inputs],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    # (pair, warp, row), block, word, byte, half -> (warp, pair, row), (word, half, block, byte)
    code = gl.join(first, second).reshape([2, 4, 8, 4, 4, 4, 2])
    code = code.permute((1, 0, 2, 4, 6, 3, 5)).reshape([64, 128])
    code = code.to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(code, gl.DotOperandLayout(0, product, 4), assert_trivial=True)


@gluon.jit
def row_scale(words):
    """As row_scale of moe/tile.py."""
    exponent = (words & 3) | (words >> 6 & 12) | (words >> 12 & 48) | (words >> 18 & 192)
    scale = (gl.maximum(exponent, 1) << 23).to(gl.float32, bitcast=True) * 0.015625
    return gl.where(exponent == 255, float("nan"), scale)


@gluon.jit
def _activation_position(column):
    """As activation_position of moe/tile.py."""
    within = column % 128
    return (
        column // 128 * 128
        + within // 8 % 4 * 32
        + within // 4 % 2 * 16
        + within // 32 * 4
        + within % 4
    )


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def store_codes(
    gate,
    up,
    out,
    group,
    begin,
    count,
    OP: gl.constexpr,
    LAST: gl.constexpr,
    LEVELS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Codes [P, LEVELS, OP] of the activation of gates and ups [32, tokens]."""
    TOKENS: gl.constexpr = gate.type.shape[1]
    # a comparison with NaN is false: it passes through
    gate = gl.where(gate > 7.0, 7.0, gate)
    up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
    act = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    if LEVELS == 2:
        act = act.to(DTYPE).to(gl.float32)
    act *= 8.0
    first = act.to(gl.float8e4nv)
    # four adjacent codes a thread
    stored: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    column = group * 32 + gl.arange(0, 32, gl.SliceLayout(1, stored))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    rows = (begin + token).to(gl.int64) * (LEVELS * OP)
    pointers = out + rows[None, :] + _activation_position(column)[:, None]
    mask = (token < count)[None, :] & (column >= 0)[:, None]
    gl.store(pointers, gl.convert_layout(first, stored), mask=mask)
    if LEVELS == 2:
        second = ((act - first.to(gl.float32)) * 16.0).to(gl.float8e4nv)
        gl.store(pointers + OP, gl.convert_layout(second, stored), mask=mask)
    # the last group fills the chunk: what is not written could hold NaN codes
    if OP != (LAST + 1) * 32:
        for block in gl.static_range(LAST + 1, OP // 32):
            pad = block * 32 + gl.arange(0, 32, gl.SliceLayout(1, stored))
            pointers = out + rows[None, :] + _activation_position(pad)[:, None]
            zero = gl.zeros([32, TOKENS], gl.uint8, layout=stored).to(gl.float8e4nv, bitcast=True)
            for level in gl.static_range(LEVELS):
                gl.store(pointers + level * OP, zero, mask=mask & (group == LAST))
