# SPDX-License-Identifier: MIT
"""Carries out the steps of a plan: reads, converts and writes tensors, and measures the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.checkpoint.writer import CheckpointWriter
from oss_fused.quant.experts import convert_experts
from oss_fused.quant.formats import FORMATS, dequantize, quantize
from oss_fused.quant.mxfp4_rounding import LEAST_ERROR, Mxfp4Rounder
from oss_fused.quant.plan import CheckpointPlan, Step
from oss_fused.quant.scaler_choice import choose_group_size
from oss_fused.quant.smoothing import Rescaled

_BINS = 64
_ROWS = 16384


@dataclass
class LayerCalibration:
    """Result of running one layer on calibration data, by module name.

    Attributes:
        weights: codes and scale of linears and experts that were not rounded plainly.
        biases: those of experts that were not copied, each [E, N].
        input_scales: static scale [1] of a linear's input.
        kv_scales: (k_scale, v_scale), each [1], by self_attn module.
        linears: fields of a LinearRecord by linear.
        layer: fields of the LayerRecord.
        rescaled: what smoothing multiplied tensors with.
    """

    weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    input_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    kv_scales: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    linears: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)
    rescaled: Rescaled = field(default_factory=dict)


class Exporter:
    """Runs steps of ``plan`` from ``reader`` to ``writer`` on ``device``."""

    def __init__(
        self,
        plan: CheckpointPlan,
        reader: CheckpointReader,
        writer: CheckpointWriter,
        device: torch.device,
        base: CheckpointReader | None = None,
        rounder: Mxfp4Rounder = LEAST_ERROR,
    ) -> None:
        """Take the parts; with ``base``, quantised tensors come from that checkpoint."""
        self.base = base
        self.rounder = rounder
        self.plan = plan
        self.reader = reader
        self.writer = writer
        self.device = device

    def run(self, step: Step, calibration: LayerCalibration) -> None:
        """Write the tensors of one step; a step that is done already is left alone."""
        if step.name in self.writer.steps:
            return
        metrics: dict[str, Any] = {}
        if step.kind == "copy":
            tensor = self.reader.read(step.name)
            smooth = _rescale(tensor, calibration.rescaled.get(step.name))
            self.writer.write(step.name, smooth.to(step.specs[0].dtype))
        elif step.kind == "linear":
            metrics = self._linear(step, calibration)
        elif step.kind == "experts":
            metrics = self._experts(step, calibration)
        else:
            self._kv(step, calibration)
        self.writer.done(step.name, metrics)

    def source_weight(self, module: str) -> torch.Tensor:
        """Weight of a linear as the checkpoint has it, on the device."""
        name = f"{module}.weight"
        if module == "lm_head" and self.plan.untie:
            name = "model.embed_tokens.weight"
        return self.reader.read(name).to(self.device)

    def _linear(self, step: Step, calibration: LayerCalibration) -> dict[str, Any]:
        weight = self.source_weight(step.name)
        weight = _rescale(weight, calibration.rescaled.get(f"{step.name}.weight"))
        if self.base is not None:
            q, scale = (self.base.read(spec.name).to(self.device) for spec in step.specs[:2])
        else:
            q, scale = calibration.weights.get(step.name) or quantize(weight, "channel")
        self.writer.write(f"{step.name}.weight", q)
        self.writer.write(f"{step.name}.weight_scale", scale)
        if len(step.specs) > 2:
            self.writer.write(
                f"{step.name}.input_scale",
                _found(calibration.input_scales, step.name, "input_scale"),
            )
        metrics = _weight_metrics(weight, q, scale)
        if sizes := [n for n in self.plan.group_candidates if weight.shape[1] % n == 0]:
            some = weight[:: -(-weight.shape[0] // _ROWS)]
            size, error, clipped = choose_group_size([some], self.plan.clip_target or 0.0, sizes)
            metrics["group"] = {"size": size, "error": error, "clip_ratio": clipped}
        return {**metrics, **calibration.linears.get(step.name, {})}

    def _experts(self, step: Step, calibration: LayerCalibration) -> dict[str, int]:
        dtypes = {spec.name: spec.dtype for spec in step.specs}
        if self.base is not None:
            for name, dtype in dtypes.items():
                self.writer.write(name, self.base.read(name).to(dtype))
            return {}
        converted = convert_experts(
            self.reader,
            step.name,
            self.plan.expert_count,
            str(self.plan.experts),
            calibration.weights,
            self.plan.gated,
            self.rounder,
            self.device,
        )
        count = same = 0
        blocks = torch.empty(0)
        for name, tensor in converted:
            tensor = calibration.biases.get(name, tensor)
            self.writer.write(name, tensor.cpu().to(dtypes[name]))
            if name.endswith("_blocks"):
                blocks = tensor
            elif name.endswith("_scales"):
                count += tensor.numel()
                same += self.rounder.count_base(name.removesuffix("_scales"), blocks, tensor)
        metrics = {"mxfp4_blocks": count} if count else {}
        return metrics if self.rounder.base is None else {**metrics, "base_blocks": same}

    def _kv(self, step: Step, calibration: LayerCalibration) -> None:
        if self.base is not None:
            for spec in step.specs:
                self.writer.write(spec.name, self.base.read(spec.name))
            return
        module = step.name.removesuffix(".kv")
        for spec, scale in zip(step.specs, _found(calibration.kv_scales, module, "k_scale")):
            self.writer.write(spec.name, scale)


def _rescale(tensor: torch.Tensor, factors: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """``tensor`` in float32 times the factors, or as it is without any."""
    for factor in factors or ():
        tensor = tensor.float() * factor.to(tensor.device)
    return tensor


def _weight_metrics(weight: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    """Fields of a LinearRecord, from some rows at a time: a vocabulary takes gigabytes."""
    top = float(weight.abs().amax()) or 1.0
    counts = torch.zeros(_BINS, dtype=torch.float64, device=weight.device)
    errors, norm = dict.fromkeys(("weight", *FORMATS), 0.0), 0.0
    # in float64: squares of values above 1e19 exceed float32
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        original = weight[rows].float()
        exact = original.double()
        counts += torch.histc(exact, _BINS, -top, top)
        norm += float(exact.square().sum())
        rounded = {"weight": dequantize(q[rows], scale[rows])}
        rounded |= {name: dequantize(*quantize(original, fmt=fmt)) for name, fmt in FORMATS.items()}
        for name, values in rounded.items():
            errors[name] += float((values - exact).square().sum())
    relative = {name: (error / norm) ** 0.5 if norm else 0.0 for name, error in errors.items()}
    return {
        "weight_error": relative.pop("weight"),
        "format_errors": relative,
        "weight_histogram": {"low": -top, "high": top, "counts": [int(c) for c in counts.tolist()]},
    }


def _found(values: dict[str, Any], module: str, what: str) -> Any:
    if module not in values:
        raise CheckpointError(f"tensor '{module}.{what}': no calibration sample reached the layer")
    return values[module]
