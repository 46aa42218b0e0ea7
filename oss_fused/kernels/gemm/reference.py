# SPDX-License-Identifier: MIT
"""FP8 matrix product and linear layer in float32 arithmetic; the CPU path of a served model."""

from __future__ import annotations

import torch

from oss_fused.kernels.quantize.reference import quantize_rows


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``(a @ b.T) * a_scale * b_scale.T + bias``; see kernels/gemm for the contract."""
    return _scaled_product(a.float(), b, a_scale.view(-1, 1), b_scale, bias).to(out_dtype)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """Quantise ``x``, multiply by ``weight``; see kernels/gemm for the contract."""
    n, k = weight.shape
    codes, scale = quantize_rows(x.reshape(-1, k), input_scale)
    out = _scaled_product(codes.float(), weight, scale.view(-1, 1), weight_scale, bias)
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    # a weight already unpacked to float32 is used as it is: unpacking costs 30x the product
    out = torch.mm(a, b.float().t()).mul_(a_scale).mul_(b_scale.view(1, -1))
    return out if bias is None else out.add_(bias)
