# SPDX-License-Identifier: MIT
"""What quantising one group of fused linears alone costs: KL divergence in nats per token.

For logits that differ by ``d`` the KL divergence of the next-token distributions is ``d F d / 2``
to second order, ``F`` the Fisher information; and ``d F d`` is the mean of ``(g d)**2`` over labels
drawn from the model, ``g`` the gradient of their log-likelihood (Martens, 2014, arXiv:1412.1193).
So one pass forwards and one backwards through the unquantised model, one decoder layer in memory,
weigh the error of every linear's output by what it does to the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import dequantize, fake_quantize
from oss_fused.quant.runner import LayerRunner
from oss_fused.quant.scheme import QuantizationScheme, siblings
from oss_fused.quant.skeleton import ModelSkeleton

Quantised = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
Schemes = Mapping[str, QuantizationScheme]
# wraps an iterable of layers; the text describes the loop
Track = Callable[[Sequence[int], str], Iterable[int]]
_HEAD = "lm_head"
# tokens whose logits are in memory at a time
_CHUNK = 128


@dataclass(frozen=True)
class Harm:
    """What quantising one group of fused linears alone costs, in nats per token.

    Attributes:
        names: the linears.
        size: their weights' elements.
        inputs: of rounding the input.
        weights: of rounding the weights.
    """

    names: tuple[str, ...]
    size: int
    inputs: float
    weights: float

    @property
    def per_weight(self) -> float:
        """Harm of rounding both, per element of the weights."""
        return (self.inputs + self.weights) / self.size


class _Tally:
    """Sums ``(g d)**2`` by group, for errors ``d`` of inputs and of weights apart."""

    def __init__(self, quantised: Quantised, schemes: Schemes, device: torch.device) -> None:
        self.quantised, self.schemes, self.device = quantised, schemes, device
        self.inputs: dict[tuple[str, ...], float] = {}
        self.weights: dict[tuple[str, ...], float] = {}

    def add(self, seen: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Take linears -> source weight [N, K], input [T, K] and gradient of the output [T, N]."""
        for names in {tuple(siblings(name, seen)) for name in seen}:
            inputs = weights = torch.zeros((), device=self.device)
            for name in names:
                weight, x, gradient = seen[name]
                if self.schemes[name].input_activations is not None:
                    inputs = inputs + ((fake_quantize(x) - x) * (gradient @ weight)).sum(-1)
                codes, scale = self.quantised[name]
                difference = dequantize(codes.to(self.device), scale.to(self.device)) - weight
                weights = weights + ((x @ difference.t()) * gradient).sum(-1)
            self.inputs[names] = self.inputs.get(names, 0.0) + float(inputs.square().sum())
            self.weights[names] = self.weights.get(names, 0.0) + float(weights.square().sum())

    def harms(self, tokens: int) -> list[Harm]:
        """Per group, in the order of the model."""
        position = {name: i for i, name in enumerate(self.schemes)}
        return [
            Harm(
                names,
                sum(self.quantised[name][0].numel() for name in names),
                self.inputs[names] / (2 * tokens),
                self.weights[names] / (2 * tokens),
            )
            for names in sorted(self.inputs, key=lambda names: position[names[0]])
        ]


def measure_harms(
    source: CheckpointReader,
    quantised: Quantised,
    schemes: Schemes,
    samples: Sequence[torch.Tensor],
    device: torch.device,
    track: Track = lambda layers, _: layers,
) -> list[Harm]:
    """The harm of every group of the linears in ``schemes``, in model order.

    Args:
        source: the unquantised checkpoint.
        quantised: linear -> codes [N, K] and scale [N, 1].
        schemes: the same linears -> scheme; dynamic or 16-bit inputs.
        samples: token ids, each [T].
        device: of the arithmetic.
        track: wraps the loops over layers.
    """
    tally = _Tally(quantised, schemes, device)
    hidden = _forward(source, samples, device, track)
    runner = LayerRunner(ModelSkeleton(source), device)
    gradients = [_head(runner, tally, x) for x in hidden.pop()]
    for index in track(range(len(hidden) - 1, -1, -1), "Ranking"):
        layer = runner.load(index)
        linears = {n: m for n, m in runner.linears(layer, index).items() if n in schemes}
        inputs = hidden.pop()
        for i, x in enumerate(inputs):
            gradients[i] = _backward(runner, layer, index, linears, tally, x, gradients[i])
        runner.drop(index)
    return tally.harms(sum(len(sample) for sample in samples))


@torch.no_grad()
def _forward(
    source: CheckpointReader, samples: Sequence[torch.Tensor], device: torch.device, track: Track
) -> list[list[torch.Tensor]]:
    """Hidden states before every layer and behind the last, on the CPU."""
    runner = LayerRunner(ModelSkeleton(source), device)
    states = [runner.embed(samples)]
    for index in track(range(runner.skeleton.layers), "Exact model"):
        layer = runner.load(index)
        states.append([runner.forward(layer, index, x).cpu() for x in states[-1]])
        runner.drop(index)
    return states


def _head(runner: LayerRunner, tally: _Tally, hidden: torch.Tensor) -> torch.Tensor:
    """Gradient, by the last hidden states [1, T, H], of labels drawn from the model."""
    norm, weight = runner.final_norm(), runner.head_weight()
    generator = torch.Generator().manual_seed(0)
    parts = []
    for part in hidden[0].split(_CHUNK):
        with torch.enable_grad():
            x = part.to(runner.device).requires_grad_()
            normed = norm(x)
        states = normed.detach()
        chances = (states @ weight.t()).softmax(-1)
        labels = torch.multinomial(chances.cpu(), 1, generator=generator).to(runner.device)
        # of the log-likelihood by the logits: one at the label, less the chances
        gradient = chances.neg_().scatter_add_(-1, labels, torch.ones_like(labels).to(chances))
        if _HEAD in tally.schemes:
            tally.add({_HEAD: (weight, states, gradient)})
        parts.append(torch.autograd.grad(normed, x, gradient @ weight)[0])
    return torch.cat(parts).unsqueeze(0).cpu()


def _backward(
    runner: LayerRunner,
    layer: Any,
    index: int,
    linears: Mapping[str, nn.Linear],
    tally: _Tally,
    hidden: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Gradient by the layer's input [1, T, H] from that by its output."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _m, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
        )
        for name, module in linears.items()
    ]
    with torch.enable_grad():
        x = hidden.to(runner.device).requires_grad_()
        output = runner.forward(layer, index, x)
        wanted = [x, *(y for _, y in seen.values())]
        grads = torch.autograd.grad(output, wanted, gradient.to(runner.device))
    for handle in handles:
        handle.remove()
    tally.add(
        {
            name: (
                linears[name].weight.data,
                inputs.detach().reshape(-1, inputs.shape[-1]),
                grad.reshape(-1, grad.shape[-1]),
            )
            for (name, (inputs, _)), grad in zip(seen.items(), grads[1:])
        }
    )
    return grads[0].cpu()
