# SPDX-License-Identifier: MIT
"""Experts while a layer runs on calibration data: coverage, rounding, serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from oss_fused.quant.experts import PARTS, expert_to_fp8
from oss_fused.quant.formats import dequantize, fake_quantize
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.mxfp4_rounding import (
    KeptBlocks,
    Mxfp4Rounder,
    Packed,
    round_to_mxfp4_with_feedback,
)
from oss_fused.quant.rounding import InputMoments, input_basis, round_with_feedback

# key of the products of what down_proj's inputs lost to rounding with those inputs
_LOST = "lost"


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
        """FP8 codes and scales with error feedback, by the tensors' name less its suffix.

        Experts that fewer tokens than inputs were routed to are left out: feedback would fit the
        weights to those few.
        """
        result = {}
        for part, short in PARTS:
            for expert in range(self.experts.num_experts):
                name = f"{module}.{expert}.{short}"
                seen = self._seen(part, expert)
                if seen is not None:
                    weight = _matrix(self.experts, part, expert)
                    q, scale = round_with_feedback(weight, input_basis(seen.mean(name)))
                    result[name] = (q.cpu(), scale.cpu())
        return result

    def _seen(self, part: str, expert: int) -> InputMoments | None:
        """Moments of an expert's inputs, dropped here; None if they are too few."""
        moments = (self._moments or {}).pop((part, expert), None)
        width = _matrix(self.experts, part, expert).shape[1]
        return None if moments is None or moments.count < width else moments

    def _see(self, experts: Any, arguments: tuple[Any, ...]) -> None:
        hidden, indices, weights = arguments
        for expert in indices.unique().tolist():
            token, slot = torch.where(indices == expert)
            self.tokens[expert] += len(token)
            if self._moments is not None:
                self._see_inputs(expert, hidden[token], weights[token, slot].unsqueeze(-1))

    def _see_inputs(self, expert: int, rows: torch.Tensor, share: torch.Tensor) -> None:
        """Sum the moments of an expert's inputs [T, K]; ``share`` [T, 1] is the router's."""
        x = fake_quantize(rows)
        self._add("gate_up_proj", expert, x)
        gate_up = _linear(self.experts, "gate_up_proj", expert, x)
        self._add("down_proj", expert, fake_quantize(self.experts._apply_gate(gate_up)))

    def _add(
        self, part: str, expert: int, x: torch.Tensor, other: torch.Tensor | None = None
    ) -> None:
        assert self._moments is not None
        key = (part, expert)
        if key not in self._moments:
            self._moments[key] = InputMoments(x.shape[-1], x.device)
        self._moments[key].see(x, other)


class Mxfp4ExpertWatch(ExpertWatch):
    """The same for experts that are rounded to MXFP4, whose inputs stay in 16 bits.

    A token's error counts as much as its output: with the square of the share that the router gives
    the expert. Two passes over the data: the first is for gate_up_proj; in the second the inputs
    of down_proj are those that the rounded gate_up_proj gives, and down_proj makes up for what
    they lost. Biases take what is lost on average, so that only the inputs' deviations from their
    mean count for rounding.

    Attributes:
        biases: tensor of the checkpoint -> what it becomes, [E, N] float32.
    """

    def __init__(self, experts: Any, moments: bool, module: str, rounder: Mxfp4Rounder) -> None:
        """Watch ``experts``, which the checkpoint calls ``module``; ``rounder`` rounds them."""
        super().__init__(experts, moments)
        self._module, self._rounder = module, rounder
        self._rounded: dict[str, Packed] = {}
        self.biases: dict[str, torch.Tensor] = {}

    def second_pass(self) -> bool:
        """Round gate_up_proj and watch for down_proj; False where nothing depends on inputs."""
        self._round("gate_up_proj")
        if self._moments is None:
            return False
        self._handle = self.experts.register_forward_pre_hook(self._see_again)
        return True

    def rounded(self, module: str) -> dict[str, Packed]:
        """Blocks and scales of every expert, after the second pass."""
        self._round("down_proj")
        return self._rounded

    def _round(self, part: str) -> None:
        tensor, short = f"{self._module}.{part}", dict(PARTS)[part]
        biases = getattr(self.experts, f"{part}_bias").data.clone()
        for expert in range(self.experts.num_experts):
            name = f"{self._module}.{expert}.{short}"
            weight = _matrix(self.experts, part, expert).contiguous()
            seen, lost = self._seen(part, expert), (self._moments or {}).pop((_LOST, expert), None)
            if seen is None:
                packed = self._rounder.round(weight, tensor, expert)
            else:
                kept = self._rounder.kept(weight, tensor, expert)
                packed, shift = _round_with_bias(weight, seen, lost, kept, name)
                biases[expert] += shift
            self._rounded[name] = (packed[0].cpu(), packed[1].cpu())
        self.biases[f"{tensor}_bias"] = biases

    def _see_inputs(self, expert: int, rows: torch.Tensor, share: torch.Tensor) -> None:
        # a last input of one, for the bias
        self._add("gate_up_proj", expert, torch.cat((rows * share, share), -1))

    def _see_again(self, experts: Any, arguments: tuple[Any, ...]) -> None:
        hidden, indices, weights = arguments
        for expert in indices.unique().tolist():
            token, slot = torch.where(indices == expert)
            x, share = hidden[token], weights[token, slot].unsqueeze(-1)
            exact = experts._apply_gate(_linear(experts, "gate_up_proj", expert, x))
            blocks, scales = self._rounded[f"{self._module}.{expert}.w13"]
            weight = unpack_mxfp4(blocks.to(x.device), scales.to(x.device), x.dtype)
            bias = self.biases[f"{self._module}.gate_up_proj_bias"][expert]
            gated = experts._apply_gate(nn.functional.linear(x, weight, bias)) * share
            inputs = torch.cat((gated, share), -1)
            self._add("down_proj", expert, inputs)
            lost = torch.cat((exact * share - gated, torch.zeros_like(share)), -1)
            self._add(_LOST, expert, inputs, lost)


def _round_with_bias(
    weight: torch.Tensor,
    seen: InputMoments,
    lost: InputMoments | None,
    kept: KeptBlocks | None,
    name: str,
) -> tuple[Packed, torch.Tensor]:
    """Blocks and scales of ``weight`` [N, K], and what to add to its bias [N].

    Args:
        weight: as it should be.
        seen: moments of the inputs and of a last input that stands for the bias.
        lost: products of these with what the first K lost before they came here.
        kept: blocks that stay.
        name: for messages.
    """
    moments = seen.mean(name)
    power, mean = moments[-1, -1], moments[:-1, -1] / moments[-1, -1]
    basis = input_basis(moments[:-1, :-1] - power * mean.outer(mean))
    wanted = weight @ mean
    if lost is not None:
        products = lost.mean(name)[:-1]
        average = products[:, -1] / power
        wanted += weight @ average
        weight = basis.compensate(weight, products[:, :-1] - power * average.outer(mean))
    packed = round_to_mxfp4_with_feedback(weight, basis, kept)
    return packed, wanted - unpack_mxfp4(*packed, weight.dtype) @ mean


def serve_in_mxfp4(
    experts: Any,
    module: str,
    rounded: Mapping[str, Packed],
    biases: Mapping[str, torch.Tensor],
) -> None:
    """Give a module of experts the weights and biases it gets."""
    for part, short in PARTS:
        getattr(experts, f"{part}_bias").data.copy_(biases[f"{module}.{part}_bias"])
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
