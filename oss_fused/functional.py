# SPDX-License-Identifier: MIT
"""The operator library as functions: quantise, multiply, normalise, on any supported device."""

from __future__ import annotations

import torch

import oss_fused.kernels  # noqa: F401  (registers the operators)
from oss_fused import autograd
from oss_fused.errors import NumericalOverflowError, SchemeError
from oss_fused.kernels.checks import (
    FLOAT_DTYPES,
    FP8,
    ON_OVERFLOW,
    STRATEGIES,
    check_choice,
    check_dtype,
    check_product,
    check_same_device,
    check_scale,
)
from oss_fused.kernels.op import check_arguments
from oss_fused.kernels.scale_values import check_scale_values, trust_scale, values_visible

_ops = torch.ops.oss_fused


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
            the scale to the one that fits, "saturate" clips to 448 * scale, "raise" raises, for
            values that are not finite, too. The kernel that quantises finds the overflow; only
            "raise" makes the host wait.

    Values of ``scale`` are checked when a tensor is first seen, and again after a change in place;
    neither under torch.compile nor while a CUDA graph is captured.

    Returns:
        q: float8_e4m3fn, t's shape.
        scale: float32, [1] or [..., 1].

    Raises:
        UnsupportedDtypeError: dtype of ``t`` or ``scale``.
        UnsupportedDeviceError: ``scale`` lies elsewhere than ``t``.
        ShapeMismatchError: shape of ``scale``.
        SchemeError: unknown ``strategy`` or ``on_overflow``, or "raise" where no value can be seen.
        NumericalOverflowError: a scale is not finite, zero, negative or below 2**-126; or
            ``on_overflow="raise"`` and the scale is too small or ``t`` not finite.
    """
    check_dtype("t", t, FLOAT_DTYPES)
    check_choice("on_overflow", on_overflow, ON_OVERFLOW)
    check_choice("strategy", strategy, STRATEGIES)
    if on_overflow == "raise" and not values_visible(t):
        raise SchemeError(
            "on_overflow='raise': the values of t cannot be seen while a function is compiled or "
            "a CUDA graph captured; expected 'adjust' or 'saturate' there"
        )
    if scale is None:
        q, found = _ops.quantize_fp8(t, None, strategy)
    else:
        check_scale("scale", scale, _rows_of(t))
        check_same_device(t, scale=scale)
        check_scale_values("scale", scale)
        if on_overflow == "saturate":
            q, found = _ops.quantize_fp8(t, scale, strategy)
        else:
            q, found = _ops.quantize_fp8_adjusted(t, scale)
    if on_overflow == "raise":
        _refuse_overflow(t, scale, found)
    return q, trust_scale(found)


def _rows_of(t: torch.Tensor) -> int:
    return t.shape[:-1].numel()


def _refuse_overflow(t: torch.Tensor, scale: torch.Tensor | None, needed: torch.Tensor) -> None:
    if not bool(t.isfinite().all()):
        raise NumericalOverflowError("t: holds NaN or Inf, expected finite values")
    if scale is not None and bool((too_small := needed > scale).any()):
        at = int(too_small.flatten().nonzero()[0])
        raise NumericalOverflowError(
            f"scale={scale.flatten()[at].item()!r}: too small for t, whose largest magnitude "
            f"needs a scale of {needed.flatten()[at].item()!r}"
        )


def dequantize_fp8(
    q: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``q * scale``, rounded to ``out_dtype``; inverse of quantize_fp8 up to rounding.

    Raises:
        UnsupportedDtypeError: ``q`` is not float8_e4m3fn, or ``out_dtype`` is not floating.
        ShapeMismatchError: ``scale`` has neither one element nor one per row of ``q``.
        NumericalOverflowError: a value of ``scale``, as in quantize_fp8.
    """
    check_arguments("dequantize_fp8", q, scale, out_dtype)
    check_scale_values("scale", scale)
    return _ops.dequantize_fp8(q, scale, out_dtype)


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    on_overflow: str = "adjust",
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
        on_overflow: of a floating operand with a given scale; see quantize_fp8.

    Raises:
        ShapeMismatchError: the shapes do not fit, or K or N is 0.
        UnsupportedDtypeError: an operand's dtype, or ``out_dtype``.
        UnsupportedDeviceError: operands on different devices.
        SchemeError: unknown ``on_overflow``.
        NumericalOverflowError: a value of a scale, or of an operand, as in quantize_fp8.
    """
    check_product(a, b, a_scale, b_scale, bias)
    check_choice("on_overflow", on_overflow, ON_OVERFLOW)
    check_scale_values("a_scale", a_scale)
    check_scale_values("b_scale", b_scale)
    if out_dtype is None:
        floating = [t.dtype for t in (a, b) if t.dtype != FP8]
        out_dtype = floating[0] if floating else torch.bfloat16
    with torch.no_grad():
        qa, sa = _quantized(a, a_scale, "token", on_overflow)
        qb, sb = _quantized(b.t(), b_scale, "channel", on_overflow)
        out = _ops.fp8_gemm(qa, qb, sa, sb, bias, out_dtype)
    if autograd.needs_grad(a, b, bias):
        # an FP8 operand takes part as the numbers that its codes stand for
        wide_a = a if a.dtype != FP8 else dequantize_fp8(qa, sa, out_dtype=out_dtype)
        wide_b = b if b.dtype != FP8 else dequantize_fp8(qb, sb, out_dtype=out_dtype).t()
        return autograd.FP8Product.apply(wide_a, wide_b, bias, out)
    return out


def _quantized(
    t: torch.Tensor, scale: torch.Tensor | None, strategy: str, on_overflow: str
) -> tuple[torch.Tensor, torch.Tensor]:
    # the kernels take one scale, or a dense column
    if scale is not None and scale.numel() > 1:
        scale = trust_scale(scale.reshape(-1, 1).contiguous())
    if t.dtype != FP8:
        return quantize_fp8(t, scale=scale, strategy=strategy, on_overflow=on_overflow)
    return t, torch.ones(1, device=t.device) if scale is None else scale


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
        [batch, sequence, hidden] in x.dtype. NaN and Inf propagate. Gradients are once
        differentiable: a second derivative raises RuntimeError.

    Raises:
        ShapeMismatchError: the shapes do not fit, or hidden is 0.
        UnsupportedDtypeError: a dtype that is not one of x's.
        UnsupportedDeviceError: tensors on different devices.
        SchemeError: ``eps`` is negative or not finite.
    """
    check_arguments("rmsnorm_rope", x, weight, cos, sin, eps)
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
        ShapeMismatchError: the shapes do not fit, or hidden or intermediate is 0.
        UnsupportedDtypeError: a dtype.
        UnsupportedDeviceError: tensors on different devices.
        SchemeError: unknown activation or activation_on, or only one of the scales.
        NumericalOverflowError: a value of a scale, as in quantize_fp8.

    Gradients reach x also where the weights are FP8: these take part as the numbers that they
    stand for. They are once differentiable: a second derivative raises RuntimeError.
    """
    options = (activation, activation_on)
    check_arguments("gated_mlp", x, gate_weight, up_weight, gate_scale, up_scale, *options)
    check_scale_values("gate_scale", gate_scale)
    check_scale_values("up_scale", up_scale)
    if not autograd.needs_grad(x, gate_weight, up_weight):
        return _ops.gated_mlp(x, gate_weight, up_weight, gate_scale, up_scale, *options)
    if gate_scale is None or up_scale is None:
        return autograd.GatedMLP.apply(x, gate_weight, up_weight, *options, None)
    with torch.no_grad():
        out = _ops.gated_mlp(x, gate_weight, up_weight, gate_scale, up_scale, *options)
        wide_gate = _ops.dequantize_fp8(gate_weight, gate_scale, x.dtype)
        wide_up = _ops.dequantize_fp8(up_weight, up_scale, x.dtype)
    return autograd.GatedMLP.apply(x, wide_gate, wide_up, *options, out)
