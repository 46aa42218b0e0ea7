# SPDX-License-Identifier: MIT
"""The operator library as functions: quantise, multiply, normalise, on any supported device."""

from __future__ import annotations

import torch

import oss_fused.ops  # noqa: F401  (registers the operators)
from oss_fused import autograd
from oss_fused.errors import NumericalOverflowError, SchemeError, ShapeMismatchError
from oss_fused.kernels.validation import FP8

_ops = torch.ops.oss_fused
_ON_OVERFLOW = ("adjust", "saturate", "raise")


def quantize_fp8(
    t: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    strategy: str = "tensor",
    on_overflow: str = "adjust",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP8 E4M3: ``t ~= q * scale``.

    Args:
        t: [..., K] bfloat16, float16 or float32.
        scale: static float32 scale, [1], or [rows, 1]; None computes ``amax / 448``.
        strategy: "tensor", "token" (one scale per last-dimension row) or "channel" (the same for
            the rows of a weight).
        on_overflow: what happens where a given ``scale`` is too small for ``t``: "adjust" raises
            the scale to the one that fits, "saturate" clips to 448 * scale, "raise" raises.

    Returns:
        q: float8_e4m3fn, t's shape.
        scale: float32, [1] or [..., 1].

    Raises:
        UnsupportedDtypeError: dtype of ``t`` or ``scale``.
        ShapeMismatchError: shape of ``scale``.
        SchemeError: unknown ``strategy`` or ``on_overflow``.
        NumericalOverflowError: ``on_overflow="raise"`` and the scale is too small.
    """
    if on_overflow not in _ON_OVERFLOW:
        raise SchemeError(f"on_overflow={on_overflow!r}: expected one of {', '.join(_ON_OVERFLOW)}")
    if scale is not None and on_overflow != "saturate" and t.numel():
        rows = t.float().reshape(1 if scale.numel() == 1 else scale.shape[0], -1)
        needed = (rows.abs().amax(-1) / 448.0).view(scale.shape)
        if on_overflow == "raise" and bool((needed > scale).any()):
            raise NumericalOverflowError(
                f"scale={scale.flatten()[0].item()!r}: too small for t, whose largest magnitude "
                f"needs a scale of {needed.max().item()!r}"
            )
        # a non-finite amax says nothing about the range of the finite values
        scale = torch.where(needed.isfinite(), torch.maximum(scale, needed), scale)
    return _ops.quantize_fp8(t, scale, strategy)


def dequantize_fp8(
    q: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``q * scale``, rounded to ``out_dtype``; inverse of quantize_fp8 up to rounding.

    Raises:
        UnsupportedDtypeError: ``q`` is not float8_e4m3fn, or ``out_dtype`` is not floating.
        ShapeMismatchError: ``scale`` has neither one element nor one per row of ``q``.
    """
    return _ops.dequantize_fp8(q, scale, out_dtype)


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``a @ b + bias`` on FP8 operands with float32 accumulation.

    Args:
        a: [M, K], FP8 with ``a_scale``, or floating: then quantised per token.
        b: [K, N], FP8 with ``b_scale``, or floating: then quantised per column. The transpose of
            a row-major weight [N, K] is the fast layout; another one is copied.
        a_scale: float32 [1] or [M, 1]; None stands for 1 where ``a`` is FP8.
        b_scale: float32 [1] or [N, 1] (or [1, N]); None stands for 1 where ``b`` is FP8.
        bias: [N].
        out_dtype: default: the floating dtype among the operands, else bfloat16.

    Raises:
        ShapeMismatchError: the shapes do not fit.
        UnsupportedDtypeError: an operand's dtype.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [K, N]"
        )
    if out_dtype is None:
        floating = [t.dtype for t in (a, b) if t.dtype != FP8]
        out_dtype = floating[0] if floating else torch.bfloat16
    with torch.no_grad():
        qa, sa = _quantized(a, a_scale, "token")
        qb, sb = _quantized(b.t(), b_scale, "channel")
        out = _ops.fp8_gemm(qa, qb, sa, sb, bias, out_dtype)
    if autograd.needs_grad(a, b, bias):
        # an FP8 operand takes part as the numbers that its codes stand for
        wide_a = a if a.dtype != FP8 else dequantize_fp8(qa, sa, out_dtype=out_dtype)
        wide_b = b if b.dtype != FP8 else dequantize_fp8(qb, sb, out_dtype=out_dtype).t()
        return autograd.FP8Product.apply(wide_a, wide_b, bias, out)
    return out


def _quantized(
    t: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if t.dtype != FP8:
        rows = None if scale is None else scale.view(-1, 1)
        return quantize_fp8(t, scale=rows, strategy=strategy)
    if scale is None:
        return t, torch.ones(1, device=t.device)
    return t, scale if scale.numel() == 1 else scale.reshape(-1, 1)


def fused_rmsnorm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """RMSNorm and rotary embedding in one launch.

    ``y = x * rsqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019), then per head
    ``y * cos + rotate_half(y) * sin`` (Su et al. 2021, the pairing of GPT-NeoX and Llama).

    Args:
        x: [batch, sequence, hidden] bfloat16, float16 or float32.
        weight: [hidden].
        cos: [sequence, head_dim], head_dim even and a divisor of hidden.
        sin: [sequence, head_dim].
        eps: added to the mean square.

    Returns:
        [batch, sequence, hidden] in x.dtype. NaN and Inf propagate.

    Raises:
        ShapeMismatchError: the shapes do not fit.
        UnsupportedDtypeError: x's dtype.
    """
    if autograd.needs_grad(x, weight):
        return autograd.RMSNormRoPE.apply(x, weight, cos, sin, eps)
    return _ops.rmsnorm_rope(x, weight, cos, sin, eps)


def fused_gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str = "silu",
    *,
    activation_on: str = "up",
    gate_scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Both projections of a gated MLP, the activation and the product in one kernel.

    ``gate(x) * activation(up(x))``; with ``activation_on="gate"`` the form of HF checkpoints,
    ``activation(gate(x)) * up(x)`` (Shazeer 2020).

    Args:
        x: [..., hidden].
        gate_weight: [intermediate, hidden] in x.dtype, or float8_e4m3fn with gate_scale.
        up_weight: [intermediate, hidden], likewise.
        activation: "silu", "gelu" (erf form) or "gelu_tanh".
        activation_on: "up" or "gate".
        gate_scale: float32 [intermediate, 1] or [1] of an FP8 gate_weight.
        up_scale: likewise.

    Returns:
        [..., intermediate] in x.dtype.

    Raises:
        ShapeMismatchError: the shapes do not fit.
        UnsupportedDtypeError: a dtype.
        SchemeError: unknown activation or activation_on, or only one of the scales.
    """
    if gate_scale is None and autograd.needs_grad(x, gate_weight, up_weight):
        return autograd.GatedMLP.apply(x, gate_weight, up_weight, activation, activation_on)
    return _ops.gated_mlp(
        x, gate_weight, up_weight, gate_scale, up_scale, activation, activation_on
    )
