# SPDX-License-Identifier: MIT
"""Routing in float32: top-k experts of a token and their weights."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.reference.norm import rms_norm
from oss_fused.kernels.validation import (
    FLOAT_DTYPES,
    check_dtype,
    check_norm,
    check_same_device,
    check_shape,
)


def check_router_logits(router_logits: torch.Tensor, top_k: int) -> None:
    """Raise unless ``router_logits`` is a float [T, E] with ``1 <= top_k <= E``."""
    check_dtype("router_logits", router_logits, FLOAT_DTYPES)
    if router_logits.dim() != 2:
        raise ShapeMismatchError(
            f"router_logits.shape={tuple(router_logits.shape)}: expected [T, E]"
        )
    if not 1 <= top_k <= router_logits.shape[1]:
        raise ShapeMismatchError(f"top_k={top_k}: expected 1..{router_logits.shape[1]}")


def moe_route(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the top-k experts; see ops/moe.py for the contract."""
    check_router_logits(router_logits, top_k)
    logits = router_logits.float()
    # stable: of equal logits the lower expert comes first; NaN counts as the largest
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.gather(1, ids)
    if renormalize:
        weights = torch.softmax(chosen, dim=-1)
    else:
        weights = torch.softmax(logits, dim=-1).gather(1, ids)
    return weights, ids.int()


def check_norm_router(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
) -> None:
    """Check the arguments of ``add_rms_norm_router``."""
    check_norm(x, residual, weight, None)
    for name, tensor in (("x", x), ("gate", gate)):
        if tensor.dim() != 2:
            raise ShapeMismatchError(f"{name}.shape={tuple(tensor.shape)}: expected a matrix")
    check_dtype("gate", gate, (x.dtype,))
    check_shape("gate", gate, (gate.shape[0], x.shape[1]))
    if gate_bias is not None:
        check_dtype("gate_bias", gate_bias, (x.dtype,))
        check_shape("gate_bias", gate_bias, (gate.shape[0],))
    check_same_device(x, gate=gate, gate_bias=gate_bias)


def add_rms_norm_router(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed rows, new residual and router logits; see ops/moe.py for the contract."""
    check_norm_router(x, residual, weight, gate, gate_bias)
    hidden = x.clone() if residual is None else x + residual
    normed = rms_norm(hidden, weight, eps)
    logits = normed.float() @ gate.float().T
    if gate_bias is not None:
        logits += gate_bias.float()
    return normed, hidden, logits.to(x.dtype)
