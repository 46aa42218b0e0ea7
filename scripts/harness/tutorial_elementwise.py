# SPDX-License-Identifier: MIT
"""Elementwise kernels, for the tutorial: ReLU, GELU (tanh form), a scalar added; any shape and N.

All three are one masked kernel per program: a program takes BLOCK_SIZE neighbours, and the mask
cuts what lies beyond N. NaN passes through.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FLOAT_DTYPES, check_dtype
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import round_to


@triton.jit
def _load(x, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32), offsets, mask


@triton.jit
def _relu_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    # not a maximum with 0, which would swallow NaN
    value = tl.where(value < 0.0, 0.0, value)
    tl.store(out + offsets, round_to(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_tanh_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    # 0.5 * (1 + tanh(z)) = 1 / (1 + e^(-2 z)) with z = sqrt(2 / pi) * (x + 0.044715 x^3)
    twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    value = value / (1.0 + tl.exp(-twice))
    tl.store(out + offsets, round_to(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _add_scalar_kernel(x, out, n, scalar, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    tl.store(out + offsets, round_to(value + scalar, out.dtype.element_ty), mask=mask)


def _launch(kernel: Any, x: torch.Tensor, *scalars: float, BLOCK_SIZE: int) -> torch.Tensor:
    check_dtype("x", x, FLOAT_DTYPES)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        grid = (cdiv(out.numel(), BLOCK_SIZE),)
        kernel[grid](x.contiguous(), out, out.numel(), *scalars, BLOCK_SIZE=BLOCK_SIZE)
    return out


def relu(x: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``max(x, 0)``; raises UnsupportedDtypeError where x is not floating."""
    return _launch(_relu_kernel, x, BLOCK_SIZE=BLOCK_SIZE)


def gelu_tanh(x: torch.Tensor, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` (Hendrycks and Gimpel 2016)."""
    return _launch(_gelu_tanh_kernel, x, BLOCK_SIZE=BLOCK_SIZE)


def add_scalar(x: torch.Tensor, scalar: float, BLOCK_SIZE: int = 1024) -> torch.Tensor:
    """``x + scalar``, added in float32."""
    return _launch(_add_scalar_kernel, x, float(scalar), BLOCK_SIZE=BLOCK_SIZE)
