# SPDX-License-Identifier: MIT
"""Runs a model over calibration samples with the weights of one decoder layer in memory.

Each layer runs twice on the outputs of the quantised layers before it: first with unquantised
weights, to observe; then quantised, as it will be served, to make the next layer's inputs.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from oss_fused.errors import NumericalOverflowError
from oss_fused.quant.checkpoint.writer import sync
from oss_fused.quant.expert_stream import (
    ExpertWatch,
    Mxfp4ExpertWatch,
    serve_in_fp8,
    serve_in_mxfp4,
)
from oss_fused.quant.export import LayerCalibration
from oss_fused.quant.formats import dequantize, fake_quantize, quantize
from oss_fused.quant.mxfp4_rounding import LEAST_ERROR, Mxfp4Rounder
from oss_fused.quant.observers import (
    CacheObserver,
    OutputError,
    drift,
    make_observer,
    watch_inputs,
)
from oss_fused.quant.plan import CheckpointPlan
from oss_fused.quant.rounding import InputMoments, input_basis, round_with_feedback
from oss_fused.quant.runner import LayerRunner, RoundedInput, quantise_input
from oss_fused.quant.scheme import QuantizationScheme, siblings
from oss_fused.quant.skeleton import ModelSkeleton, layer_step
from oss_fused.quant.smoothing import Rescaled, smooth_layer

# samples on which a linear's output is compared with the unquantised one: a second GEMM each
_ERROR_SAMPLES = 8
_HEAD = "lm_head"
_HEAD_ROWS = 16384


class LayerStream:
    """The samples on their way through the layers."""

    def __init__(
        self,
        skeleton: ModelSkeleton,
        plan: CheckpointPlan,
        samples: Sequence[torch.Tensor],
        device: torch.device,
        state: Path,
        feedback: bool,
        done: Container[str],
        rounder: Mxfp4Rounder = LEAST_ERROR,
    ) -> None:
        """Take up the hidden states saved in ``state``, or embed the samples.

        Args:
            skeleton: the model.
            plan: what is quantised how.
            samples: token ids, each [T].
            device: of the arithmetic, which is float32.
            state: folder for hidden states between layers.
            feedback: round weights with error feedback instead of to the nearest.
            done: steps that the journal knows: states after a layer that it does not know are left.
            rounder: of experts to MXFP4 without feedback.
        """
        self.skeleton, self.plan, self.device, self.state = skeleton, plan, device, state
        self.feedback, self.rounder = feedback, rounder
        self.runner = LayerRunner(skeleton, device)
        saved = [count for count in self._saved_layers() if layer_step(count - 1) in done]
        stored = _load_states(self._path(max(saved))) if saved else None
        self.next_layer = max(saved) if stored is not None else 0
        if stored is not None:
            self.hidden = [stored[str(i)] for i in range(len(samples))]
            counted = range(min(len(samples), _ERROR_SAMPLES))
            self.baseline = [stored[f"unquantised-{i}"] for i in counted]
        else:
            self.hidden = self.runner.embed(samples)
            self.baseline = self.hidden[:_ERROR_SAMPLES]

    @torch.no_grad()
    def run(self, index: int) -> LayerCalibration:
        """Observe decoder layer ``index``, quantise it, and move the samples past it.

        Raises:
            NumericalOverflowError: the layer's output has NaN or Inf.
        """
        layer = self.runner.load(index)
        prefix = f"model.layers.{index}"
        linears = self.runner.linears(layer, index)
        rescaled = self._smooth(layer, index)
        cache = CacheObserver(f"{prefix}.self_attn", self.plan.clip_target)
        calibration = self._observe(layer, index, linears, cache)
        calibration.rescaled = rescaled
        self.baseline = [
            self.runner.forward(layer, index, hidden).cpu() for hidden in self.baseline
        ]
        if self.plan.kv_scales:
            calibration.kv_scales[f"{prefix}.self_attn"] = cache.freeze()
            for name, scale in zip(("k_scale", "v_scale"), cache.freeze()):
                calibration.layer[name] = float(scale)
        errors = self._quantise(linears, calibration)
        experts = self.skeleton.experts_of(index)
        if self.plan.experts == "fp8" and experts is not None:
            mxfp4 = self.plan.source_experts == "mxfp4"
            serve_in_fp8(layer.mlp.experts, experts, calibration.weights, mxfp4)
        elif self.plan.expert_rounding is not None and experts is not None:
            serve_in_mxfp4(layer.mlp.experts, experts, calibration.weights, calibration.biases)
        self._advance(layer, index, cache, errors)
        calibration.linears = {name: error.metrics() for name, (error, _) in errors.items()}
        calibration.layer["cumulative_error"] = drift(self.baseline, self.hidden)
        self.runner.drop(index)
        return calibration

    @torch.no_grad()
    def run_head(self) -> LayerCalibration:
        """Observe the input of lm_head, and round its weight."""
        calibration = LayerCalibration()
        scheme = self.plan.schemes.get(_HEAD)
        if scheme is None or not (scheme.needs_data or self.feedback):
            return calibration
        norm = self.runner.final_norm()
        observer = make_observer(f"{_HEAD}.input_scale", self.plan.clip_target)
        moments = InputMoments(self.hidden[0].shape[-1], self.device)
        for hidden in self.hidden:
            x = norm(hidden.to(self.device))
            observer.see(x)
            if self.feedback:
                moments.see(_as_served(x, scheme))
        if scheme.needs_data:
            calibration.input_scales[_HEAD] = observer.scale()
        if self.feedback:
            basis = input_basis(moments.mean(_HEAD))
            # rows do not depend on each other, and a vocabulary in float32 takes gigabytes
            parts = [
                round_with_feedback(rows.float().to(self.device), basis)
                for rows in self.runner.head_rows(_HEAD_ROWS)
            ]
            codes = torch.cat([q.view(torch.uint8) for q, _ in parts]).view(parts[0][0].dtype)
            calibration.weights[_HEAD] = (codes, torch.cat([scale for _, scale in parts]))
        return calibration

    def commit(self, index: int) -> None:
        """Save the hidden states after layer ``index``, whose tensors are all written."""
        self.next_layer = index + 1
        path = self._path(self.next_layer)
        part = path.with_suffix(".part")
        states = {str(i): hidden for i, hidden in enumerate(self.hidden)}
        # safetensors refuses tensors that share memory, as these do before the first layer
        states |= {f"unquantised-{i}": hidden.clone() for i, hidden in enumerate(self.baseline)}
        try:
            save_file(states, part)
        except SafetensorError as error:
            # its own exception, also of a full disk, hides the system's
            found = re.search(r"os error (\d+)", str(error))
            code = int(found[1]) if found else errno.EIO
            raise OSError(code, os.strerror(code), str(part)) from error
        sync(part)
        part.replace(path)
        sync(self.state)
        for layer in self._saved_layers():
            if layer != self.next_layer:
                self._path(layer).unlink()

    def _smooth(self, layer: Any, index: int) -> Rescaled:
        """Smooth the layer, if asked for, by what its inputs are with unquantised weights."""
        if self.plan.smoothing is None:
            return {}

        def run() -> None:
            for hidden in self.hidden:
                self.runner.forward(layer, index, hidden)

        dtype_of = self.skeleton.reader.dtype
        prefix = f"model.layers.{index}"
        alpha = self.plan.smoothing
        return smooth_layer(layer, prefix, self.plan.schemes, alpha, run, dtype_of)

    def _observe(
        self, layer: Any, index: int, linears: dict[str, nn.Linear], cache: CacheObserver
    ) -> LayerCalibration:
        """Run with unquantised weights; find the static input scales and the rounded weights."""
        chosen = {name: s for name in linears if (s := self.plan.schemes[name]) is not None}
        static = {
            name: make_observer(f"{name}.input_scale", self.plan.clip_target)
            for name, s in chosen.items()
            if s.needs_data
        }
        # fused linears read the same input: its moments are summed once
        lead = {name: siblings(name, chosen)[0] for name in chosen} if self.feedback else {}
        moments = {
            name: InputMoments(linears[name].in_features, self.device) for name in lead.values()
        }
        calibration = LayerCalibration()
        if not static and not moments and not self.plan.kv_scales and not self.plan.experts:
            return calibration

        def see(name: str, x: torch.Tensor) -> None:
            if name in static:
                static[name].see(x)
            if name in moments:
                moments[name].see(_as_served(x, chosen[name]))

        experts = self._watch_experts(layer, index)
        handles = watch_inputs({name: linears[name] for name in {*static, *moments}}, see)
        for i in range(len(self.hidden)):
            self.runner.forward(layer, index, self.hidden[i], cache)
        for handle in handles:
            handle.remove()
        calibration.input_scales = {name: observer.scale() for name, observer in static.items()}
        bases = {name: input_basis(total.mean(name)) for name, total in moments.items()}
        for name, first in lead.items():
            calibration.weights[name] = round_with_feedback(linears[name].weight.data, bases[first])
        if experts is not None:
            experts.close()
            calibration.layer["expert_tokens"] = experts.tokens
            if isinstance(experts, Mxfp4ExpertWatch) and experts.second_pass():
                for hidden in self.hidden:
                    self.runner.forward(layer, index, hidden)
                experts.close()
            calibration.weights |= experts.rounded(str(self.skeleton.experts_of(index)))
            if isinstance(experts, Mxfp4ExpertWatch):
                calibration.biases = experts.biases
        return calibration

    def _watch_experts(self, layer: Any, index: int) -> ExpertWatch | None:
        if not hasattr(layer.mlp, "experts"):
            return None
        # MXFP4 values are exact in FP8: nothing is left to make up for
        rounds = self.plan.experts == "fp8" and self.plan.source_experts == "bf16"
        if self.plan.expert_rounding is None:
            return ExpertWatch(layer.mlp.experts, self.feedback and rounds)
        module = str(self.skeleton.experts_of(index))
        return Mxfp4ExpertWatch(layer.mlp.experts, self.feedback, module, self.rounder)

    def _quantise(
        self, linears: dict[str, nn.Linear], calibration: LayerCalibration
    ) -> dict[str, tuple[OutputError, Any]]:
        """Make every chosen linear compute as it will be served."""
        errors, rounded = {}, RoundedInput()
        for name, module in linears.items():
            scheme = self.plan.schemes[name]
            if scheme is None:
                continue
            original = module.weight.data
            q, scale = calibration.weights.get(name) or quantize(original, "channel")
            module.weight.data = dequantize(q, scale)
            input_scale = calibration.input_scales.get(name)
            error = OutputError(original, module.bias, input_scale)
            handle = module.register_forward_hook(
                lambda _m, inputs, output, error=error: error.see(inputs[0], output)
            )
            quantise_input(module, scheme, input_scale, rounded)
            errors[name] = (error, handle)
        return errors

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


def bytes_of_states(tokens: Sequence[int], width: int) -> int:
    """Bytes of what ``commit`` saves of samples of so many tokens, twice: old and new at once."""
    return 2 * 4 * width * (sum(tokens) + sum(tokens[:_ERROR_SAMPLES]))


def _load_states(path: Path) -> dict[str, torch.Tensor] | None:
    """States saved by ``commit``, None if the file is damaged: then they are computed again."""
    try:
        return load_file(path)
    except (SafetensorError, OSError):
        return None


def _as_served(x: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """Inputs as weights meet them, as far as that is known before static scales are."""
    inputs = scheme.input_activations
    return fake_quantize(x) if inputs is not None and inputs.dynamic else x
