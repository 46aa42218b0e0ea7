# SPDX-License-Identifier: MIT
"""Carries out the steps of a plan: reads source tensors, converts, writes, notes the errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.checkpoint.writer import CheckpointWriter
from oss_fused.quant.experts import convert_experts
from oss_fused.quant.formats import dequantize, quantize, relative_error
from oss_fused.quant.plan import Plan, Step


@dataclass
class LayerFindings:
    """What running a layer on calibration data found, by module name.

    Attributes:
        weights: codes and scale of linears that were not rounded plainly.
        input_scales: static scale [1] of a linear's input.
        kv_scales: (k_scale, v_scale), each [1], by self_attn module.
        output_errors: relative RMS error of a linear's output.
    """

    weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    input_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    kv_scales: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    output_errors: dict[str, float] = field(default_factory=dict)


class Exporter:
    """Runs steps of ``plan`` from ``reader`` to ``writer`` on ``device``."""

    def __init__(
        self,
        plan: Plan,
        reader: CheckpointReader,
        writer: CheckpointWriter,
        device: torch.device,
        base: CheckpointReader | None = None,
    ) -> None:
        """Take the parts; with ``base``, quantised tensors come from that checkpoint."""
        self.base = base
        self.plan = plan
        self.reader = reader
        self.writer = writer
        self.device = device

    def run(self, step: Step, findings: LayerFindings) -> None:
        """Write the tensors of one step; a step that is done already is left alone."""
        if step.name in self.writer.steps:
            return
        facts: dict[str, Any] = {}
        if step.kind == "copy":
            self.writer.write(step.name, self.reader.read(step.name))
        elif step.kind == "linear":
            facts = self._linear(step, findings)
        elif step.kind == "experts":
            self._experts(step)
        else:
            self._kv(step, findings)
        self.writer.done(step.name, facts)

    def source_weight(self, module: str) -> torch.Tensor:
        """Weight of a linear as the checkpoint has it, on the device."""
        name = f"{module}.weight"
        if module == "lm_head" and self.plan.untie:
            name = "model.embed_tokens.weight"
        return self.reader.read(name).to(self.device)

    def _linear(self, step: Step, findings: LayerFindings) -> dict[str, Any]:
        weight = self.source_weight(step.name)
        if self.base is not None:
            q, scale = (self.base.read(spec.name).to(self.device) for spec in step.specs[:2])
        else:
            q, scale = findings.weights.get(step.name) or quantize(weight, "channel")
        self.writer.write(f"{step.name}.weight", q)
        self.writer.write(f"{step.name}.weight_scale", scale)
        if len(step.specs) > 2:
            self.writer.write(
                f"{step.name}.input_scale", _found(findings.input_scales, step.name, "input_scale")
            )
        facts: dict[str, Any] = {"weight_error": relative_error(weight, dequantize(q, scale))}
        if step.name in findings.output_errors:
            facts["output_error"] = findings.output_errors[step.name]
        return facts

    def _experts(self, step: Step) -> None:
        count = self.reader.shape(f"{step.name}.gate_up_proj_bias")[0]
        converted = convert_experts(self.reader, step.name, count, str(self.plan.experts))
        for name, tensor in converted:
            self.writer.write(name, tensor)

    def _kv(self, step: Step, findings: LayerFindings) -> None:
        if self.base is not None:
            for spec in step.specs:
                self.writer.write(spec.name, self.base.read(spec.name))
            return
        module = step.name.removesuffix(".kv")
        for spec, scale in zip(step.specs, _found(findings.kv_scales, module, "k_scale")):
            self.writer.write(spec.name, scale)


def _found(values: dict[str, Any], module: str, what: str) -> Any:
    if module not in values:
        raise CheckpointError(f"tensor '{module}.{what}': no calibration sample reached the layer")
    return values[module]
