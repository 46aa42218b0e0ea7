# SPDX-License-Identifier: MIT
"""``oss_fused::add_rms_norm_quant``: residual add, RMSNorm and FP8 quantisation in one launch.

x, residual [..., H], weight [H]: ``residual_out = x + residual`` (a copy of x without residual),
``normed = rms_norm(residual_out) * weight`` rounded to x.dtype where vLLM rounds, and
``q, scale = quantize_fp8(normed)``, per token, or static where ``scale`` [1] is given.
With ``write_normed=False`` the normed rows are not written and ``normed`` is empty.
``prefetch_weights`` is fp8_gemm's (ops/gemm.py), for ``weight``.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.validation import FP8
from oss_fused.ops.registration import register_op


def _add_rms_norm_quant_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    write_normed: bool = True,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    return (
        torch.empty(x.shape, dtype=FP8, device=x.device),
        torch.empty(scale_shape, dtype=torch.float32, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape if write_normed else (0,), dtype=x.dtype, device=x.device),
    )


register_op(
    "add_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor? scale, "
    "bool write_normed=True, bool prefetch_weights=False) -> "
    "(Tensor q, Tensor scale, Tensor residual_out, Tensor normed)",
    _add_rms_norm_quant_fake,
)
