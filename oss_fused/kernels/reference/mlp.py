# SPDX-License-Identifier: MIT
"""Gated activations and the gated MLP, step by step in float32."""

from __future__ import annotations

import torch

from oss_fused.kernels.reference.quantize import quantize_rows
from oss_fused.kernels.validation import check_act_quant, check_gated_mlp


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """SiLU, GELU (erf form) or GELU (tanh form) of a float32 tensor."""
    if activation == "silu":
        return x * torch.sigmoid(x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(x, approximate=approximate)


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``; see ops/mlp.py."""
    check_act_quant(x, activation, scale)
    gate, up = x.chunk(2, dim=-1)
    # rounded where the unfused activation and product round
    product = activate(gate.float(), activation).to(x.dtype) * up
    q, out_scale = quantize_rows(product.reshape(-1, up.shape[-1]), scale)
    if scale is not None:
        return q.view(up.shape), scale.clone()
    return q.view(up.shape), out_scale.view(*up.shape[:-1], 1)


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
) -> torch.Tensor:
    """Both projections, activation and product; see ops/mlp.py for the contract."""
    check_gated_mlp(x, gate_weight, up_weight, gate_scale, up_scale, activation, activation_on)
    rows = x.reshape(-1, x.shape[-1])
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
