# SPDX-License-Identifier: MIT
"""Gradients in float32, or in float64 for float64 inputs; see ops/backward.py."""

from __future__ import annotations

import torch

# derivative of GELU's tanh form: sqrt(2 / pi) and the cubic coefficient
_TANH_SCALE = 0.7978845608028654
_TANH_CUBIC = 0.044715


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
    """Gradients of x and weight."""
    heads = (*x.shape[:-1], x.shape[-1] // cos.shape[-1], cos.shape[-1])
    g = _wide(grad).reshape(heads)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x @ gate_weight.T`` and ``x @ up_weight.T``."""
    rows = _wide(x).reshape(-1, x.shape[-1])
    g = _wide(grad).reshape(rows.shape[0], -1)
    gate, up = rows @ _wide(gate_weight).t(), rows @ _wide(up_weight).t()
    if activation_on == "up":
        value, slope = activation_and_slope(up, activation)
        d_gate, d_up = g * value, g * gate * slope
    else:
        value, slope = activation_and_slope(gate, activation)
        d_gate, d_up = g * up * slope, g * value
    return d_gate.to(x.dtype), d_up.to(x.dtype)
