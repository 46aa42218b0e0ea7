# SPDX-License-Identifier: MIT
"""Runs single decoder layers of a model whose weights stay on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from oss_fused.quant.experts import read_expert
from oss_fused.quant.formats import fake_quantize
from oss_fused.quant.scheme import QuantizationScheme
from oss_fused.quant.skeleton import ModelSkeleton

# masks take the square of a length
_CACHED_LENGTHS = 16


class _Recorder(nn.Module):
    """Takes a decoder layer's place to learn what arguments the model gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.arguments = arguments
        return hidden


class LayerRunner:
    """Layers of ``skeleton``, filled from its checkpoint in float32 one at a time."""

    def __init__(self, skeleton: ModelSkeleton, device: torch.device) -> None:
        """Run on ``device``."""
        self.skeleton, self.device = skeleton, device
        self.reader, self.config = skeleton.reader, skeleton.config
        model: Any = skeleton.model
        self.inner = model.model
        self._arguments: dict[int, list[dict[str, Any]]] = {}

    def embed(self, samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of the first layer, each [1, T, H], for token ids [T]."""
        embedding = self.reader.read("model.embed_tokens.weight")
        return [embedding[ids].float().unsqueeze(0) for ids in samples]

    def load(self, index: int) -> Any:
        """Decoder layer ``index`` with its weights."""
        layer = self.inner.layers[index]
        prefix = f"model.layers.{index}"
        state: dict[str, torch.Tensor] = {}
        for name in layer.state_dict():
            full = self.skeleton.stored_name(f"{prefix}.{name}")
            if full in self.reader:
                state[name] = self.reader.read(full).to(self.device).float()
                continue
            count, gated = self.skeleton.expert_count, self.skeleton.gated
            module, part = str(self.skeleton.experts_of(index)), name.rpartition(".")[2]
            for expert in range(count):
                matrix = read_expert(self.reader, module, part, expert, self.device, gated)
                if gated is None:
                    matrix = matrix.t()  # gpt-oss in transformers: inputs first
                if expert == 0:
                    state[name] = torch.empty(count, *matrix.shape, device=self.device)
                state[name][expert] = matrix
        layer.load_state_dict(state, assign=True)
        return layer.to(self.device)

    def drop(self, index: int) -> None:
        """Free the layer: weights, hooks, and what the hooks hold. It cannot be used again."""
        for module in self.inner.layers[index].modules():
            # a replaced ``forward`` refers to its module: only garbage collection frees the cycle
            module.__dict__.pop("forward", None)
        self.inner.layers[index] = nn.Identity()

    def linears(self, layer: Any, index: int) -> dict[str, nn.Linear]:
        """Full name -> linear of a loaded layer."""
        return {
            f"model.layers.{index}.{name}": module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        }

    def forward(
        self, layer: Any, index: int, hidden: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """Output [1, T, H] of a loaded layer; ``cache`` sees keys and values."""
        arguments = dict(self._layer_arguments(hidden.shape[1])[index])
        arguments["past_key_values"] = cache
        output = layer(hidden.to(self.device), **arguments)
        return output[0] if isinstance(output, tuple) else output

    def final_norm(self) -> Any:
        """The norm before lm_head, with its weight."""
        norm = self.inner.norm
        norm.load_state_dict({"weight": self.reader.read("model.norm.weight").float()}, assign=True)
        return norm.to(self.device)

    def head_weight(self) -> torch.Tensor:
        """Weight of lm_head in float32, the embedding's if they are tied."""
        return self.reader.read(self._head_name).float().to(self.device)

    def head_rows(self, count: int) -> Iterator[torch.Tensor]:
        """The same as the checkpoint has it, ``count`` rows at a time."""
        return iter(self.reader.read(self._head_name).split(count))

    @property
    def _head_name(self) -> str:
        return "model.embed_tokens.weight" if self.skeleton.tied else "lm_head.weight"

    def _layer_arguments(self, length: int) -> list[dict[str, Any]]:
        """Masks and rotary angles that the model gives each layer for that length."""
        if length not in self._arguments:
            if len(self._arguments) >= _CACHED_LENGTHS:
                self._arguments.clear()
            inner = self.inner
            layers, norm = inner.layers, inner.norm
            recorders = [_Recorder() for _ in range(self.skeleton.layers)]
            if next(inner.rotary_emb.buffers()).is_meta:
                inner.rotary_emb = type(inner.rotary_emb)(config=self.config).to(self.device)
            inner.layers, inner.norm = nn.ModuleList(recorders), nn.Identity()
            probe = torch.zeros(1, length, self.config.hidden_size, device=self.device)
            inner(inputs_embeds=probe, use_cache=False)
            inner.layers, inner.norm = layers, norm
            self._arguments[length] = [recorder.arguments for recorder in recorders]
        return self._arguments[length]


class RoundedInput:
    """Rounds inputs as the FP8 kernels do; linears that read the same tensor share the work."""

    def __init__(self) -> None:
        """Start with nothing to share."""
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., K] rounded with a scale per token."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, fake_quantize(x))
        return self._last[1]


def quantise_input(
    module: Any,
    scheme: QuantizationScheme,
    input_scale: torch.Tensor | None,
    rounded: RoundedInput,
) -> None:
    """Make ``module`` see its input as the FP8 kernel does; nothing for 16-bit activations."""
    if scheme.input_activations is None:
        return
    forward = module.forward
    if input_scale is None:
        module.forward = lambda x: forward(rounded(x))
    else:
        scale = input_scale.to(module.weight.device)
        module.forward = lambda x: forward(fake_quantize(x, "tensor", scale))
