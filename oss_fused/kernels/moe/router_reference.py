# SPDX-License-Identifier: MIT
"""Routing in float32: top-k experts of a token and their weights."""

from __future__ import annotations

import torch

from oss_fused.kernels.norm.reference import rms_norm


def moe_route(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the top-k experts; see kernels/moe for the contract."""
    logits = router_logits.float()
    # stable: of equal logits the lower expert comes first; NaN counts as the largest
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.gather(1, ids)
    if renormalize:
        weights = torch.softmax(chosen, dim=-1)
    else:
        weights = torch.softmax(logits, dim=-1).gather(1, ids)
    return weights, ids.int()


def add_rms_norm_router(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed rows, new residual and router logits; see kernels/moe for the contract."""
    hidden = x.clone() if residual is None else x + residual
    normed = rms_norm(hidden, weight, eps)
    logits = normed.float() @ gate.float().T
    if gate_bias is not None:
        logits += gate_bias.float()
    return normed, hidden, logits.to(x.dtype)
