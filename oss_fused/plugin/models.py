# SPDX-License-Identifier: MIT
"""Model classes: vLLM's own, changed only where the quantisation is oss_fp8.

- Layers: norms hand quantised activations to the projections (decoder.py), RoPE and cache write
  are one kernel (rope_attention.py), attention is native (attention.py). The options
  fused_layers=false and attention_kernels="vllm" leave these out.
- Steps: model_state.py and CUDA graphs of the head, unless short_step=false; the monitor.
- Weights: gpt-oss gets a quantised lm_head and loads every layout of experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import (
    default_weight_loader,
    remap_moe_expert_weights,
)
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import is_pp_missing_parameter

from oss_fused.layers.vllm.all_reduce import adopt_all_reduce
from oss_fused.layers.vllm.attention import adopt_attention
from oss_fused.layers.vllm.decoder import (
    DENSE_LAYERS,
    OssTransformerBlock,
    fuse_decoder_layers,
)
from oss_fused.layers.vllm.dense_mlp import join_mlps, warm_mlp
from oss_fused.layers.vllm.experts.block import join_blocks, warm_block
from oss_fused.layers.vllm.experts.choice import warm_router
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.lm_head import HeadGraphs
from oss_fused.layers.vllm.rope_attention import fuse_rope
from oss_fused.layers.vllm.warmup import collect, finish, max_tokens
from oss_fused.plugin.config import OssFp8Config
from oss_fused.plugin.last_layer import mark_last_layer
from oss_fused.plugin.monitor import watch as monitor
from oss_fused.plugin.options import serving_options
from oss_fused.quant.settings import ServingOptions


class _BeforeLayers(QuantizeMethodBase):
    """Makes vLLM tell a model that it is loaded, before any layer is processed."""

    requires_device_loading = False
    supports_pre_processed_weights = True

    def create_weights(self, layer: nn.Module, *args: Any, **extra: Any) -> None:
        """A model has no weights of its own."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Never called: a model is no layer.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Collect kernels of all layers, to compile them side by side."""
        if layer.is_outermost and all(each.is_cuda for each in layer.parameters()):
            collect()


class _OssModel(nn.Module):
    """What the classes below share; first in the bases, before vLLM's class."""

    config: Any
    model: Any
    options: ServingOptions
    # no part of another model, and no draft model beside one
    is_outermost = False
    # attention of the last layer, where that layer can do with a step's sampled rows
    last_attention: str | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the model as vLLM does; change it if its quantisation is oss_fp8."""
        is_oss_fp8 = isinstance(vllm_config.quant_config, OssFp8Config)
        if is_oss_fp8:
            vllm_config.quant_config.feeds_tied_head = True
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._is_oss_fp8 = is_oss_fp8
        self.head_graphs = HeadGraphs()
        if self._is_oss_fp8:
            self.quant_method = _BeforeLayers()
            self.is_outermost = not prefix
            self._adopt(vllm_config)
            vllm_config.quant_config.check_ignore()

    def _adopt(self, vllm_config: VllmConfig) -> None:
        options = self.options = vllm_config.quant_config.settings.serving
        if options.fused_layers:
            fuse_decoder_layers(self.model.layers)
            join_blocks(self.model, OssTransformerBlock, vllm_config, options)
            if self.is_outermost:
                # vLLM tells no part of another model when to warm up
                join_mlps(self.model, DENSE_LAYERS, vllm_config, options)
        if options.attention_kernels == "auto":
            adopt_attention(self.model, vllm_config)
        # a draft model, whose options are the defaults, sums with the served model's communicator
        if serving_options(vllm_config).all_reduce_kernels == "auto":
            adopt_all_reduce(vllm_config)
        if options.fused_layers:
            fuse_rope(self.model, vllm_config)
        if options.short_step and vllm_config.use_v2_model_runner:
            # vLLM's other model runner has no such state
            from oss_fused.plugin.model_state import OssModelState, brings_state

            if brings_state(self.model):
                self.get_model_state_cls = lambda: OssModelState
                self.last_attention = mark_last_layer(self.model, vllm_config, options)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] of hidden states [T, H]."""
        return self.head_graphs(self.run_head, hidden_states)

    def run_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The head, operator by operator."""
        return super().compute_logits(hidden_states)  # type: ignore[misc]

    def _feed_tied_head(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Load the embedding a second time, into a head that is tied to it but quantised."""
        method = getattr(getattr(self, "lm_head", None), "quant_method", None)
        tied = isinstance(method, OssFp8LinearMethod) and method.tied
        for name, weight in weights:
            yield name, weight
            if tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", weight

    def process_weights_after_loading(self) -> None:
        """Compile routers and blocks, and start the monitor if it is on.

        vLLM calls this when every layer is ready.
        """
        if self._is_oss_fp8:
            for block in self.model.layers:
                if type(block) is OssTransformerBlock:
                    warm_router(block.post_attention_layernorm, block.mlp, max_tokens())
                    warm_block(block, max_tokens())
                elif type(block) in DENSE_LAYERS:
                    warm_mlp(block, max_tokens())
            finish()
            monitor.install(self, get_current_vllm_config(), self.options)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all weights or a part; a load may take several calls. Returns parameters' names."""
        if self._is_oss_fp8:
            weights = self._feed_tied_head(weights)
        return super().load_weights(weights)  # type: ignore[misc]


