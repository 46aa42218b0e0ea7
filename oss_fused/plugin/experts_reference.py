# SPDX-License-Identifier: MIT
"""Experts in PyTorch, for serving on a CPU.

One opaque operator: which expert gets which tokens depends on the data, and torch.compile
cannot trace that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import oss_fused.ops  # noqa: F401  registers torch.ops.oss_fused

# constants of gpt-oss's clamped SwiGLU, as in its modelling code
ALPHA = 1.702
LIMIT = 7.0


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, top_k] float32 and expert ids [T, top_k] of router logits [T, E]."""
    probabilities = torch.softmax(logits.float(), -1)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Activation of [T, 2I], which alternates gate and up: "silu" or gpt-oss's "swigluoai"."""
    gate, up = gate_up[..., 0::2].float(), gate_up[..., 1::2].float()
    if activation == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return ((up + 1) * gate * torch.sigmoid(ALPHA * gate)).to(gate_up.dtype)


@torch.library.custom_op("oss_fused::run_experts", mutates_args=())
def run_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Weighted sum of the experts' outputs.

    Args:
        x: [T, H].
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k]; negative for experts of other ranks.
        w13: [E, 2I, H] in x's dtype, or FP8 codes (float8_e4m3fn or their values in float32).
        w13_scale: [E, 2I, 1] float32 with FP8 codes, else None.
        w13_bias: [E, 2I] or None.
        w2: [E, H, I], like w13.
        w2_scale: [E, H, 1] or None.
        w2_bias: [E, H] or None.
        activation: "silu" or "swigluoai".

    Returns:
        [T, H] in x's dtype, summed in float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        tokens, slots = torch.where(topk_ids == expert)
        if not tokens.numel():
            continue
        hidden = _linear(x[tokens], w13, w13_scale, w13_bias, expert)
        down = _linear(gated(hidden, activation), w2, w2_scale, w2_bias, expert)
        out.index_add_(0, tokens, down.float() * topk_weights[tokens, slots].unsqueeze(-1))
    return out.to(x.dtype)


@run_experts.register_fake
def _(x: torch.Tensor, *args: torch.Tensor | str | None) -> torch.Tensor:
    return torch.empty_like(x)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    biases: torch.Tensor | None,
    expert: int,
) -> torch.Tensor:
    bias = None if biases is None else biases[expert]
    if scale is None:
        return F.linear(x, weight[expert], bias)
    return torch.ops.oss_fused.fp8_linear(x, weight[expert], scale[expert], None, bias)
