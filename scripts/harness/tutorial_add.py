# SPDX-License-Identifier: MIT
"""Vector addition, the first example of docs/measuring.md: out [N] = a [N] + b [N], any dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype, check_same_device, check_shape
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import round_to


@triton.jit
def _add_kernel(a, b, out, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    total = tl.load(a + offsets, mask=mask).to(tl.float32)
    total += tl.load(b + offsets, mask=mask).to(tl.float32)
    tl.store(out + offsets, round_to(total, out.dtype.element_ty), mask=mask)


def add(a: torch.Tensor, b: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``a + b`` of two vectors.

    Raises:
        ShapeMismatchError: the shapes differ.
        UnsupportedDtypeError: not floating, or the dtypes differ.
        UnsupportedDeviceError: different devices.
    """
    check_dtype("a", a, FLOAT_DTYPES)
    check_dtype("b", b, (a.dtype,))
    check_shape("a", a, (a.numel(),))
    check_shape("b", b, tuple(a.shape))
    check_same_device(a, b=b)
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    if out.numel():
        grid = (cdiv(out.numel(), BLOCK_SIZE),)
        _add_kernel[grid](a.contiguous(), b.contiguous(), out, out.numel(), BLOCK_SIZE)
    return out
