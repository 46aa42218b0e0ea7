# SPDX-License-Identifier: MIT
"""``quantize_fp8``, ``quantize_fp8_adjusted`` and ``dequantize_fp8``.

Scales are float32 dequantisation multipliers, ``x ~= q * scale``. Every backend gives the codes and
scales of reference.py bit for bit.

quantize_fp8: x [..., K] -> q float8_e4m3fn [..., K] and its scale. Without ``scale`` the strategy
"tensor" computes one scale [1]; "token" and "channel" compute one per row [..., 1]. A given scale
has one element or, in any shape, one per row; finite values saturate at 448 * scale. It is returned
in its shape.

quantize_fp8_adjusted: as quantize_fp8 with a given scale, which is raised where it is too small for
x, per tensor or per row as it is given. Returns q and the scale used.

dequantize_fp8: q float8_e4m3fn [..., K] and a scale of one element or one per row ->
``q * scale`` in float32, rounded to out_dtype.
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
