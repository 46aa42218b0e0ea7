# SPDX-License-Identifier: MIT
"""``add_rms_norm_quant``: residual add, RMSNorm and FP8 quantisation in one launch.

x, residual [..., H], weight [H]: ``residual_out = x + residual`` (a copy of x without residual),
``normed = rms_norm(residual_out) * weight`` rounded to x.dtype where vLLM rounds, and
``q, scale = quantize_fp8(normed)``, per token, or static where ``scale`` [1] is given.
With ``write_normed=False`` the normed rows are not written and ``normed`` is empty.
``prefetch_weights`` is fp8_gemm's (kernels/gemm), for ``weight``.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import Epsilon, Operand, Scale
from oss_fused.kernels.norm import reference
from oss_fused.kernels.op import declare


def _check_width(x: torch.Tensor) -> None:
    if not x.shape[-1]:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected hidden at least 1")


declare(
    reference.add_rms_norm_quant,
    {
        "x": Operand("... H", *FLOAT_DTYPES),
        "residual": Operand("... H", like="x"),
        "weight": Operand("H", *FLOAT_DTYPES),
        "eps": Epsilon(),
        "scale": Scale(),
    },
    {"triton": "triton", "cuda": "cuda", "cpu": "cpu"},
    check=_check_width,
    example={"...": (7,), "H": 128, "eps": 1e-5, "scale": None},
)
