# SPDX-License-Identifier: MIT
"""Gated activation and FP8 quantisation by vLLM's kernels; see kernels/mlp for the contract."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.quantize.cuda import quantize_fp8
from oss_fused.kernels.vllm_ops import vllm_ops

_ops = vllm_ops()
_ACTIVATE = {
    "silu": _ops.silu_and_mul,
    "gelu": _ops.gelu_and_mul,
    "gelu_tanh": _ops.gelu_tanh_and_mul,
}


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``, in two launches."""
    product = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if product.numel():
        _ACTIVATE[activation](as_rows(product), as_rows(x).contiguous())
    return quantize_fp8(product, scale, "token")
