# SPDX-License-Identifier: MIT
"""Routing and expert layers in float32 arithmetic, with the kernels' rounding points."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.moe.mxfp4 import moe_unpack_mxfp4
from oss_fused.kernels.norm.reference import add_rms_norm_quant, rms_norm
from oss_fused.kernels.quantize.reference import quantize_rows

# "swigluoai" is gpt-oss's clamped SwiGLU: gate * sigmoid(1.702 gate) * (up + 1)
ACTIVATIONS = ("swigluoai", "silu")
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
# |gate * sigmoid(1.702 gate) * (up + 1)| <= 7 * 8, and 56 * 8 is e4m3's largest number
SWIGLU_SCALE = 8.0

# weights of one expert -> float32 [2I, H] (rows gate, up, gate, up, ...) and [H, I]
ExpertWeights = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
# values and x's dtype -> float32 values as the product sees them
_Rounding = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


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


def moe_mxfp4(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    activation: str = "swigluoai",
    fp8_min_tokens: int = -1,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """MXFP4 experts; see kernels/moe for the contract."""

    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            moe_unpack_mxfp4(w13[expert], w13_scale[expert], gate_up=True),
            moe_unpack_mxfp4(w2[expert], w2_scale[expert], gate_up=False),
        )

    fp8 = uses_fp8_activations(x.shape[0], activation, fp8_min_tokens)
    topk_weights, ids = _routed(router_logits, top_k, renormalize, expert_map)
    biases = (w13_bias, w2_bias)
    return run_experts(
        x, topk_weights, ids, weights, biases, activation, "static" if fp8 else "keep"
    )


def norm_moe_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    fp8_min_tokens: int,
    next_weight: torch.Tensor,
    next_eps: float,
    next_scale: torch.Tensor | None,
    arrivals: torch.Tensor,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts between two norms; see kernels/moe for the contract."""
    normed, residual, logits = add_rms_norm_router(x, residual, weight, eps, gate, gate_bias)
    packed = (w13, w13_scale, w13_bias, w2, w2_scale, w2_bias)
    out = moe_mxfp4(normed, logits, *packed, top_k, renormalize, None, "swigluoai", fp8_min_tokens)
    q, scale, added, _, levels = add_rms_norm_quant(
        out, residual, next_weight, next_eps, next_scale, False, False, bf16_rows
    )
    return q, scale, added, levels


def moe_fp8(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    activation: str = "swigluoai",
) -> torch.Tensor:
    """FP8 experts; see kernels/moe for the contract."""

    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            w13[expert].float() * w13_scale[expert],
            w2[expert].float() * w2_scale[expert],
        )

    topk_weights, ids = _routed(router_logits, top_k, renormalize, expert_map)
    return run_experts(x, topk_weights, ids, weights, (w13_bias, w2_bias), activation, "rows")


def uses_fp8_activations(tokens: int, activation: str, fp8_min_tokens: int) -> bool:
    """Whether a batch of ``tokens`` runs with FP8 activations (bounded activations only)."""
    return activation == "swigluoai" and 0 <= fp8_min_tokens <= tokens


def _routed(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    topk_weights, ids = moe_route(router_logits, top_k, renormalize)
    return topk_weights, ids if expert_map is None else expert_map[ids.long()]


def run_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    biases: Biases,
    activation: str,
    rounding: str,
) -> torch.Tensor:
    """Weighted sum of the experts' outputs, without routing and checks.

    Args:
        x: [T, H] float.
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k], of this rank's experts; negative for experts of other ranks.
        weights: one expert's, see ``ExpertWeights``.
        biases: [E, 2I] and [E, H], each may be None.
        activation: one of ACTIVATIONS.
        rounding: of both products' inputs: "keep" x's dtype, FP8 "rows" (a scale per token), or
            "static" (rows for x, the fixed scale 1/8 for the intermediate).

    Returns:
        [T, H] in x's dtype, summed in float32.
    """
    of_x, of_inner = _ROUNDINGS[rounding]
    x32 = of_x(x, x.dtype)
    slots = torch.zeros(*topk_ids.shape, x.shape[1], device=x.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        tokens, slot = (topk_ids == expert).nonzero(as_tuple=True)
        w13, w2 = weights(expert)
        hidden = x32[tokens] @ w13.T
        if biases[0] is not None:
            hidden += biases[0][expert].float()
        y = of_inner(_activate(hidden, activation), x.dtype) @ w2.T
        if biases[1] is not None:
            y += biases[1][expert].float()
        slots[tokens, slot] = y * topk_weights[tokens, slot, None]
    out = torch.zeros_like(x32)
    # one slot after the other, as the kernel adds them
    for slot_index in range(topk_ids.shape[1]):
        out += slots[:, slot_index]
    return out.to(x.dtype)


def _activate(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = hidden[:, 0::2], hidden[:, 1::2]
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def _keep(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()


def _fp8_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scale = quantize_rows(values.to(dtype), None)
    return codes.float() * scale


def _fp8_static(act: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    return (act * SWIGLU_SCALE).to(FP8).float() / SWIGLU_SCALE


_ROUNDINGS: dict[str, tuple[_Rounding, _Rounding]] = {
    "keep": (_keep, _keep),
    "rows": (_fp8_rows, _fp8_rows),
    "static": (_fp8_rows, _fp8_static),
}
