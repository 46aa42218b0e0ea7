# SPDX-License-Identifier: MIT
"""``quantize_fp8``, ``quantize_fp8_adjusted`` and ``dequantize_fp8``.

Scales are float32 dequantisation multipliers, ``x ~= q * scale``; the arithmetic is that of
kernels/quantize/reference.py on every backend, bit for bit.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8, STRATEGIES, check_dtype, check_on_device
from oss_fused.kernels.contract import OneOf, Operand
from oss_fused.kernels.op import declare
from oss_fused.kernels.quantize import reference


def _check_scale(x: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is not None:
        check_scale_of_rows("scale", scale, x)


def _check_dequantize_scale(q: torch.Tensor, scale: torch.Tensor) -> None:
    check_scale_of_rows("scale", scale, q)


def check_scale_of_rows(name: str, scale: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless ``scale`` is float32 with one element, or one for each row of ``x``."""
    check_dtype(name, scale, (torch.float32,))
    rows = x.shape[:-1].numel()
    if scale.numel() not in (1, rows):
        raise ShapeMismatchError(
            f"{name}.shape={tuple(scale.shape)}: expected one element or {rows}, a row each"
        )
    check_on_device(x.device, name, scale)


declare(
    reference.quantize_fp8,
    {"x": Operand("...", *FLOAT_DTYPES), "strategy": OneOf(*STRATEGIES)},
    {"triton": "triton", "cuda": "cuda"},
    check=_check_scale,
    example={"...": (7, 64), "scale": None, "strategy": "token"},
)
declare(
    reference.quantize_fp8_adjusted,
    {"x": Operand("...", *FLOAT_DTYPES)},
    {"triton": "triton"},
    check=_check_scale,
    example={"...": (7, 64), "scale": torch.tensor([0.001])},
)
declare(
    reference.dequantize_fp8,
    {"q": Operand("...", FP8), "out_dtype": OneOf(*FLOAT_DTYPES)},
    {"triton": "triton"},
    check=_check_dequantize_scale,
    example={"...": (7, 64), "scale": torch.tensor([0.02])},
)
