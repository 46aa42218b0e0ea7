# SPDX-License-Identifier: MIT
"""Runs a model over calibration samples with the weights of one decoder layer in memory.

Each layer is run twice: with exact weights on the outputs of the quantised layers before it, to
observe; then quantised, as it will be served, to make the next layer's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oss_fused.errors import NumericalOverflowError
from oss_fused.quant.experts import PARTS, read_expert
from oss_fused.quant.export import LayerFindings
from oss_fused.quant.formats import dequantize, fake_quantize, quantize
from oss_fused.quant.models import ModelSkeleton
from oss_fused.quant.observers import AmaxObserver, CacheObserver, OutputError, watch_inputs
from oss_fused.quant.plan import Plan
from oss_fused.quant.rounding import InputMoments, round_with_feedback
from oss_fused.quant.scheme import QuantizationScheme, siblings

# samples on which a linear's output is compared with the exact one: a second GEMM each
_ERROR_SAMPLES = 8
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


class LayerStream:
    """The samples on their way through the layers."""

    def __init__(
        self,
        skeleton: ModelSkeleton,
        plan: Plan,
        samples: Sequence[torch.Tensor],
        device: torch.device,
        state: Path,
        feedback: bool,
    ) -> None:
        """Take up the hidden states saved in ``state``, or embed the samples.

        Args:
            skeleton: the model.
            plan: what is quantised how.
            samples: token ids, each [T].
            device: of the arithmetic, which is float32.
            state: folder for hidden states between layers.
            feedback: round weights with error feedback instead of to the nearest.
        """
        self.skeleton, self.plan, self.device, self.state = skeleton, plan, device, state
        self.feedback = feedback
        self.reader = skeleton.reader
        self.config = skeleton.config
        self.inner: Any = skeleton.model.model
        self._arguments: dict[int, list[dict[str, Any]]] = {}
        self._lengths = [len(sample) for sample in samples]
        saved = self._saved_layers()
        self.next_layer = max(saved) if saved else 0
        if saved:
            stored = load_file(self._path(self.next_layer))
            self.hidden = [stored[str(i)] for i in range(len(samples))]
        else:
            embedding = self.reader.read("model.embed_tokens.weight")
            self.hidden = [embedding[ids].float().unsqueeze(0) for ids in samples]

    @torch.no_grad()
    def run(self, index: int) -> LayerFindings:
        """Observe decoder layer ``index``, quantise it, and move the samples past it.

        Raises:
            NumericalOverflowError: the layer's output has NaN or Inf.
        """
        layer = self._load_layer(index)
        prefix = f"model.layers.{index}"
        linears = {
            f"{prefix}.{name}": module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        }
        cache = CacheObserver(f"{prefix}.self_attn")
        findings = self._observe(layer, index, linears, cache)
        if self.plan.kv_scales:
            findings.kv_scales[f"{prefix}.self_attn"] = cache.freeze()
        errors = self._quantise(linears, findings)
        self._quantise_experts(layer)
        self._advance(layer, index, cache, errors)
        findings.output_errors = {name: error.value() for name, (error, _) in errors.items()}
        # weights, hooks and the exact weights they hold go with the layer
        self.inner.layers[index] = nn.Identity()
        return findings

    @torch.no_grad()
    def run_head(self) -> LayerFindings:
        """Observe the input of lm_head."""
        findings = LayerFindings()
        scheme = self.plan.schemes.get("lm_head")
        if scheme is not None and scheme.needs_data:
            norm = self.inner.norm
            weight = self.reader.read("model.norm.weight").float()
            norm.load_state_dict({"weight": weight}, assign=True)
            norm.to(self.device)
            observer = AmaxObserver("lm_head.input_scale")
            for hidden in self.hidden:
                observer.see(norm(hidden.to(self.device)))
            findings.input_scales["lm_head"] = observer.scale()
        return findings

    def commit(self, index: int) -> None:
        """Save the hidden states after layer ``index``, whose tensors are all written."""
        self.next_layer = index + 1
        path = self._path(self.next_layer)
        part = path.with_suffix(".part")
        save_file({str(i): hidden for i, hidden in enumerate(self.hidden)}, part)
        part.replace(path)
        for layer in self._saved_layers():
            if layer != self.next_layer:
                self._path(layer).unlink()

    def _observe(
        self, layer: Any, index: int, linears: dict[str, nn.Linear], cache: CacheObserver
    ) -> LayerFindings:
        """Run with exact weights; find the static input scales and the rounded weights."""
        chosen = {name: s for name in linears if (s := self.plan.schemes[name]) is not None}
        static = {
            name: AmaxObserver(f"{name}.input_scale") for name, s in chosen.items() if s.needs_data
        }
        # fused linears read the same input: its moments are summed once
        lead = {name: siblings(name, chosen)[0] for name in chosen} if self.feedback else {}
        moments = {
            name: InputMoments(linears[name].in_features, self.device) for name in lead.values()
        }
        findings = LayerFindings()
        if not static and not moments and not self.plan.kv_scales:
            return findings

        def see(name: str, x: torch.Tensor) -> None:
            if name in static:
                static[name].see(x)
            if name in moments:
                inputs = chosen[name].input_activations
                dynamic = inputs is not None and inputs.dynamic
                moments[name].see(fake_quantize(x) if dynamic else x)

        handles = watch_inputs({name: linears[name] for name in {*static, *moments}}, see)
        for i in range(len(self.hidden)):
            self._forward(layer, index, i, cache)
        for handle in handles:
            handle.remove()
        findings.input_scales = {name: observer.scale() for name, observer in static.items()}
        for name, first in lead.items():
            weight = linears[name].weight.data
            findings.weights[name] = round_with_feedback(weight, moments[first].mean(first))
        return findings

    def _quantise(
        self, linears: dict[str, nn.Linear], findings: LayerFindings
    ) -> dict[str, tuple[OutputError, Any]]:
        """Make every chosen linear compute as it will be served."""
        errors = {}
        for name, module in linears.items():
            scheme = self.plan.schemes[name]
            if scheme is None:
                continue
            exact = module.weight.data
            q, scale = findings.weights.get(name) or quantize(exact, "channel")
            module.weight.data = dequantize(q, scale)
            error = OutputError(exact, module.bias)
            handle = module.register_forward_hook(
                lambda _m, inputs, output, error=error: error.see(inputs[0], output)
            )
            quantise_input(module, scheme, findings.input_scales.get(name))
            errors[name] = (error, handle)
        return errors

    def _quantise_experts(self, layer: Any) -> None:
        if self.plan.experts != "fp8":
            return
        experts = layer.mlp.experts
        for part, _ in PARTS:
            weight = getattr(experts, part).data
            for expert in range(weight.shape[0]):
                q, scale = quantize(weight[expert].t().contiguous(), "channel")
                weight[expert] = dequantize(q, scale).t()
        experts.register_forward_pre_hook(lambda _, args: (fake_quantize(args[0]), *args[1:]))
        exact_gate = experts._apply_gate
        experts._apply_gate = lambda gate_up: fake_quantize(exact_gate(gate_up))

    def _advance(
        self,
        layer: Any,
        index: int,
        cache: CacheObserver,
        errors: dict[str, tuple[OutputError, Any]],
    ) -> None:
        for i in range(len(self.hidden)):
            if i == _ERROR_SAMPLES:
                for _, handle in errors.values():
                    handle.remove()
            output = self._forward(layer, index, i, cache)
            if not bool(output.isfinite().all()):
                raise NumericalOverflowError(
                    f"model.layers.{index}: output of calibration sample {i} has NaN or Inf"
                )
            self.hidden[i] = output.cpu()

    def _forward(self, layer: Any, index: int, sample: int, cache: CacheObserver) -> torch.Tensor:
        hidden = self.hidden[sample].to(self.device)
        arguments = dict(self._layer_arguments(self._lengths[sample])[index])
        arguments["past_key_values"] = cache
        output = layer(hidden, **arguments)
        return output[0] if isinstance(output, tuple) else output

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

    def _load_layer(self, index: int) -> Any:
        """Fill a fresh copy of the layer from the checkpoint, in float32."""
        layer = self.inner.layers[index]
        prefix = f"model.layers.{index}"
        state: dict[str, torch.Tensor] = {}
        for name in layer.state_dict():
            full = f"{prefix}.{name}"
            if full in self.reader:
                state[name] = self.reader.read(full).float()
                continue
            module, _, part = full.rpartition(".")
            count = self.config.num_local_experts
            matrices = [read_expert(self.reader, module, part, e).float().t() for e in range(count)]
            state[name] = torch.stack(matrices)
        layer.load_state_dict(state, assign=True)
        return layer.to(self.device)

    def _path(self, layer: int) -> Path:
        return self.state / f"hidden-{layer:05d}.safetensors"

    def _saved_layers(self) -> list[int]:
        return [int(path.stem.split("-")[1]) for path in self.state.glob("hidden-*.safetensors")]


def quantise_input(
    module: Any, scheme: QuantizationScheme, input_scale: torch.Tensor | None
) -> None:
    """Make ``module`` see its input as the FP8 kernel does; nothing for 16-bit activations."""
    if scheme.input_activations is None:
        return
    strategy = scheme.input_activations.strategy
    scale = None if input_scale is None else input_scale.to(module.weight.device)
    exact: Callable[[torch.Tensor], torch.Tensor] = module.forward
    module.forward = lambda x: exact(fake_quantize(x, strategy, scale))
