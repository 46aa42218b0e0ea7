# SPDX-License-Identifier: MIT
"""``oss_fused::fp8_gemm`` and ``oss_fused::fp8_linear``.

fp8_gemm: a [M, K] and b [N, K] float8_e4m3fn, K contiguous; a_scale [M, 1] or [1], b_scale
[N, 1] or [1] float32; bias [N] or None; ``out = acc * a_scale * b_scale + bias`` in float32,
rounded once to out_dtype. On a CPU ``b`` may be float32 holding the values of e4m3 codes.

fp8_linear: x [..., K] is quantised per token, or with ``input_scale`` [1] where that is given,
and multiplied as above; the result has x's dtype.

prefetch_weights: the caller vouches that whatever still runs or waits on the stream leaves the
weights alone, with their scales, bias and norm gain. Decode kernels then ask for them before the
kernels ahead have finished. False is right after any kernel that may have written one of them; a
kernel launched without programmatic dependent launch, or the start of a CUDA graph, ends the doubt.
"""

from __future__ import annotations

import torch

from oss_fused.ops.registration import register_op


def _fp8_gemm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fp8_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register_op(
    "fp8_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, "
    "ScalarType out_dtype, bool prefetch_weights=False) -> Tensor",
    _fp8_gemm_fake,
)
register_op(
    "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? input_scale, "
    "Tensor? bias, bool prefetch_weights=False) -> Tensor",
    _fp8_linear_fake,
)
