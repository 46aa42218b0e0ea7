# SPDX-License-Identifier: MIT
"""Gated activations and the gated MLP, step by step in float32."""

from __future__ import annotations

import torch

from oss_fused.kernels.checks import flat_rows
from oss_fused.kernels.gemm.reference import fp8_gemm
from oss_fused.kernels.norm.reference import add_rms_norm_quant
from oss_fused.kernels.quantize.reference import quantize_rows

# derivative of GELU's tanh form: sqrt(2 / pi) and the cubic coefficient
_TANH_SCALE = 0.7978845608028654
_TANH_CUBIC = 0.044715


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """SiLU, GELU (erf form) or GELU (tanh form) of a float32 tensor."""
    if activation == "silu":
        return x * torch.sigmoid(x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(x, approximate=approximate)


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``; see kernels/mlp."""
    product = gated(x, activation)
    q, out_scale = quantize_rows(flat_rows(product), scale)
    if scale is not None:
        return q.view(product.shape), scale.clone()
    return q.view(product.shape), out_scale.view(*product.shape[:-1], 1)


def gate_up_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    activation: str,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of the activated product of ``x`` and a gate_up weight; see kernels/mlp."""
    gate_up = fp8_gemm(x, weight, x_scale, weight_scale, None, out_dtype)
    return act_mul_quant(gate_up, activation, None)


def mlp_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """Both products of a gated MLP, and the activation between them; see kernels/mlp."""
    q, scale = gate_up_quant(x, weight, x_scale, weight_scale, out_dtype, activation)
    return fp8_gemm(q, down_weight, scale, down_scale, bias, out_dtype)


def mlp_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    activation: str,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mlp_fp8``, then ``add_rms_norm_quant``; see kernels/mlp."""
    down = (down_weight, down_scale, bias, residual.dtype, activation)
    out = mlp_fp8(x, weight, x_scale, weight_scale, *down)
    norm = (gain, eps, scale, False, prefetch_weights, bf16_rows)
    q, out_scale, hidden, _, levels = add_rms_norm_quant(out, residual, *norm)
    return q, out_scale, hidden, levels


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x[..., :I]) * x[..., I:]``, rounded where the unfused operators round."""
    gate, up = x.chunk(2, dim=-1)
    return activate(gate.float(), activation).to(x.dtype) * up


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
) -> torch.Tensor:
    """Both projections, activation and product; see kernels/mlp for the contract."""
    rows = flat_rows(x)
    if gate_scale is None or up_scale is None:
        x32 = rows.float()
        gate, up = x32 @ gate_weight.float().t(), x32 @ up_weight.float().t()
    else:
        q, scale = quantize_rows(rows, None)
        codes = q.float()
        gate = (codes @ gate_weight.float().t()) * scale * gate_scale.view(1, -1)
        up = (codes @ up_weight.float().t()) * scale * up_scale.view(1, -1)
    if activation_on == "up":
        out = gate * activate(up, activation)
    else:
        out = activate(gate, activation) * up
    return out.to(x.dtype).view(*x.shape[:-1], gate_weight.shape[0])


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


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
    rows, g = flat_rows(_wide(x)), flat_rows(_wide(grad))
    gate, up = rows @ _wide(gate_weight).t(), rows @ _wide(up_weight).t()
    if activation_on == "up":
        value, slope = activation_and_slope(up, activation)
        d_gate, d_up = g * value, g * gate * slope
    else:
        value, slope = activation_and_slope(gate, activation)
        d_gate, d_up = g * up * slope, g * value
    return d_gate.to(x.dtype), d_up.to(x.dtype)