class OssLlamaForCausalLM(_OssModel, LlamaForCausalLM):
    """Llama, with norms fused into quantisation."""


class OssMistralForCausalLM(_OssModel, MistralForCausalLM):
    """Mistral, with norms fused into quantisation."""


class OssQwen2ForCausalLM(_OssModel, Qwen2ForCausalLM):
    """Qwen2, with norms fused into quantisation."""


class OssQwen3ForCausalLM(_OssModel, Qwen3ForCausalLM):
    """Qwen3, with norms fused into quantisation."""


class OssGptOssModel(GptOssModel):
    """The decoder of gpt-oss with a loader for every layout of experts.

    vLLM picks its loader by the checkpoint's quant_method and copies some tensors past their
    ``weight_loader``; here each parameter's own loader does the work, so that tensor and expert
    parallelism and reloading work for all layouts.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``weights`` (names as vLLM's mapper leaves them); returns the parameters' names."""
        params = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, weight in remap_moe_expert_weights(weights, params):
            if is_pp_missing_parameter(name, self):
                continue
            if self._try_load_streamed_expert(name, weight, params, loaded):
                continue
            name = self._load_one(name, weight, params)
            if name:
                loaded.add(name)
        return loaded

    def _maybe_add_hidden_state(
        self,
        aux_hidden_states: list[torch.Tensor],
        layer_idx: int,
        hidden_states: torch.Tensor | QuantizedActivation,
        residual: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Keep what a draft model reads: the hidden state after ``layer_idx`` layers.

        A block that ran the next one's norm (experts/block.py) has added its output to the
        residual.
        """
        if not isinstance(hidden_states, QuantizedActivation):
            return super()._maybe_add_hidden_state(
                aux_hidden_states, layer_idx, hidden_states, residual
            )
        if layer_idx in self.aux_hidden_state_layers:
            assert residual is not None
            aux_hidden_states.append(residual)
        return aux_hidden_states

    def _load_one(self, name: str, weight: torch.Tensor, params: dict[str, Any]) -> str | None:
        for part in ("q", "k", "v"):
            fused = name.replace(f".{part}_proj.", ".qkv_proj.")
            if fused != name and fused in params:
                params[fused].weight_loader(params[fused], weight, part)
                return fused
        if name not in params:
            return None
        param = params[name]
        loader = getattr(param, "weight_loader", default_weight_loader)
        if ".experts.routed_experts." in name:
            loader(param, weight, weight_name=name)
        else:
            loader(param, weight)
        return name


def take_sinks(model: nn.Module) -> None:
    """Load the attention sinks of ``model`` with load_sinks.

    vLLM takes a rank's heads in the model's load_weights (0.32) or in a loader of the parameter
    (0.33); with ours and that one they would be taken twice.
    """
    for name, param in model.named_parameters():
        if name.endswith(".sinks"):
            param.weight_loader = load_sinks  # type: ignore[attr-defined]


def load_sinks(param: torch.Tensor, weight: torch.Tensor) -> None:
    """Load this rank's heads of the attention sinks ``weight`` of all heads, [heads]."""
    heads = weight.shape[0] // get_tensor_model_parallel_world_size()
    rank = get_tensor_model_parallel_rank()
    default_weight_loader(param, weight.narrow(0, rank * heads, heads))


class OssGptOssForCausalLM(_OssModel, GptOssForCausalLM):
    """gpt-oss, with a quantised head and a loader for every layout of experts."""

    def _adopt(self, vllm_config: VllmConfig) -> None:
        super()._adopt(vllm_config)
        # same layers, another load_weights: building a second decoder would register each
        # attention layer twice
        self.model.__class__ = OssGptOssModel
        take_sinks(self.model)
        # vLLM builds this head without the quantisation config
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix="lm_head",
        )
