# SPDX-License-Identifier: MIT
"""``fp8_gemm`` and ``fp8_linear``.

fp8_gemm: a [M, K] and b [N, K] float8_e4m3fn, K contiguous; a_scale [M, 1] or [1], b_scale
[N, 1] or [1] float32; bias [N] or None; ``out = acc * a_scale * b_scale + bias`` in float32,
rounded once to out_dtype. On a CPU ``b`` may be bf16, packed bf16 (packed.py) or float32 holding
the values of e4m3 codes; with the first two, ``acc`` is rounded to bf16 before it is scaled.

levels [L, K] float8_e4m3fn, or None: for at most L / 2 rows, ``acc`` is of
``levels[0 : 2 M : 2] + levels[1 : 2 M : 2] / 16``, and ``a`` is not read.

fp8_linear: x [..., K] is quantised per token, or with ``input_scale`` [1] where that is given,
and multiplied as above; the result has x's dtype. Up to ``bf16_rows`` rows are quantised in two
levels. kernels/levels.py says what ``levels`` and ``bf16_rows`` are for.

prefetch_weights: the caller vouches that whatever still runs or waits on the stream leaves the
weights alone, with their scales, bias and norm gain. Decode kernels then ask for them before the
kernels ahead have finished. False is right after any kernel that may have written one of them; a
kernel launched without programmatic dependent launch, or the start of a CUDA graph, ends the doubt.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import FLOAT_DTYPES, FP8
from oss_fused.kernels.contract import OneOf, Operand, Scale
from oss_fused.kernels.gemm import reference
from oss_fused.kernels.gemm.packed import PACKED
from oss_fused.kernels.levels import BF16_ROWS_RULE, check_bf16_rows
from oss_fused.kernels.op import declare
from oss_fused.kernels.quantize import check_scale_of_rows

# served layers unpack their codes once, modules theirs, where there are no FP8 tensor cores
_CPU_CODES = (torch.bfloat16, PACKED, torch.float32)


def _gemm_fake(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    # of vLLM's product of packed weights PyTorch knows no shape
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


declare(
    reference.fp8_gemm,
    {
        "a": Operand("M K", FP8),
        "b": Operand("N K", FP8, cpu=_CPU_CODES),
        "a_scale": Scale("M"),
        "b_scale": Scale("N"),
        "bias": Operand("N", *FLOAT_DTYPES),
        "out_dtype": OneOf(*FLOAT_DTYPES),
        "levels": Operand("L K", FP8),
    },
    {"triton": "triton", "cuda": "cuda", "tilelang": "tilelang", "nvcc": "nvcc", "cpu": "cpu"},
    fake=_gemm_fake,
    example={"M": 20, "N": 48, "K": 64, "levels": None},
)


def _check_input_scale(
    x: torch.Tensor, input_scale: torch.Tensor | None, bf16_rows: int = 0
) -> None:
    check_bf16_rows(bf16_rows, "input_scale", input_scale)
    if input_scale is not None:
        check_scale_of_rows("input_scale", input_scale, x)


declare(
    reference.fp8_linear,
    {
        "weight": Operand("N K", FP8, cpu=_CPU_CODES),
        "x": Operand("... K", *FLOAT_DTYPES),
        "weight_scale": Scale("N"),
        "bias": Operand("N", *FLOAT_DTYPES),
        "bf16_rows": BF16_ROWS_RULE,
    },
    {"triton": "triton", "cuda": "cuda_linear", "cpu": "cpu"},
    check=_check_input_scale,
    fake=_linear_fake,
    example={"...": (20,), "N": 48, "K": 64, "input_scale": None},
)
