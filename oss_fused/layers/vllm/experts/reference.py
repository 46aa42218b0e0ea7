# SPDX-License-Identifier: MIT
"""Experts on a CPU: the reference twins' arithmetic on weights that are unpacked once.

The operators ``moe_mxfp4`` and ``moe_fp8`` unpack every expert's weights in every call, which takes
100 times as long as the product of one token. vLLM's CPU kernels are not used: a CPU computes
what a GPU computes.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.moe import reference as moe


# an operator, because torch.compile cannot trace a choice that depends on the data
@torch.library.custom_op("oss_fused::run_experts", mutates_args=())
def _run_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_bias: torch.Tensor | None,
    activation: str,
    rounding: str,
) -> torch.Tensor:
    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return w13[expert].float(), w2[expert].float()

    biases = (w13_bias, w2_bias)
    return moe.run_experts(x, topk_weights, topk_ids, weights, biases, activation, rounding)


@_run_experts.register_fake
def _(x: torch.Tensor, *args: torch.Tensor | str | None) -> torch.Tensor:
    return torch.empty_like(x)


def run_routed(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    rounding: str,
) -> torch.Tensor:
    """Run a layer's experts on tokens that are routed already.

    Args:
        layer: with dense w13_weight [E, 2I, H] (rows gate, up, gate, up) and w2_weight [E, H, I].
        x: [T, H].
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k], of all ranks' experts.
        rounding: of activations, see ``kernels.moe.reference.run_experts``.

    Returns:
        [T, H], this rank's share of the sum.
    """
    if layer.expert_map is not None:
        topk_ids = layer.expert_map[topk_ids.long()]
    return _run_experts(
        x,
        topk_weights,
        topk_ids,
        layer.w13_weight,
        getattr(layer, "w13_bias", None),
        layer.w2_weight,
        getattr(layer, "w2_bias", None),
        layer.activation.value,
        rounding,
    )


def route_and_run(
    layer: RoutedExperts, x: torch.Tensor, router_logits: torch.Tensor, rounding: str
) -> torch.Tensor:
    """As ``run_routed``, with router_logits [T, E] of all ranks' experts."""
    weights, ids = torch.ops.oss_fused.moe_route(router_logits, layer.top_k, layer.renormalize)
    return run_routed(layer, x, weights, ids, rounding)
