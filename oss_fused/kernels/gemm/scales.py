# SPDX-License-Identifier: MIT
"""Scales of a product: one for each row of an operand, or one for all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_column(scale, offs, mask, EACH: tl.constexpr):
    """Scales [n, 1] of the rows ``offs``; the one of all rows unless EACH."""
    if EACH:
        other: tl.constexpr = None if mask is None else 0.0
        return tl.load(scale + offs, mask=mask, other=other)[:, None]
    else:
        return tl.load(scale)


@triton.jit
def scale_row(scale, offs, mask, EACH: tl.constexpr):
    """As ``scale_column``, [1, n]."""
    if EACH:
        return tl.load(scale + offs, mask=mask, other=0.0)[None, :]
    else:
        return tl.load(scale)
