# SPDX-License-Identifier: MIT
"""``add_rms_norm_quant``: residual add, RMSNorm and FP8 quantisation in one launch.

x, residual [..., H], weight [H]: ``residual_out = x + residual`` (a copy of x without residual),
``normed = rms_norm(residual_out) * weight`` rounded to x.dtype where vLLM rounds, and
``q, scale = quantize_fp8(normed)``, per token, or static where ``scale`` [1] is given.
With ``write_normed=False`` the normed rows are not written and ``normed`` is empty.
``prefetch_weights`` is fp8_gemm's (kernels/gemm), for ``weight``. ``bf16_rows``, which needs
scales per token, and the last result, ``levels``, are those of kernels/levels.py.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8
from oss_fused.kernels.contract import Epsilon, Operand, Scale
from oss_fused.kernels.levels import BF16_ROWS_RULE, check_bf16_rows
from oss_fused.kernels.norm import reference
from oss_fused.kernels.op import declare


def _check(x: torch.Tensor, scale: torch.Tensor | None, bf16_rows: int = 0) -> None:
    if not x.shape[-1]:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected hidden at least 1")
    check_bf16_rows(bf16_rows, "scale", scale)


def _fake(
    x: torch.Tensor, scale: torch.Tensor | None, write_normed: bool = True, bf16_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    return (
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(scale_shape, dtype=torch.float32),
        x.new_empty(x.shape),
        x.new_empty(x.shape if write_normed else (0,)),
        x.new_empty(2 * bf16_rows, x.shape[-1], dtype=FP8),
    )


declare(
    reference.add_rms_norm_quant,
    {
        "x": Operand("... H", *FLOAT_DTYPES),
        "residual": Operand("... H", like="x"),
        "weight": Operand("H", *FLOAT_DTYPES),
        "eps": Epsilon(),
        "scale": Scale(),
        "bf16_rows": BF16_ROWS_RULE,
    },
    {"triton": "triton", "cuda": "cuda", "cpu": "cpu"},
    check=_check,
    fake=_fake,
    example={"...": (7,), "H": 128, "eps": 1e-5, "scale": None},
)
