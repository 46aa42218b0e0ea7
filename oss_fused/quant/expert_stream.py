# SPDX-License-Identifier: MIT
"""Experts while a layer runs on calibration data: coverage, rounding, serving."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oss_fused.quant.experts import PARTS, expert_to_fp8
from oss_fused.quant.formats import dequantize, fake_quantize
from oss_fused.quant.rounding import InputMoments, input_basis, round_with_feedback


class ExpertWatch:
    """Counts the tokens routed to each expert and, if asked, sums its inputs' moments.

    Attributes:
        tokens: by expert.
    """

    def __init__(self, experts: Any, moments: bool) -> None:
        """Watch a module of experts, which computes as the unquantised model does."""
        self.experts = experts
        self.tokens = [0] * experts.num_experts
        self._moments: dict[tuple[str, int], InputMoments] | None = {} if moments else None
        self._handle = experts.register_forward_pre_hook(self._see)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def rounded(self, module: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Codes and scales with error feedback, by the tensors' name less its suffix.

        Experts that fewer tokens than inputs were routed to are left out: feedback would fit the
        weights to those few.
        """
        result = {}
        shorts = dict(PARTS)
        for part, expert in sorted(self._moments or {}):
            assert self._moments is not None
            moments = self._moments.pop((part, expert))
            weight = _matrix(self.experts, part, expert)
            if moments.count < weight.shape[1]:
                continue
            name = f"{module}.{expert}.{shorts[part]}"
            q, scale = round_with_feedback(weight, input_basis(moments.mean(name)))
            result[name] = (q.cpu(), scale.cpu())
        return result

    def _see(self, experts: Any, arguments: tuple[Any, ...]) -> None:
        hidden, indices = arguments[:2]
        for expert in indices.unique().tolist():
            rows = hidden[(indices == expert).any(-1)]
            self.tokens[expert] += rows.shape[0]
            if self._moments is not None:
                x = fake_quantize(rows)
                self._add("gate_up_proj", expert, x)
                gate_up = _linear(experts, "gate_up_proj", expert, x)
                self._add("down_proj", expert, fake_quantize(experts._apply_gate(gate_up)))

    def _add(self, part: str, expert: int, x: torch.Tensor) -> None:
        assert self._moments is not None
        key = (part, expert)
        if key not in self._moments:
            self._moments[key] = InputMoments(x.shape[-1], x.device)
        self._moments[key].see(x)


def serve_in_fp8(
    experts: Any, module: str, rounded: dict[str, tuple[torch.Tensor, torch.Tensor]], mxfp4: bool
) -> None:
    """Make a module of experts compute as FP8 experts are served, with the weights they get."""
    for part, short in PARTS:
        for expert in range(experts.num_experts):
            weight = _matrix(experts, part, expert)
            q, scale = rounded.get(f"{module}.{expert}.{short}") or expert_to_fp8(
                weight.contiguous(), mxfp4
            )
            weight.copy_(dequantize(q, scale))

    def forward(hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result, x = torch.zeros_like(hidden), fake_quantize(hidden)
        for expert in indices.unique().tolist():
            token, slot = torch.where(indices == expert)
            gated = experts._apply_gate(_linear(experts, "gate_up_proj", expert, x[token]))
            output = _linear(experts, "down_proj", expert, fake_quantize(gated))
            result.index_add_(0, token, output * weights[token, slot].unsqueeze(-1))
        return result

    experts.forward = forward


def _matrix(experts: Any, part: str, expert: int) -> torch.Tensor:
    """Weight [outputs, inputs] of one expert, a view."""
    weight = getattr(experts, part).data[expert]
    return weight.t() if experts.is_transposed else weight


def _linear(experts: Any, part: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    bias = getattr(experts, f"{part}_bias")[expert] if experts.has_bias else None
    return nn.functional.linear(x, _matrix(experts, part, expert), bias)
