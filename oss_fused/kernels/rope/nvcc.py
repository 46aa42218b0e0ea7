# SPDX-License-Identifier: MIT
"""RMSNorm + rotary embedding of whole rows in CUDA C++, rmsnorm_rope.cu; see kernels/rope."""

from __future__ import annotations

import torch

from oss_fused.kernels.compiled import ALIGNMENT, TYPES, launcher
from oss_fused.kernels.launch import pdl_options

_launch = launcher("oss_fused_rmsnorm_rope", "ppppp" + "llllll" + "ii" + "f" + "iiii")


def rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """``y * cos + rotate_half(y) * sin`` of ``y = rms_norm(x)``."""
    batch, sequence, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    mixed = any(t.dtype != x.dtype for t in (weight, cos, sin))
    if mixed:
        weight, cos, sin = weight.float(), cos.float(), sin.float()
    x, weight, cos, sin = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight, cos, sin)
    )
    half = cos.shape[1] // 2
    wide = half * x.element_size() % ALIGNMENT == 0 and all(map(_aligned, (x, weight, cos, sin)))
    _launch(
        x.device,
        *(t.data_ptr() for t in (x, weight, cos, sin, out)),
        batch * sequence,
        sequence,
        *x.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        hidden,
        half,
        eps,
        TYPES[x.dtype],
        mixed,
        wide,
        bool(pdl_options(x.device).get("launch_pdl")),
    )
    return out


def _aligned(t: torch.Tensor) -> bool:
    steps = (t.data_ptr(), *(stride * t.element_size() for stride in t.stride()[:-1]))
    return all(step % ALIGNMENT == 0 for step in steps)
