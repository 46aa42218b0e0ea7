# SPDX-License-Identifier: MIT
"""Pieces that the expert kernels in Gluon share: packed weights into registers, codes to memory.

A consumer is four warps with a group of 64 weight rows; moe/mxfp4.py says how these are packed,
moe/tile.py in which order columns lie.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oss_fused.kernels.moe.tile import UNPACK_ASM, UNPACK_TABLE

# that of moe/tile.py, with a word given four times as well
_UNPACK_ASM = gl.constexpr(UNPACK_ASM.value.replace("$7", "$10").replace("$3", "$6"))

# clamps at 7 and -7; 1.702, -log2(e) and 1
_ACTIVATE_ASM = gl.constexpr(
    """
    {
    .reg .f32 gate, up, s;
    min.NaN.f32 gate, $1, 0f40E00000;
    min.NaN.f32 up, $2, 0f40E00000;
    max.NaN.f32 up, up, 0fC0E00000;
    mul.rn.f32 s, gate, 0f3FD9DB23;
    mul.rn.f32 s, s, 0fBFB8AA3B;
    ex2.approx.ftz.f32 s, s;
    add.rn.f32 s, s, 0f3F800000;
    rcp.approx.ftz.f32 s, s;
    mul.rn.f32 gate, gate, s;
    add.rn.f32 up, up, 0f3F800000;
    mul.rn.f32 $0, gate, up;
    }
    """
)


class ProductShape(NamedTuple):
    """Weight rows and columns; codes of a row of the gated result, None with w2; levels; dtype of
    the model."""

    n: int
    k: int
    op: int | None
    levels: int
    dtype: gl.dtype


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


@gluon.constexpr_function
def _scale_layout():
    """Scale words [2, 32] of a chunk: a thread has those of rows p and p + 32."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0]], lanes, [[0, 8], [0, 16]], [], [2, 32])


@gluon.constexpr_function
def _line_layout():
    """Words of a chunk as 32 lines of 128 bytes, two rows each, in the threads of word_layout."""
    registers = [[0, 1], [0, 2], [16, 0]]
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[4, 0], [8, 0]], [], [32, 32])


@gluon.constexpr_function
def _result_layout(tokens, levels):
    """A product's sums as [row in memory, token]: a thread has rows p and p + 32."""
    columns = [1 << bit for bit in range(tokens.bit_length() - 1)]
    inside, across = (columns[:1], columns[1:3]) if levels == 1 else ([], columns[:2])
    beyond = columns[len(inside) + 2 :]
    registers = [[0, at] for at in inside] + [[32, 0]] + [[0, at] for at in beyond]
    lanes = [[0, at] for at in across] + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [64, tokens])


