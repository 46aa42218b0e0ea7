# SPDX-License-Identifier: MIT
"""Runs a model over calibration samples with the weights of one decoder layer in memory.

Each layer is run twice: with exact weights on the outputs of the quantised layers before it, to
observe; then quantised, as it will be served, to make the next layer's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oss_fused.errors import NumericalOverflowError
from oss_fused.quant.experts import PARTS
from oss_fused.quant.export import LayerFindings
from oss_fused.quant.formats import dequantize, fake_quantize, quantize
from oss_fused.quant.models import ModelSkeleton
from oss_fused.quant.observers import AmaxObserver, CacheObserver, OutputError, watch_inputs
from oss_fused.quant.plan import Plan
from oss_fused.quant.rounding import InputMoments, input_basis, round_with_feedback
from oss_fused.quant.runner import LayerRunner, quantise_input
from oss_fused.quant.scheme import siblings

# samples on which a linear's output is compared with the exact one: a second GEMM each
_ERROR_SAMPLES = 8


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
        self.runner = LayerRunner(skeleton, device)
        saved = self._saved_layers()
        self.next_layer = max(saved) if saved else 0
        if saved:
            stored = load_file(self._path(self.next_layer))
            self.hidden = [stored[str(i)] for i in range(len(samples))]
        else:
            self.hidden = self.runner.embed(samples)

    @torch.no_grad()
    def run(self, index: int) -> LayerFindings:
        """Observe decoder layer ``index``, quantise it, and move the samples past it.

        Raises:
            NumericalOverflowError: the layer's output has NaN or Inf.
        """
        layer = self.runner.load(index)
        prefix = f"model.layers.{index}"
        linears = self.runner.linears(layer, index)
        cache = CacheObserver(f"{prefix}.self_attn")
        findings = self._observe(layer, index, linears, cache)
        if self.plan.kv_scales:
            findings.kv_scales[f"{prefix}.self_attn"] = cache.freeze()
        errors = self._quantise(linears, findings)
        self._quantise_experts(layer)
        self._advance(layer, index, cache, errors)
        findings.output_errors = {name: error.value() for name, (error, _) in errors.items()}
        self.runner.drop(index)
        return findings

    @torch.no_grad()
    def run_head(self) -> LayerFindings:
        """Observe the input of lm_head."""
        findings = LayerFindings()
        scheme = self.plan.schemes.get("lm_head")
        if scheme is not None and scheme.needs_data:
            norm = self.runner.final_norm()
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
            self.runner.forward(layer, index, self.hidden[i], cache)
        for handle in handles:
            handle.remove()
        findings.input_scales = {name: observer.scale() for name, observer in static.items()}
        bases = {name: input_basis(total.mean(name)) for name, total in moments.items()}
        for name, first in lead.items():
            findings.weights[name] = round_with_feedback(linears[name].weight.data, bases[first])
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
            output = self.runner.forward(layer, index, self.hidden[i], cache)
            if not bool(output.isfinite().all()):
                raise NumericalOverflowError(
                    f"model.layers.{index}: output of calibration sample {i} has NaN or Inf"
                )
            self.hidden[i] = output.cpu()

    def _path(self, layer: int) -> Path:
        return self.state / f"hidden-{layer:05d}.safetensors"

    def _saved_layers(self) -> list[int]:
        return [int(path.stem.split("-")[1]) for path in self.state.glob("hidden-*.safetensors")]
