# SPDX-License-Identifier: MIT
"""bf16 weights in the order that a CPU's bf16 instructions read: packed once, multiplied often.

PyTorch brings a weight into such an order at every product, which takes longer than the product of
few rows. vLLM's CPU build has operations (from SGLang) that take a packed one. A packed weight is
int16 [N, K]: as many bytes as in bf16, a tensor that loads can copy into, and of a dtype that
nothing takes for numbers.
"""

from __future__ import annotations

import functools

import torch

from oss_fused.errors import ShapeMismatchError

BF16 = torch.bfloat16
PACKED = torch.int16
# vLLM's operations ask no processor before they run such an instruction
HAS_INSTRUCTIONS = torch.cpu._is_avx512_bf16_supported()
# sizes of which N and K must be multiples
_ROWS, _COLUMNS = 16, 32
# with more, 128 rows of activations take longer than PyTorch's product does
_MOST_COLUMNS = 3072


def available() -> bool:
    """Whether this processor and the vLLM that is loaded multiply by packed weights."""
    operations = ("convert_weight_packed", "weight_packed_linear")
    found = all(hasattr(torch.ops._C, name) for name in operations)
    return HAS_INSTRUCTIONS and found and _is_right()


@functools.cache
def _is_right() -> bool:
    """Whether vLLM's operations do what they did when this was written; once per process."""
    weight = (torch.arange(_ROWS * _COLUMNS) % 13 - 6).to(BF16).view(_ROWS, _COLUMNS)
    # few rows and many take different loops
    rows = (torch.arange(9 * _COLUMNS) % 7 - 3).to(BF16).view(9, _COLUMNS)
    try:
        packed = pack(weight)
        products = [product(part, packed) for part in (rows[:1], rows)]
    except (RuntimeError, TypeError):
        return False
    exact = (rows.float() @ weight.float().t()).to(BF16)
    return torch.equal(products[0], exact[:1]) and torch.equal(products[1], exact)


def fits(n: int, k: int) -> bool:
    """Whether a packed weight [n, k] is a gain at every number of rows."""
    return n > 0 and n % _ROWS == 0 and 0 < k <= _MOST_COLUMNS and k % _COLUMNS == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of a bf16 weight [N, K], where ``available()``.

    Raises:
        ShapeMismatchError: N or K is not what ``fits`` wants.
    """
    if not fits(*weight.shape):
        raise ShapeMismatchError(
            f"weight.shape={tuple(weight.shape)}: expected N a multiple of {_ROWS} and K a "
            f"multiple of {_COLUMNS}, {_MOST_COLUMNS} at most"
        )
    return torch.ops._C.convert_weight_packed(weight.contiguous()).view(PACKED)


def product(a: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """``a @ weight.T`` of bf16 rows [M, K], summed in float32, rounded to bf16 [M, N]."""
    out = torch.empty(a.shape[0], packed.shape[0], dtype=BF16)
    if out.numel():
        torch.ops._C.weight_packed_linear(out, a.contiguous(), packed.view(BF16), None, True)
    return out
