# SPDX-License-Identifier: MIT
"""Activations of few rows in two e4m3 levels: ``x = (first + second / 16) * scale``.

The scale of a row is a power of two. Eight significant bits are four and four, so that no bfloat16
value down to 2^-13 of the row's largest loses anything. Both levels are columns of one matrix
product on FP8 tensor cores, which idle where few rows meet a whole weight.

Operators that quantise take ``bf16_rows`` and return ``levels`` [2 * bf16_rows, K]; a product
takes it beside the codes. Shapes must not depend on the number of rows M in a compiled graph: for
``0 < M <= bf16_rows``, rows 2 i and 2 i + 1 of ``levels`` are the levels of row i, and the codes
are the first ones. For more rows nothing is written there, and codes and scales are those of one
level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oss_fused.errors import SchemeError
from oss_fused.kernels.contract import Between

# rows whose two levels a product takes in about the time of one: half of the narrow side of a tile
BF16_ROWS = 8
BF16_ROWS_RULE = Between(0, BF16_ROWS)


def check_bf16_rows(bf16_rows: int, name: str, static_scale: torch.Tensor | None) -> None:
    """Raise SchemeError where rows would have two levels and a given scale ``name`` at once."""
    if bf16_rows and static_scale is not None:
        raise SchemeError(f"bf16_rows={bf16_rows}: expected 0 with a given {name}")


def has_two_levels(rows: int, bf16_rows: int) -> bool:
    """Whether so many rows have two levels."""
    return 0 < rows <= bf16_rows


def levels_of(codes: torch.Tensor, levels: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of ``levels`` that hold ``codes`` [M, K]: [2 M, K], or None where none do."""
    rows = codes.shape[0]
    if levels is None or not has_two_levels(rows, levels.shape[0] // 2):
        return None
    return levels[: 2 * rows]


def values_of(levels: torch.Tensor) -> torch.Tensor:
    """Values [M, K] float32 of both levels [2 M, K], in units of their row's scale."""
    return levels[::2].float() + levels[1::2].float() / 16.0


def sum_of_levels(
    product: Callable[..., torch.Tensor],
    levels: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *options: Any,
) -> torch.Tensor:
    """fp8_gemm of ``levels`` [2 M, K] by two calls of ``product``, which takes one level."""
    out = product(levels[::2], b, a_scale, b_scale, None, torch.float32, *options)
    out += product(levels[1::2], b, a_scale * 0.0625, b_scale, None, torch.float32, *options)
    return (out if bias is None else out.add_(bias)).to(out_dtype)
