# SPDX-License-Identifier: MIT
"""gpt-oss's experts with the norms around them as one operator, ``norm_moe_norm``.

The norm behind the experts is the next layer's, so a block hands that layer its quantised input.
This holds between blocks of one rank whose experts no other rank shares; elsewhere a block ends
with the experts' sum, as in vLLM (choice.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.moe.config import SCRATCH, router_part
from oss_fused.layers.vllm.experts.choice import router_joins_norm
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.following import tell_following
from oss_fused.layers.vllm.linear import LevelledActivation, bf16_rows_of
from oss_fused.layers.vllm.warmup import warm_batches
from oss_fused.quant.settings import ServingOptions


def join_blocks(
    model: Any, kind: type[nn.Module], vllm_config: VllmConfig, options: ServingOptions
) -> None:
    """Tell each block of class ``kind`` which one follows, where its experts may run that norm.

    Not with the monitor, which looks at the experts' input.
    """
    if options.monitor_every:
        return
    if vllm_config.aux_output_config.enable_return_routed_experts:
        return
    found = tell_following(model.layers, (kind,), "attn")
    if not found:
        return
    device = next(model.parameters()).device
    # one buffer for all layers: their launches follow one another on one stream
    arrivals = torch.zeros(SCRATCH, dtype=torch.int32, device=device)
    for block in found:
        # sleep at level 2 keeps buffers alone
        block.register_buffer("oss_arrivals", arrivals, persistent=False)


def joins(block: Any, x: torch.Tensor) -> bool:
    """Whether ``norm_moe_norm`` runs the experts of ``block``, whose input is like ``x`` [T, H]."""
    following, mlp = block.following, block.mlp
    return (
        following is not None
        and x.is_cuda
        and router_joins_norm(mlp, x.dtype)
        and get_input_quant_key(following.reader) is not None
        and _is_alone(mlp.experts.routed_experts, x.shape[1])
    )


def _is_alone(experts: Any, hidden: int) -> bool:
    """Whether the native kernel runs ``experts``, and no other rank has a share of them."""
    method = experts.quant_method
    if type(method) is not OssMxfp4MoEMethod:
        return False
    parallel = method.moe.moe_parallel_config
    ranks = parallel.tp_size, parallel.dp_size, parallel.ep_size, parallel.pcp_size
    return ranks == (1, 1, 1, 1) and experts.w2_weight.shape[1] == hidden


def norm_experts_norm(
    block: Any, x: torch.Tensor, residual: torch.Tensor
) -> tuple[QuantizedActivation, torch.Tensor]:
    """The next block's normed and quantised input, and the new residual.

    Args:
        block: of gpt-oss, for which ``joins`` holds.
        x: [T, H], what attention adds to the residual.
        residual: [T, H].
    """
    norm, router, experts = block.post_attention_layernorm, block.mlp.router, _experts(block)
    following, key = block.following, get_input_quant_key(block.following.reader)
    codes, scale, residual, levels = torch.ops.oss_fused.norm_moe_norm(
        x,
        residual,
        norm.weight,
        norm.variance_epsilon,
        router.weight,
        router.bias,
        experts.w13_weight,
        experts.w13_weight_scale,
        experts.w13_bias,
        experts.w2_weight,
        experts.w2_weight_scale,
        experts.w2_bias,
        experts.top_k,
        experts.renormalize,
        experts.quant_method.fp8_min_tokens,
        following.norm.weight,
        following.norm.variance_epsilon,
        None if key == kFp8DynamicTokenSym else following.reader.input_scale,
        block.oss_arrivals,
        True,
        bf16_rows_of(block.following.reader),
    )
    return LevelledActivation(codes, scale, x.dtype, x.shape, key, levels), residual


def _experts(block: Any) -> Any:
    return block.mlp.experts.routed_experts


def warm_block(block: Any, limit: int) -> None:
    """Compile what ``norm_experts_norm`` runs, for up to ``limit`` tokens."""
    gain = block.post_attention_layernorm.weight
    if not joins(block, gain.new_empty(0, gain.shape[0])):
        return
    experts = _experts(block)

    def run(tokens: int) -> None:
        x = torch.zeros(tokens, gain.shape[0], dtype=gain.dtype, device=gain.device)
        # routed to many experts, as real tokens are
        norm_experts_norm(block, x, torch.randn_like(x))

    def variant(tokens: int) -> tuple[object, ...]:
        # all experts are here
        of_experts = experts.quant_method.variant(experts, tokens)
        return (
            tokens == 1,
            router_part(tokens, len(block.mlp.router.weight)),
            has_two_levels(tokens, most),
            *of_experts,
        )

    most = bf16_rows_of(block.following.reader)
    shape = tuple(experts.w13_weight.shape)
    key = ("block", shape, experts.top_k, most, gain.dtype, gain.device)
    warm_batches(key, limit, functools.cache(variant), run)
