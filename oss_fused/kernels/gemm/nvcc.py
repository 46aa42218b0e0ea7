# SPDX-License-Identifier: MIT
"""FP8 product in CUDA C++, gemv.cu: for one row, repeated for more; see kernels/gemm."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FP8, as_rows, check_dtype
from oss_fused.kernels.compiled import ALIGNMENT, TYPES, launcher
from oss_fused.kernels.launch import pdl_options
from oss_fused.kernels.levels import levels_of, sum_of_levels

# rows of a grid's second axis
_MAX_ROWS = 65535
_launch = launcher("oss_fused_gemv", "pppppp" + "iii" + "ll" + "iiiiii")


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
    levels: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(a @ b.T) * a_scale * b_scale.T + bias``.

    Raises:
        ShapeMismatchError: also where K is no multiple of 16 or M is above 65535.
    """
    both = levels_of(a, levels)
    if both is not None:
        return sum_of_levels(fp8_gemm, both, b, a_scale, b_scale, bias, out_dtype)
    check_dtype("b", b, (FP8,))
    m, (n, k) = a.shape[0], b.shape
    if k % ALIGNMENT:
        raise ShapeMismatchError(
            f"b.shape={(n, k)}: backend 'nvcc' expects K a multiple of {ALIGNMENT}"
        )
    if m > _MAX_ROWS:
        raise ShapeMismatchError(
            f"a.shape={(m, k)}: backend 'nvcc' expects at most {_MAX_ROWS} rows"
        )
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    a, b = _aligned(a), _aligned(b)
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    added = None if bias is None else bias.contiguous()
    _launch(
        a.device,
        *(t.data_ptr() for t in (a, b, a_scale, b_scale)),
        None if added is None else added.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k // ALIGNMENT,
        a.stride(0) // ALIGNMENT,
        b.stride(0) // ALIGNMENT,
        a_scale.numel() != 1,
        b_scale.numel() != 1,
        0 if added is None else TYPES[added.dtype],
        TYPES[out_dtype],
        prefetch_weights,
        bool(pdl_options(a.device).get("launch_pdl")),
    )
    return out


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Rows of ``t`` that start at multiples of 16 bytes."""
    t = as_rows(t)
    if t.data_ptr() % ALIGNMENT or t.stride(0) % ALIGNMENT:
        return t.clone(memory_format=torch.contiguous_format)
    return t
