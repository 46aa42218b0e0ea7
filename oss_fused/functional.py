# SPDX-License-Identifier: MIT
"""The operator library as functions: quantise, multiply, normalise, on any supported device."""

from __future__ import annotations

import torch

import oss_fused.ops  # noqa: F401  (registers the operators)
from oss_fused.errors import NumericalOverflowError, SchemeError, ShapeMismatchError
from oss_fused.kernels.validation import FP8

_ops = torch.ops.oss_fused
_ON_OVERFLOW = ("adjust", "saturate", "raise")


def quantize_fp8(
    t: torch.Tensor,
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
    q: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype = torch.float32
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
    qa, sa = _quantized(a, a_scale, "token")
    qb, sb = _quantized(b.t(), b_scale, "channel")
    return _ops.fp8_gemm(qa, qb, sa, sb, bias, out_dtype)


def _quantized(
    t: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if t.dtype != FP8:
        return quantize_fp8(t, None if scale is None else scale.view(-1, 1), strategy)
    if scale is None:
        return t, torch.ones(1, device=t.device)
    return t, scale if scale.numel() == 1 else scale.reshape(-1, 1)
