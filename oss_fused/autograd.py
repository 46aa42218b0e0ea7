# SPDX-License-Identifier: MIT
"""Analytic backward of the library's functions, used only where an input requires grad.

The gradients are computed in float32 (float64 for float64 inputs) and rounded to the inputs'
dtypes. FP8 quantisation counts as the identity (straight-through): ``fp8_gemm`` differentiates
the product of its unquantised operands.
"""

from __future__ import annotations

from typing import Any

import torch

import oss_fused.ops  # noqa: F401  (registers the operators)

_ops = torch.ops.oss_fused
# derivative of GELU's tanh form: sqrt(2 / pi) and the cubic coefficient
_TANH_SCALE = 0.7978845608028654
_TANH_CUBIC = 0.044715


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has to see this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


def rmsnorm_rope_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``fused_rmsnorm_rope`` for x [B, S, H] and weight [H].

    The rotation's transpose first, ``g cos - rotate_half(g sin)``, then with ``n = x r`` and
    ``r = rsqrt(mean(x^2) + eps)``: ``dx = r (g w - n mean(g w n))``, ``dw = sum(g n)``.
    """
    wide, heads = _wide(grad), (*x.shape[:-1], x.shape[-1] // cos.shape[-1], cos.shape[-1])
    g = wide.reshape(heads)
    left, right = (g * _wide(sin)[:, None, :]).chunk(2, dim=-1)
    g = (g * _wide(cos)[:, None, :] + torch.cat([right, -left], dim=-1)).reshape(x.shape)
    x_wide = _wide(x)
    r = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = x_wide * r
    weighted = g * _wide(weight)
    dx = r * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    dw = (g * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def activation_and_slope(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and derivative of SiLU, GELU (erf form) or GELU (tanh form)."""
    if activation == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if activation == "gelu":
        cdf = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        density = torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
        return x * cdf, cdf + x * density
    t = torch.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x.pow(3)))
    inner = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def gated_mlp_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
    activation_on: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``fused_gated_mlp`` for x [..., H] and the weights [I, H].

    The projections are recomputed rather than kept: two products instead of 2 I values a token.
    """
    rows = _wide(x).reshape(-1, x.shape[-1])
    g = _wide(grad).reshape(rows.shape[0], -1)
    gate_w, up_w = _wide(gate_weight), _wide(up_weight)
    gate, up = rows @ gate_w.t(), rows @ up_w.t()
    if activation_on == "up":
        value, slope = activation_and_slope(up, activation)
        d_gate, d_up = g * value, g * gate * slope
    else:
        value, slope = activation_and_slope(gate, activation)
        d_gate, d_up = g * up * slope, g * value
    dx = d_gate @ gate_w + d_up @ up_w
    return (
        dx.reshape(x.shape).to(x.dtype),
        (d_gate.t() @ rows).to(gate_weight.dtype),
        (d_up.t() @ rows).to(up_weight.dtype),
    )


class RMSNormRoPE(torch.autograd.Function):
    """``oss_fused::rmsnorm_rope`` with gradients for x and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Run the fused kernel and keep its inputs."""
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return _ops.rmsnorm_rope(x, weight, cos, sin, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and weight; cos and sin are constants of the position."""
        x, weight, cos, sin = ctx.saved_tensors
        dx, dw = rmsnorm_rope_backward(grad, x, weight, cos, sin, ctx.eps)
        return dx, dw, None, None, None


class GatedMLP(torch.autograd.Function):
    """``oss_fused::gated_mlp`` with gradients for x and both weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        activation: str,
        activation_on: str,
    ) -> torch.Tensor:
        """Run the fused kernel and keep its inputs."""
        ctx.save_for_backward(x, gate_weight, up_weight)
        ctx.options = (activation, activation_on)
        return _ops.gated_mlp(x, gate_weight, up_weight, None, None, activation, activation_on)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the weights."""
        return (*gated_mlp_backward(grad, *ctx.saved_tensors, *ctx.options), None, None)


class FP8Product(torch.autograd.Function):
    """A quantised product whose backward is that of ``a @ b + bias`` in the operands' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        product: torch.Tensor,
    ) -> torch.Tensor:
        """Give the precomputed ``product`` [M, N] its place in the graph of a [M, K], b [K, N]."""
        ctx.save_for_backward(a, b)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """``grad @ b.T``, ``a.T @ grad`` and the column sums."""
        a, b = ctx.saved_tensors
        da = (grad.to(b.dtype) @ b.t()).to(a.dtype) if ctx.needs_input_grad[0] else None
        db = (a.t() @ grad.to(a.dtype)).to(b.dtype) if ctx.needs_input_grad[1] else None
        d_bias = grad.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return da, db, d_bias, None
