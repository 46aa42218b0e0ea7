# SPDX-License-Identifier: MIT
"""Gradients of RMSNorm + rotary embedding in one pass over the rows; see kernels/rope.

A CTA takes every n-th row and holds both halves of its heads. The weight's gradient is a sum over
rows: each CTA sums its own in registers, and the CTAs' sums [ctas, H] are added at the end, in a
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import multiprocessors
from oss_fused.kernels.numerics import round_to
from oss_fused.kernels.rope import reference


@triton.jit
def _load(base, offsets, mask):
    return tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "sequence"])
def _rmsnorm_rope_backward_kernel(
    grad,
    x,
    weight,
    cos,
    sin,
    dx,
    partial,
    rows,
    sequence,
    heads,
    half,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (lane < half)
    in_half = lane < half
    left = head * (2 * half) + lane
    right = left + half
    hidden = heads * 2 * half
    gain_left = _load(weight, left, mask)
    gain_right = _load(weight, right, mask)
    sum_left = tl.zeros([HEADS, HALF], tl.float32)
    sum_right = tl.zeros([HEADS, HALF], tl.float32)
    wide = tl.program_id(0).to(tl.int64) * 0
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = index + wide
        x_left = _load(x + row * hidden, left, mask)
        x_right = _load(x + row * hidden, right, mask)
        g_left = _load(grad + row * hidden, left, mask)
        g_right = _load(grad + row * hidden, right, mask)
        token = (row % sequence) * (2 * half)
        # the transpose of the rotation
        turned = g_left * _load(cos + token, lane, in_half)
        turned += g_right * _load(sin + token + half, lane, in_half)
        g_right = g_right * _load(cos + token + half, lane, in_half)
        g_right -= g_left * _load(sin + token, lane, in_half)
        g_left = turned
        total = tl.sum(tl.sum(x_left * x_left + x_right * x_right, 1), 0)
        rstd = tl.rsqrt(total / hidden + eps)
        n_left = x_left * rstd
        n_right = x_right * rstd
        sum_left += g_left * n_left
        sum_right += g_right * n_right
        g_left *= gain_left
        g_right *= gain_right
        mean = tl.sum(tl.sum(g_left * n_left + g_right * n_right, 1), 0) / hidden
        dtype: tl.constexpr = dx.dtype.element_ty
        out_left = round_to(rstd * (g_left - n_left * mean), dtype)
        out_right = round_to(rstd * (g_right - n_right * mean), dtype)
        tl.store(dx + row * hidden + left, out_left, mask=mask)
        tl.store(dx + row * hidden + right, out_right, mask=mask)
    own = partial + tl.program_id(0).to(tl.int64) * hidden
    tl.store(own + left, sum_left, mask=mask)
    tl.store(own + right, sum_right, mask=mask)


def rmsnorm_rope_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; see kernels/rope for the contract."""
    if torch.float64 in (x.dtype, weight.dtype, cos.dtype, sin.dtype):
        # the kernel computes in float32
        return reference.rmsnorm_rope_backward(grad, x, weight, cos, sin, eps)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight)
    batch, sequence, hidden = x.shape
    half = cos.shape[1] // 2
    heads = hidden // cos.shape[1]
    rows = batch * sequence
    ctas = min(rows, 2 * multiprocessors(x.device))
    partial = torch.empty(ctas, hidden, dtype=torch.float32, device=x.device)
    _rmsnorm_rope_backward_kernel[(ctas,)](
        grad.contiguous(),
        x.contiguous(),
        weight.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        dx,
        partial,
        rows,
        sequence,
        heads,
        half,
        eps,
        HEADS=next_power_of_2(heads),
        HALF=next_power_of_2(half),
        num_warps=min(next_power_of_2(cdiv(hidden, 512)), 16),
    )
    return dx, partial.sum(0).to(weight.dtype)
