# SPDX-License-Identifier: MIT
"""FP8 quantisation and its inverse: the arithmetic that every kernel repeats.

``scale = max(amax / 448, 2**-126)`` (1 where amax is 0), ``q = e4m3(clamp(x * (1 / scale)))``,
both divisions rounded to nearest. NaN and infinities become NaN codes, never 448.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import (
    FP8,
    as_rows,
)
from oss_fused.kernels.scale_values import MIN_SCALE

FP8_MAX = 448.0


def scale_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """Dequantisation multiplier of a float32 ``amax``; NaN and Inf stay non-finite."""
    # with a Python number as divisor a GPU multiplies by the rounded reciprocal
    divisor = torch.full_like(amax, FP8_MAX) if amax.is_cuda else FP8_MAX
    scale = (amax / divisor).clamp_(min=MIN_SCALE)
    return scale.masked_fill_(amax == 0, 1.0)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``x`` [R, C] and their scale: per row [R, 1] when ``scale`` is None."""
    if scale is None:
        if x.shape[1] == 0:
            scale = torch.ones(x.shape[0], 1, device=x.device)
        else:
            scale = scale_of_amax(x.abs().amax(-1, keepdim=True).float())
        scaled = x.float() * scale.reciprocal()
    else:
        x32 = x.float()
        scaled = x32 * scale.reciprocal()
        # a static scale would clip an infinity into a plausible 448
        scaled = scaled.clamp_(-FP8_MAX, FP8_MAX).masked_fill_(x32.isinf(), float("nan"))
    return scaled.to(FP8), scale


def quantize_levels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both levels [2 R, C] of ``x`` [R, C], and the rows' scales [R, 1]; see kernels/levels.py."""
    if x.shape[1] == 0:
        return x.repeat_interleave(2, 0).to(FP8), torch.ones(x.shape[0], 1, device=x.device)
    amax = x.abs().amax(-1, keepdim=True).float()
    exponent = (amax.view(torch.int32) >> 23).clamp_(min=8)
    finite = exponent < 255
    scale = ((exponent - 7) << 23).view(torch.float32)
    values = x.float() * ((261 - exponent) << 23).view(torch.float32)
    values = torch.where(finite, values, 0.0)
    first = values.to(FP8)
    second = ((values - first.float()) * 16.0).to(FP8)
    levels = torch.stack((first, second), 1).view(-1, x.shape[1])
    return levels, scale.masked_fill_(~finite, float("nan"))


def quantize_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` to FP8 E4M3; see kernels/quantize for the contract."""
    rows = as_rows(x)
    if scale is not None:
        return quantize_rows(rows, scale.reshape(-1, 1))[0].view(x.shape), scale.clone()
    if strategy == "tensor":
        flat = x.reshape(1, -1)
        q, scale = quantize_rows(flat, None)
        return q.view(x.shape), scale.view(1)
    q, scale = quantize_rows(rows, None)
    return q.view(x.shape), scale.view(*x.shape[:-1], 1)


def quantize_fp8_adjusted(
    x: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with ``scale``, raised where it is too small; see kernels/quantize."""
    rows = as_rows(x)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=FP8, device=x.device), scale.clone()
    # a NaN or an infinity says nothing about the range of the finite values
    magnitudes = rows.float().abs().nan_to_num_(0.0, posinf=0.0)
    per_row = scale.numel() > 1
    amax = magnitudes.amax(-1, keepdim=True) if per_row else magnitudes.amax().view(1, 1)
    least = scale.reshape(-1, 1)
    fitted = torch.where(amax > 0, torch.maximum(least, scale_of_amax(amax)), least)
    return quantize_rows(rows, fitted)[0].view(x.shape), fitted.view(scale.shape)


def dequantize_fp8(q: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``q * scale`` in float32, rounded to ``out_dtype``; see kernels/quantize."""
    rows = as_rows(q)
    return (rows.float() * scale.reshape(-1, 1)).to(out_dtype).view(q.shape)
