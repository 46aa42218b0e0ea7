# SPDX-License-Identifier: MIT
"""Gated activation and FP8 quantisation by vLLM's kernels; see ops/mlp.py for the contract."""

from __future__ import annotations

import torch

from oss_fused.kernels.cuda.extension import vllm_ops
from oss_fused.kernels.cuda.quantize import quantize_fp8
from oss_fused.kernels.validation import as_rows, check_act_quant

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
    check_act_quant(x, activation, scale)
    product = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if product.numel():
        _ACTIVATE[activation](as_rows(product), as_rows(x).contiguous())
    return quantize_fp8(product, scale, "token")
