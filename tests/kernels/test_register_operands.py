# SPDX-License-Identifier: MIT
"""Products whose left operand lies in registers, compiled for Hopper, which needs no GPU.

No step may end while a product reads its operand: the next step writes these registers.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.kernels.hopper import run_program

_EXPERTS = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from oss_fused.kernels.moe.tile import dot_unpacked


@triton.jit
def kernel(weights, tokens, out, steps):
    rows, depth = tl.arange(0, 64), tl.arange(0, 128)
    acc = tl.zeros([64, 64], tl.float32)
    for step in range(0, steps):
        weight = tl.load(weights + rows[:, None] * 128 + depth[None, :] + step * 8192)
        weight = (weight + 1).to(tl.float8e4nv, bitcast=True)
        token = tl.load(tokens + depth[:, None] + 128 * rows[None, :] + step * 8192)
        acc = dot_unpacked(weight, token, acc, False)
    tl.store(out + rows[:, None] * 64 + rows[None, :], acc)


types = {"weights": "*u8", "tokens": "*fp8e4nv", "out": "*fp32", "steps": "i32"}
aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1)}
source = ASTSource(kernel, types, {}, aligned)
print(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_stages": 3}).asm["ptx"])
"""

_WEIGHT_ONLY = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from oss_fused.kernels.weight_only.tile import _mixed_gemm_kernel, _Tile

types = {
    "x": "tensordesc<bf16[128,64]>", "w": "tensordesc<fp8e4nv[128,64]>", "scale": "*fp32",
    "bias": "*bf16", "out": "*bf16", "strides": ("i32", "i32"),
}
fixed = {"W_ROWS": True, "TILE": _Tile(128, 128, 64)}
names = [parameter.name for parameter in _mixed_gemm_kernel.params]
types = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
source = ASTSource(
    _mixed_gemm_kernel, types, {(names.index(name),): value for name, value in fixed.items()}
)
options = {"num_warps": 8, "num_stages": 4, "launch_pdl": True}
print(triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"])
"""


def end_of_step(program: str, folder: Path) -> list[str]:
    """Waits and branches of the program's loop after its last product."""
    shown = run_program(folder, program)
    found = re.findall(r"(bra\s+\$L__BB|wgmma.mma_async|wgmma.wait_group\S* \d+)", shown)
    products = [index for index, word in enumerate(found) if word == "wgmma.mma_async"]
    rest = found[products[-1] + 1 :]
    return rest[: next(index for index, word in enumerate(rest) if word.startswith("bra"))]


def test_experts_wait_for_their_products(tmp_path: Path) -> None:
    assert "wgmma.wait_group.sync.aligned 0" in end_of_step(_EXPERTS, tmp_path)


def test_weight_only_tiles_wait_for_their_products(tmp_path: Path) -> None:
    assert "wgmma.wait_group.sync.aligned 0" in end_of_step(_WEIGHT_ONLY, tmp_path)
