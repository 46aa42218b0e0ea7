# SPDX-License-Identifier: MIT
"""``oss_fused::quantize_fp8``, ``quantize_fp8_adjusted`` and ``dequantize_fp8``.

Scales are float32 dequantisation multipliers, ``x ~= q * scale``; the arithmetic is that of
kernels/reference/quantize.py on every backend, bit for bit.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.validation import FP8
from oss_fused.ops.registration import register_op


def _quantize_fp8_fake(
    x: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    if scale is not None:
        return q, torch.empty_like(scale)
    shape = (1,) if strategy == "tensor" else (*x.shape[:-1], 1)
    return q, x.new_empty(shape, dtype=torch.float32)


def _quantize_fp8_adjusted_fake(
    x: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    return q, scale.new_empty(scale.shape)


def _dequantize_fp8_fake(
    q: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(q.shape, dtype=out_dtype, device=q.device)


# q: x's shape, contiguous. scale: [1] for strategy "tensor", [..., 1] for "token" (along the last
# dimension) and "channel" (a weight's rows); a copy of ``scale`` where one is given (static).
register_op(
    "quantize_fp8(Tensor x, Tensor? scale, str strategy) -> (Tensor q, Tensor scale)",
    _quantize_fp8_fake,
)
# a static scale is the least one: where finite values exceed 448 * scale, the kernel that quantises
# finds it, and the scale becomes amax / 448. scale [rows, 1] rises row by row, [1] for the tensor
register_op(
    "quantize_fp8_adjusted(Tensor x, Tensor scale) -> (Tensor q, Tensor scale)",
    _quantize_fp8_adjusted_fake,
)
register_op(
    "dequantize_fp8(Tensor q, Tensor scale, ScalarType out_dtype) -> Tensor",
    _dequantize_fp8_fake,
)