@gluon.constexpr_function
def _stored_layout(tokens, levels):
    """Codes [column, token], four adjacent columns a thread.

    With two levels each warp has the columns of a result's warp: what it exchanges stays inside.
    """
    if levels == 1 or tokens < 16:
        return gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    registers = [[1, 0], [2, 0]] + [[0, 1 << bit] for bit in range(4, tokens.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [32, tokens])


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
def unpack_copied(lines, words, product: gl.constexpr):
    """``unpack`` of a chunk in shared memory: 32 lines of packed weights, scale words [2, 32]."""
    row: gl.constexpr = gl.SliceLayout(1, step_layout())
    weight = lines.load(_line_layout()).reshape([64, 16])
    weight = gl.convert_layout(weight, word_layout(), assert_trivial=True)
    steps = words.load(_scale_layout()).reshape([64])
    return unpack(weight, gl.convert_layout(steps, row, assert_trivial=True), product)


@gluon.jit
def row_scale(words):
    """As row_scale of moe/tile.py."""
    exponent = (words & 3) | (words >> 6 & 12) | (words >> 12 & 48) | (words >> 18 & 192)
    scale = (gl.maximum(exponent, 1) << 23).to(gl.float32, bitcast=True) * 0.015625
    return gl.where(exponent == 255, float("nan"), scale)


@gluon.jit
def activation_position(column):
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
def activate(gate, up):
    """Clamped SwiGLU, ``gate * sigmoid(1.702 * gate) * (up + 1)``; NaN passes through.

    Triton's clamps, exponential and division treat NaN and denormal results with a third of the
    instructions that an element of the result takes.
    """
    return gl.inline_asm_elementwise(
        _ACTIVATE_ASM, "=f,f,f", [gate, up], dtype=gl.float32, is_pure=True, pack=1
    )


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
    act = activate(gate, up)
    stored: gl.constexpr = _stored_layout(TOKENS, LEVELS)
    if LEVELS == 2:
        # values of 16 bits take one exchange, the codes of both levels would take two
        act = gl.convert_layout(act.to(DTYPE), stored).to(gl.float32)
    act *= 8.0
    first = act.to(gl.float8e4nv)
    column = group * 32 + gl.arange(0, 32, gl.SliceLayout(1, stored))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    rows = (begin + token).to(gl.int64) * (LEVELS * OP)
    pointers = out + rows[None, :] + activation_position(column)[:, None]
    mask = (token < count)[None, :] & (column >= 0)[:, None]
    gl.store(pointers, gl.convert_layout(first, stored), mask=mask)
    if LEVELS == 2:
        second = ((act - first.to(gl.float32)) * 16.0).to(gl.float8e4nv)
        gl.store(pointers + OP, gl.convert_layout(second, stored), mask=mask)
    # the last group fills the chunk: what is not written could hold NaN codes
    if OP != (LAST + 1) * 32:  # noqa: SIM102
        if group == LAST:
            for block in gl.static_range(LAST + 1, OP // 32):
                pad = block * 32 + gl.arange(0, 32, gl.SliceLayout(1, stored))
                pointers = out + rows[None, :] + activation_position(pad)[:, None]
                zero = gl.zeros([32, TOKENS], gl.uint8, layout=stored)
                zero = zero.to(gl.float8e4nv, bitcast=True)
                for level in gl.static_range(LEVELS):
                    gl.store(pointers + level * OP, zero, mask=mask)


@gluon.jit
def token_scales(x_scale, begin, count, TOKENS: gl.constexpr, LEVELS: gl.constexpr):
    """Scales of a tile's tokens, for ``scaled``; x_scale None is the static 1/8."""
    layout: gl.constexpr = gl.SliceLayout(0, _result_layout(TOKENS, LEVELS))
    if x_scale is None:
        return gl.full([TOKENS], 0.125, gl.float32, layout=layout)
    else:
        token = gl.arange(0, TOKENS, layout)
        return gl.load(x_scale + begin + token, mask=token < count, other=0.0)


@gluon.jit
def scaled(acc, words, shift, factors, LEVELS: gl.constexpr):
    """[row in memory, token] of [64, columns] products, with scales and bias."""
    TOKENS: gl.constexpr = acc.type.shape[1] // LEVELS
    layout: gl.constexpr = _result_layout(TOKENS, LEVELS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if LEVELS == 2:
        first, second = gl.split(acc.reshape([64, TOKENS, 2]))
        acc = first + second * 0.0625
    # rows p and p + 32 of the group in memory are rows r and r + 8 of the product
    acc = acc.reshape([4, 2, 8, TOKENS]).permute((1, 0, 2, 3)).reshape([64, TOKENS])
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    acc *= gl.convert_layout(row_scale(words), rows, assert_trivial=True)[:, None]
    acc *= factors[None, :]
    if shift is not None:
        acc += gl.convert_layout(shift.to(gl.float32), rows, assert_trivial=True)[:, None]
    return acc


@gluon.jit
def store_rows(acc, out, group, begin, count, N: gl.constexpr):
    """out[begin + token, group * 64 + row] of [64, tokens], rounded to out's dtype.

    Eight threads of a warp hold eight adjacent numbers.
    """
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    token = gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
    target = out + (begin + token).to(gl.int64)[None, :] * N + (group * 64 + row)[:, None]
    mask = (token < count)[None, :] & (row >= 0)[:, None]
    gl.store(target, acc.to(out.dtype.element_ty), mask=mask)
