# SPDX-License-Identifier: MIT
"""``weight_only_linear``: FP8 weights, activations in 16 bits (W8A16).

x [..., K] bf16, float16 or float32; weight [N, K] float8_e4m3fn, K contiguous; weight_scale [N, 1]
or [1] float32; bias [N] or None; ``out = (x @ weight.T) * weight_scale + bias``, products added and
scaled in float32, rounded once to x.dtype. On a CPU ``weight`` may be bf16 or float32 holding the
values of e4m3 codes; with bf16 x and weight the sum is rounded to bf16 before it is scaled.

For float32 x, where K or a stride is no multiple of 16 bytes, and for many rows on other GPUs than
Hopper's the weight is dequantised to x.dtype at every call and cuBLAS multiplies: then
``weight * weight_scale`` is rounded to x.dtype, too, and leaves its range where x.dtype does.

prefetch_weights: as in kernels/gemm.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FLOAT_DTYPES, FP8, check_dtype
from oss_fused.kernels.contract import Operand, Scale
from oss_fused.kernels.gemm.packed import PACKED
from oss_fused.kernels.op import declare
from oss_fused.kernels.weight_only import reference


def _empty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # the twin would ask for the number of rows on a CPU, and so tie a graph to it
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _check_packed(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dtype == PACKED:
        check_dtype("x", x, (torch.bfloat16,))


declare(
    reference.weight_only_linear,
    {
        "weight": Operand("N K", FP8, cpu=(torch.bfloat16, PACKED, torch.float32)),
        "x": Operand("... K", *FLOAT_DTYPES),
        "weight_scale": Scale("N"),
        "bias": Operand("N", *FLOAT_DTYPES),
    },
    {"triton": "triton"},
    check=_check_packed,
    fake=_empty,
    example={"...": (20,), "N": 48, "K": 64},
)
