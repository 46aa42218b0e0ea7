# SPDX-License-Identifier: MIT
"""Decoder layers in which a norm or activation and the FP8 quantisation after it are one operator.

Norm and activation ask the projection that reads their output which quantised form it takes
(``get_input_quant_key``, which hides it for LoRA) and hand that over; any other projection gets
the output of vLLM's own norm or activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym
from vllm.model_executor.models.gpt_oss import TransformerBlock
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.mistral import MistralDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.op import direct
from oss_fused.layers.vllm.dense_mlp import gated_mlp, mlp_and_next_norm, runs_next_norm
from oss_fused.layers.vllm.experts.block import joins, norm_experts_norm
from oss_fused.layers.vllm.experts.choice import norm_and_experts
from oss_fused.layers.vllm.following import Following
from oss_fused.layers.vllm.linear import LevelledActivation, bf16_rows_of

_add_rms_norm_quant = direct("add_rms_norm_quant")


def norm_for(
    norm: RMSNorm, reader: nn.Module, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
    """``norm(x + residual)`` in the form that ``reader`` takes, and the new residual.

    Args:
        norm: the layer's RMSNorm.
        reader: the linear layer that reads the result.
        x: [T, H].
        residual: [T, H], None in the first layer.
    """
    key = get_input_quant_key(reader)
    if key is None:
        return (norm(x), x) if residual is None else norm(x, residual)
    dynamic = key == kFp8DynamicTokenSym
    codes, scale, added, _, levels = _add_rms_norm_quant(
        x,
        residual,
        norm.weight,
        norm.variance_epsilon,
        None if dynamic else reader.input_scale,
        False,
        True,
        bf16_rows_of(reader),
    )
    quantised = LevelledActivation(codes, scale, x.dtype, x.shape, key, levels)
    return quantised, x if residual is None else added


class _FusedNorms:
    """``forward`` of Llama-style layers: attention and MLP, a norm before each."""

    # the next layer's norm, where this one's MLP may run it (dense_mlp.py)
    following: Following | None = None

    def forward(
        self: Any,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | QuantizedActivation,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
        """Attention and MLP; the result or, of ``mlp_norm``, the next layer's input."""
        x = hidden_states
        if not isinstance(x, QuantizedActivation):
            x, residual = norm_for(self.input_layernorm, self.self_attn.qkv_proj, x, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=x)
        x, residual = norm_for(
            self.post_attention_layernorm, self.mlp.gate_up_proj, hidden_states, residual
        )
        if runs_next_norm(self, x):
            return mlp_and_next_norm(self, x, residual)
        return gated_mlp(self.mlp, x), residual


class OssLlamaDecoderLayer(_FusedNorms, LlamaDecoderLayer):
    """Llama's layer."""


class OssQwen2DecoderLayer(_FusedNorms, Qwen2DecoderLayer):
    """Qwen2's layer."""


class OssQwen3DecoderLayer(_FusedNorms, Qwen3DecoderLayer):
    """Qwen3's layer."""


class OssMistralDecoderLayer(_FusedNorms, MistralDecoderLayer):
    """Mistral's layer; one with time-conditioned norms runs as in vLLM."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | QuantizedActivation,
        residual: torch.Tensor | None,
        t_cond: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
        """Attention and MLP, a norm before each."""
        if self.ada_rms_norm_t_cond is not None:
            return MistralDecoderLayer.forward(self, positions, hidden_states, residual, t_cond)
        return super().forward(positions, hidden_states, residual)


class OssTransformerBlock(TransformerBlock):
    """gpt-oss's block; the norm before the experts stays bf16, which the router needs."""

    # the next block's norm, where this one's experts may run it (experts/block.py)
    following: Following | None = None

    def forward(
        self,
        hidden_states: torch.Tensor | QuantizedActivation,
        positions: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor | QuantizedActivation, torch.Tensor]:
        """Attention and experts, a norm before each, or after the experts for the next block."""
        x = hidden_states
        if not isinstance(x, QuantizedActivation):
            x, residual = norm_for(self.input_layernorm, self.attn.qkv_proj, x, residual)
        hidden_states = self.attn(x, positions)
        assert residual is not None
        if joins(self, hidden_states):
            return norm_experts_norm(self, hidden_states, residual)
        return norm_and_experts(self.post_attention_layernorm, self.mlp, hidden_states, residual)


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    LlamaDecoderLayer: OssLlamaDecoderLayer,
    MistralDecoderLayer: OssMistralDecoderLayer,
    Qwen2DecoderLayer: OssQwen2DecoderLayer,
    Qwen3DecoderLayer: OssQwen3DecoderLayer,
    TransformerBlock: OssTransformerBlock,
}

# layers with a dense MLP, which may run the next one's norm
DENSE_LAYERS = (
    OssLlamaDecoderLayer,
    OssMistralDecoderLayer,
    OssQwen2DecoderLayer,
    OssQwen3DecoderLayer,
)


def fuse_decoder_layers(layers: Iterable[nn.Module]) -> None:
    """Give each layer that has a fused form its class; the others stay as they are.

    A built layer changes its class rather than being built again: vLLM's model classes name
    their layer classes in different ways, and the forms differ in ``forward`` alone.
    """
    for layer in layers:
        fused = _FUSED.get(type(layer))
        if fused is not None:
            layer.__class__ = fused
