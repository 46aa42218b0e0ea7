# SPDX-License-Identifier: MIT
"""Experts while a layer runs on calibration data: coverage, rounding, serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from oss_fused.quant.experts import PARTS, expert_to_fp8
from oss_fused.quant.formats import dequantize, fake_quantize
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.mxfp4_rounding import Mxfp4Rounder, Packed, round_to_mxfp4_with_feedback
from oss_fused.quant.rounding import (
    InputBasis,
    InputMoments,
    input_basis,
    round_with_feedback,
)


class ExpertWatch:
    """Counts the tokens routed to each expert and, if asked, sums its inputs' moments.

    Attributes:
        tokens: by expert.
    """

    def __init__(self, experts: Any, storage: str | None) -> None:
        """Watch a module of experts, which computes as the unquantised model does.

        Args:
            experts: transformers' module.
            storage: "fp8" or "mxfp4", for which weights will be rounded with feedback; None sums no
                moments.
        """
        self.experts = experts
        self.tokens = [0] * experts.num_experts
        # inputs as weights meet them: those of MXFP4 experts stay in 16 bits
        self._as_served = fake_quantize if storage == "fp8" else _as_they_are
        self._moments: dict[tuple[str, int], InputMoments] | None = {} if storage else None
        self._handle = experts.register_forward_pre_hook(self._see)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def rounded_to_fp8(self, module: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Codes and scales with error feedback, by the tensors' name less its suffix.

        Experts that fewer tokens than inputs were routed to are left out: feedback would fit the
        weights to those few.
        """
        result = {}
        for part, short, expert, weight in self._weights():
            name = f"{module}.{expert}.{short}"
            basis = self._basis(part, expert, name)
            if basis is not None:
                q, scale = round_with_feedback(weight, basis)
                result[name] = (q.cpu(), scale.cpu())
        return result

    def rounded_to_mxfp4(self, module: str, rounder: Mxfp4Rounder) -> dict[str, Packed]:
        """Blocks and scales of every expert; feedback where enough tokens were routed to it."""
        result = {}
        for part, short, expert, weight in self._weights():
            name = f"{module}.{expert}.{short}"
            basis = self._basis(part, expert, name)
            if basis is None:
                packed = rounder.round(weight, f"{module}.{part}", expert)
            else:
                kept = rounder.kept(weight, f"{module}.{part}", expert)
                packed = round_to_mxfp4_with_feedback(weight, basis, kept)
            result[name] = (packed[0].cpu(), packed[1].cpu())
        return result

    def _weights(self) -> Iterator[tuple[str, str, int, torch.Tensor]]:
        for part, short in PARTS:
            for expert in range(self.experts.num_experts):
                yield part, short, expert, _matrix(self.experts, part, expert)

    def _basis(self, part: str, expert: int, name: str) -> InputBasis | None:
        """Of an expert's inputs, whose moments are dropped; None if feedback would fit too few."""
        moments = (self._moments or {}).pop((part, expert), None)
        if moments is None or moments.count < len(moments.total):
            return None
        return input_basis(moments.mean(name))

    def _see(self, experts: Any, arguments: tuple[Any, ...]) -> None:
        hidden, indices = arguments[:2]
        for expert in indices.unique().tolist():
            rows = hidden[(indices == expert).any(-1)]
            self.tokens[expert] += rows.shape[0]
            if self._moments is not None:
                x = self._as_served(rows)
                self._add("gate_up_proj", expert, x)
                gate_up = _linear(experts, "gate_up_proj", expert, x)
                self._add("down_proj", expert, self._as_served(experts._apply_gate(gate_up)))

    def _add(self, part: str, expert: int, x: torch.Tensor) -> None:
        assert self._moments is not None
        key = (part, expert)
        if key not in self._moments:
            self._moments[key] = InputMoments(x.shape[-1], x.device)
        self._moments[key].see(x)


def _as_they_are(x: torch.Tensor) -> torch.Tensor:
    return x


def serve_in_mxfp4(experts: Any, module: str, rounded: Mapping[str, Packed]) -> None:
    """Give a module of experts the weights it gets."""
    for part, short in PARTS:
        for expert in range(experts.num_experts):
            weight = _matrix(experts, part, expert)
            blocks, scales = (t.to(weight.device) for t in rounded[f"{module}.{expert}.{short}"])
            weight.copy_(unpack_mxfp4(blocks, scales, weight.dtype))


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
