# SPDX-License-Identifier: MIT
"""Finds the cheapest mix of FP8, W8A16 and bf16 linears that meets an accuracy target.

Groups of fused linears are ranked by the harm they do alone (quant.sensitivity) per weight. Then
nested mixes along that ranking and the unquantised model run side by side, a layer at a time. The
mean KL divergence of their next-token distributions, on samples that calibration has not seen,
compares them: ``exp(KL)`` estimates the perplexity factor with far less noise than perplexity.
Experts and the KV cache take part as the plan stores them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oss_fused.errors import SchemeError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import dequantize
from oss_fused.quant.observers import CacheObserver
from oss_fused.quant.recipe import KEEP, Override
from oss_fused.quant.runner import LayerRunner, RoundedInput
from oss_fused.quant.scheme import W8A16, QuantizationScheme, matches
from oss_fused.quant.sensitivity import Harm, Track, measure_harms
from oss_fused.quant.served import serve_rest
from oss_fused.quant.skeleton import ModelSkeleton

# shares of the quantised linears' weights: with 16-bit inputs, which take no memory, and, when half
# have them, of those unquantised
LEVELS = (
    *((inputs, 0.0) for inputs in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)),
    *((0.5, weights) for weights in (0.05, 0.1, 0.15)),
)
_HEAD = "lm_head"


@dataclass(frozen=True)
class Outcome:
    """One mix of precisions and what it costs and measures.

    Attributes:
        inputs_share: share of the linears' weights whose inputs stay in 16 bits.
        weights_share: share of the linears' weights that stay in bf16.
        factor: exp of the mean KL divergence from the unquantised model.
        overrides: the mix, for a recipe.
    """

    inputs_share: float
    weights_share: float
    factor: float
    overrides: tuple[Override, ...]


class PolicySearch:
    """Search over mixes for a model whose linears are quantised in ``quantised``."""

    def __init__(
        self,
        source: CheckpointReader,
        quantised: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        schemes: Mapping[str, QuantizationScheme | None],
        samples: Sequence[torch.Tensor],
        device: torch.device,
        track: Track = lambda layers, _: layers,
        stored: CheckpointReader | None = None,
        keep_sensitive: Mapping[str, float] | None = None,
    ) -> None:
        """Take the parts.

        Args:
            source: the unquantised checkpoint.
            quantised: linear -> codes [N, K] and scale [N, 1].
            schemes: every linear -> its scheme; dynamic or 16-bit inputs.
            samples: held-out token ids, each [T].
            device: of the arithmetic.
            track: wraps the loops over layers.
            stored: the checkpoint whose FP8 experts and KV scales all mixes are compared with.
            keep_sensitive: pattern -> sensitivity above which its linears stay in bf16.
        """
        self.keep_sensitive = dict(keep_sensitive or {})
        self.track, self.stored = track, stored
        self.harms: list[Harm] = []
        self.compared: list[Outcome] = []
        self.source, self.quantised, self.samples = source, quantised, samples
        self.schemes = {
            name: s for name, s in schemes.items() if s is not None and name in quantised
        }
        self.device = device
        self.total = sum(codes.numel() for codes, _ in quantised.values())

    def rank(self) -> list[Harm]:
        """The harm of every group, in model order."""
        return measure_harms(
            self.source, self.quantised, self.schemes, self.samples, self.device, self.track
        )

    @torch.no_grad()
    def measure(self, mixes: Sequence[Mapping[str, str]]) -> list[float]:
        """exp(mean KL) of mixes (linear -> "fp8", "w8a16" or "bf16"), one pass for all."""
        runner = LayerRunner(ModelSkeleton(self.source), self.device)
        start = runner.embed(self.samples)
        states = [list(start) for _ in range(len(mixes) + 1)]
        for index in self.track(range(runner.skeleton.layers), "Comparing mixes"):
            layer = runner.load(index)
            linears = runner.linears(layer, index)
            cache: CacheObserver | None = None
            for mix, hidden in zip([None, *mixes], states):
                if hidden is states[1] and self.stored is not None:
                    # the unquantised model has passed
                    cache = serve_rest(self.stored, runner.skeleton, layer, index)
                restore, rounded = [], RoundedInput()
                for name, module in linears.items():
                    kind = "bf16" if mix is None else mix.get(name, "bf16")
                    restore.append(
                        self._apply(module, name, kind == "fp8", kind != "bf16", rounded)
                    )
                hidden[:] = [runner.forward(layer, index, x, cache).cpu() for x in hidden]
                for undo in restore:
                    undo()
            runner.drop(index)
        return self._compare(runner, mixes, states)

    def search(self, target: float, best_effort: bool = False) -> Outcome:
        """The cheapest mix with a factor of at most ``target``; else, if asked, the best.

        Raises:
            SchemeError: no mix meets it; says what the best one reaches.
        """
        self.compared = self.outcomes()
        for outcome in self.compared:
            if outcome.factor <= target:
                return outcome
        best = min(self.compared, key=lambda outcome: outcome.factor)
        if best_effort:
            return best
        raise SchemeError(
            f"--accuracy-target={target}: not met; the best mix, {best.inputs_share:.0%} of the "
            f"linears with 16-bit inputs and {best.weights_share:.0%} in bf16, measures "
            f"{best.factor:.4f}"
        )

    def outcomes(self) -> list[Outcome]:
        """Every level's mix with what it measures, cheapest first."""
        self.harms = self.rank()
        mixes = [self._mix(self.harms, *level) for level in LEVELS]
        factors = self.measure(mixes)
        return [self._outcome(mix, factor) for mix, factor in zip(mixes, factors)]

    def _mix(self, harms: Sequence[Harm], inputs: float, weights: float) -> dict[str, str]:
        mix = {name: "w8a16" if s == W8A16 else "fp8" for name, s in self.schemes.items()}
        always = too_sensitive(harms, self.keep_sensitive)
        ranked = sorted(harms, key=lambda harm: -harm.per_weight)
        kept = _within([harm for harm in ranked if harm not in always], weights * self.total)
        rest = [harm for harm in harms if harm not in kept + always and harm.inputs]
        ranked = sorted(rest, key=lambda harm: -harm.inputs / harm.size)
        raised = _within(ranked, inputs * self.total - sum(harm.size for harm in kept))
        mix |= {name: "w8a16" for harm in raised for name in harm.names}
        return mix | {name: "bf16" for harm in kept + always for name in harm.names}

    def _outcome(self, mix: Mapping[str, str], factor: float) -> Outcome:
        by_kind: dict[str, list[str]] = {"w8a16": [], "bf16": []}
        for name, kind in mix.items():
            if kind != "fp8":
                by_kind[kind].append(name)
        size = {
            kind: sum(self.quantised[name][0].numel() for name in names) / self.total
            for kind, names in by_kind.items()
        }
        overrides = tuple(
            Override(scheme={"w8a16": "W8A16", "bf16": KEEP}[kind], targets=tuple(names))
            for kind, names in by_kind.items()
            if names
        )
        return Outcome(size["w8a16"] + size["bf16"], size["bf16"], factor, overrides)

    def _apply(
        self, module: Any, name: str, inputs: bool, weights: bool, rounded: RoundedInput
    ) -> Any:
        """Quantise a linear's input or weight; returns what undoes it."""
        exact_weight, exact_forward = module.weight.data, module.forward
        if name in self.schemes:
            if weights:
                codes, scale = self.quantised[name]
                module.weight.data = dequantize(codes, scale).to(self.device)
            if inputs and self.schemes[name].input_activations is not None:
                module.forward = lambda x: exact_forward(rounded(x))

        def undo() -> None:
            module.weight.data = exact_weight
            module.__dict__.pop("forward", None)

        return undo

    def _compare(
        self,
        runner: LayerRunner,
        mixes: Sequence[Mapping[str, str]],
        states: Sequence[Sequence[torch.Tensor]],
    ) -> list[float]:
        norm, head = runner.final_norm(), nn.Linear(1, 1, bias=False, device="meta")
        head.weight = nn.Parameter(runner.head_weight(), requires_grad=False)
        divergence = [0.0] * (len(states) - 1)
        tokens = sum(len(sample) for sample in self.samples)
        for sample in range(len(self.samples)):
            normed = [norm(state[sample].to(self.device))[0] for state in states]
            baseline = head(normed[0]).log_softmax(-1)
            for i, mix in enumerate(mixes):
                kind = mix.get(_HEAD, "bf16")
                undo = self._apply(head, _HEAD, kind == "fp8", kind != "bf16", RoundedInput())
                difference = baseline - head(normed[i + 1]).log_softmax(-1)
                undo()
                divergence[i] += float((baseline.exp() * difference).sum()) / tokens
        return [math.exp(value) for value in divergence]


def too_sensitive(harms: Sequence[Harm], limits: Mapping[str, float]) -> list[Harm]:
    """The groups with a linear of a pattern in ``limits`` and a sensitivity above its limit.

    A group's sensitivity is the share of the other groups with less harm per weight, 0 to 1.
    """
    others = max(len(harms) - 1, 1)
    sensitivity = {
        harm.names: sum(each.per_weight < harm.per_weight for each in harms) / others
        for harm in harms
    }
    return [
        harm
        for harm in harms
        if any(
            sensitivity[harm.names] > limit
            and any(matches(pattern, name, "Linear") for name in harm.names)
            for pattern, limit in limits.items()
        )
    ]


def _within(ranked: Sequence[Harm], budget: float) -> list[Harm]:
    """Groups in order as long as they fit the budget of elements."""
    taken, used = [], 0
    for harm in ranked:
        if used + harm.size <= budget:
            taken.append(harm)
            used += harm.size
    return taken
