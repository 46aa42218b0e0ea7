# SPDX-License-Identifier: MIT
"""Smoothing: moves a factor per channel from the inputs of linears into their weights.

SmoothQuant (Xiao et al., 2022, arXiv:2211.10438): inputs of channel j are divided by
``s_j = amax_x**alpha / amax_w**(1 - alpha)`` by what makes them (a norm's gain, or the rows of the
linear before), and the column j of every weight that reads them is multiplied by it. Factors are
powers of two, and only what stays exact in the checkpoint's dtype is moved, so that the model
computes what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oss_fused.quant.observers import watch_inputs
from oss_fused.quant.scheme import QuantizationScheme

# tensor of the checkpoint -> factors, each broadcastable to it
Rescaled = dict[str, list[torch.Tensor]]
_MAX_EXPONENT = 24


@dataclass(frozen=True)
class Fold:
    """What makes an input, and the linears that read it; names as in the layer."""

    producer: str
    consumers: tuple[str, ...]


# linears first: what they do to the rows of up_proj counts when its columns are looked at
FOLDS = (
    Fold("self_attn.v_proj", ("self_attn.o_proj",)),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)


def smooth_layer(
    layer: nn.Module,
    prefix: str,
    schemes: Mapping[str, QuantizationScheme | None],
    alpha: float,
    run: Callable[[], None],
    dtype_of: Callable[[str], torch.dtype],
) -> Rescaled:
    """Smooth a decoder layer in place, where all readers of an input are quantised linears.

    Args:
        layer: with weights in float32.
        prefix: its name in the checkpoint.
        schemes: of every linear of the model, None for one that is not quantised.
        alpha: 0 makes the columns of weights alike, 1 the channels of inputs.
        run: runs the layer on calibration data.
        dtype_of: dtype of a tensor of the checkpoint.

    Returns:
        What the checkpoint's tensors are to be multiplied with.
    """
    modules = dict(layer.named_modules())
    folds = [f for f in FOLDS if all(schemes.get(f"{prefix}.{c}") for c in f.consumers)]
    peaks = _watch(modules, folds, run)
    rescaled: Rescaled = {}
    for fold in folds:
        producer, consumers = modules[fold.producer], [modules[name] for name in fold.consumers]
        peak = peaks[fold.consumers[0]]
        columns = torch.stack([m.weight.abs().amax(0) for m in consumers]).amax(0)
        width = producer.weight.shape[0]
        made_by = _made_by(layer, width, len(peak)).to(peak.device)
        none = torch.zeros(width, device=peak.device)
        factor = _factor(
            none.scatter_reduce(0, made_by, peak, "amax"),
            none.scatter_reduce(0, made_by, columns, "amax"),
            alpha,
        )
        parts = {f"{fold.producer}.{leaf}": part for leaf, part in producer.named_parameters()}
        for name, part in parts.items():
            divided = (part / _rows(factor, part)).to(dtype_of(f"{prefix}.{name}")).float()
            exact = (divided * _rows(factor, part) == part).view(width, -1).all(1)
            factor = torch.where(exact, factor, torch.ones_like(factor))
        moves = [(name, part, _rows(factor, part).reciprocal()) for name, part in parts.items()]
        moves += [
            (f"{name}.weight", module.weight, factor[made_by].unsqueeze(0))
            for name, module in zip(fold.consumers, consumers)
        ]
        for name, part, by in moves:
            part.data.mul_(by)
            rescaled.setdefault(f"{prefix}.{name}", []).append(by)
    return rescaled


def _made_by(layer: Any, width: int, inputs: int) -> torch.Tensor:
    """The producer's channel behind each input [inputs]: heads of o_proj share one of v_proj."""
    channel = torch.arange(inputs)
    if inputs == width:
        return channel
    size = layer.self_attn.head_dim
    return channel // size * width // inputs * size + channel % size


def _rows(factor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A factor per row of ``part``, broadcastable to it."""
    return factor.view(-1, *[1] * (part.dim() - 1))


def _watch(
    modules: Mapping[str, Any], folds: Sequence[Fold], run: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Largest magnitude of each channel of the inputs, by the first linear that reads them."""
    peaks: dict[str, torch.Tensor] = {}

    def see(name: str, x: torch.Tensor) -> None:
        peak = x.detach().abs().flatten(0, -2).amax(0).float()
        peaks[name] = torch.maximum(peaks.get(name, peak), peak)

    first = {fold.consumers[0]: modules[fold.consumers[0]] for fold in folds}
    handles = watch_inputs(first, see)
    run()
    for handle in handles:
        handle.remove()
    return peaks


def _factor(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """The nearest powers of two; 1 where a channel is dead or not finite."""
    exponent = (alpha * inputs.log2() - (1 - alpha) * weights.log2()).round()
    usable = exponent.isfinite() & (inputs > 0) & (weights > 0)
    exponent = exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    return torch.where(usable, exponent, torch.zeros_like(exponent)).exp2()
