# SPDX-License-Identifier: MIT
"""The PTX that unpacks MXFP4 words, evaluated here: the interpreter and the twin do not run it.

Each of its instructions is a function of NumPy's 32-bit words, so that no GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from oss_fused.kernels.moe.mxfp4 import SPREAD, moe_unpack_mxfp4
from oss_fused.kernels.moe.tile import UNPACK_ASM, UNPACK_TABLE

Words = np.ndarray


def prmt(low: Words, high: Words, selector: Words) -> Words:
    """Bytes of ``high:low`` that four nibbles select; bit 3 of a nibble copies the byte's sign."""
    table = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(selector)
    for byte in range(4):
        nibble = selector >> (4 * byte) & 15
        value = (table >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint32) & 255
        value = np.where(nibble & 8, (value >> 7) * np.uint32(255), value)
        out |= value << np.uint32(8 * byte)
    return out


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit ``4a + 2b + c`` of the table, for every bit of the words."""
    out = np.zeros_like(a)
    for index in range(8):
        if int(table.flat[0]) >> index & 1:
            terms = [word if index >> (2 - at) & 1 else ~word for at, word in enumerate((a, b, c))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def add_halves(a: Words, b: Words) -> Words:
    """Sums of both float16 numbers of a word."""
    return (a.view(np.float16) + b.view(np.float16)).view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "add.rn.f16x2": add_halves,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def evaluate(asm: str, inputs: dict[str, Words]) -> dict[str, Words]:
    """All registers after the instructions of ``asm``."""
    registers = dict(inputs)
    like = next(iter(inputs.values()))

    def value(operand: str) -> Words:
        if operand.startswith("{"):
            low, high = (registers[half] for half in operand.strip("{}").split(","))
            return low | high << np.uint32(16)
        known = operand in registers
        return registers[operand] if known else np.full_like(like, int(operand, 0))

    body = asm[asm.index("{") + 1 : asm.rindex("}")]
    for statement in body.split(";")[:-1]:
        name, rest = statement.split(maxsplit=1)
        if name != ".reg":
            target, *operands = re.findall(r"{[^}]*}|[^,]+", rest.replace(" ", ""))
            result = INSTRUCTIONS[name](*map(value, operands))
            if target.startswith("{"):
                low, high = target.strip("{}").split(",")
                registers |= {low: result & np.uint32(0xFFFF), high: result >> np.uint32(16)}
            else:
                registers[target] = result
    return registers


def unpacked(words: Words, step: int) -> torch.Tensor:
    """float32 [words, 8]: the e4m3 codes that the kernels' PTX makes of packed words."""
    low, high = (
        (base + 8 * step * ones) & 0xFFFFFFFF
        for base, ones in zip(UNPACK_TABLE, (0x01010100, 0x01010101), strict=True)
    )
    inputs = {"$2": words, "$3": np.full_like(words, low), "$7": np.full_like(words, high)}
    registers = evaluate(UNPACK_ASM.value, inputs)
    codes = np.stack((registers["$0"], registers["$1"]), axis=1).view(np.uint8)
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()


def all_words() -> Words:
    """Every nibble in every place beside all others, and random words: [16384] x 64 of them."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 16384 * 64, dtype=np.uint64)
    words = random.astype(np.uint32)
    words[:16] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    return words


@pytest.mark.parametrize("step", range(SPREAD + 1))
def test_the_ptx_gives_the_values_of_the_twin(step):
    words = all_words()
    values = unpacked(words, step) * 2.0**-6
    packed = torch.from_numpy(words.view(np.uint8).copy()).view(16384, 256)
    # a row's largest exponent of 127: values are scaled by 2^(step - SPREAD)
    pieces = torch.tensor([127 >> (2 * piece) & 3 for piece in range(4)], dtype=torch.uint8)
    scales = torch.full((16384 // 64, 4, 64, 4), 8 * step, dtype=torch.uint8)
    scales[:, 0] |= pieces
    twin = moe_unpack_mxfp4(packed, scales.view(torch.int32).squeeze(-1), False)
    # the twin orders words by row: those of a group's chunk are 64 rows of 16
    ordered = values.view(16384 // 64, 4, 64, 128).permute(0, 2, 1, 3).reshape(16384, 512)
    assert torch.equal(ordered, twin)


def test_all_nibbles_meet_every_place():
    words = all_words()
    for place in range(8):
        assert len(np.unique(words >> np.uint32(4 * place) & 15)) == 16
