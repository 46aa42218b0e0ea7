# SPDX-License-Identifier: MIT
"""Puts calibration.json together from what the steps of a run noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oss_fused.quant import scheme as schemes
from oss_fused.quant.models import ModelSkeleton, layer_of
from oss_fused.quant.plan import Plan
from oss_fused.quant.recipe import KEEP, Recipe
from oss_fused.quant.record import CalibrationRecord, LayerRecord, LinearRecord, MixRecord

Facts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Findings:
    """What an earlier stage found that this run does not measure again.

    Attributes:
        record: of the run that quantised everything.
        kl: by linear, of its group alone.
        mixes: those compared.
        target: perplexity factor asked for.
    """

    record: CalibrationRecord
    kl: Mapping[str, float]
    mixes: Sequence[MixRecord]
    target: float


def make_record(
    skeleton: ModelSkeleton,
    plan: Plan,
    recipe: Recipe,
    facts: Facts,
    tokens: Sequence[int],
    known: Findings | None,
) -> CalibrationRecord:
    """The record of a run.

    Args:
        skeleton: the model.
        plan: what was made.
        recipe: what was asked for.
        facts: step -> what it noted; a decoder layer's under ``layer_step``.
        tokens: of every calibration sample; ignored with ``known``.
        known: of an earlier stage.
    """
    if known is not None:
        earlier = _earlier(known.record, plan)
        names = earlier.keys() | facts.keys()
        facts = {name: {**earlier.get(name, {}), **facts.get(name, {})} for name in names}
    reader, sizes = skeleton.reader, {spec.name: spec.nbytes for spec in plan.specs}
    linears = []
    for name, scheme in plan.schemes.items():
        source = f"{name}.weight" if f"{name}.weight" in reader else "model.embed_tokens.weight"
        shape, parts = reader.shape(source), ("weight", "weight_scale", "input_scale")
        noted = facts.get(name, {}) if scheme is not None else {}
        linears.append(
            LinearRecord(
                name=name,
                layer=layer_of(name),
                scheme=KEEP if scheme is None else schemes.name_of(scheme),
                elements=shape[0] * shape[1],
                bytes_before=shape[0] * shape[1] * reader.dtype(source).itemsize,
                bytes_after=sum(sizes.get(f"{name}.{part}", 0) for part in parts),
                kl=None if known is None else known.kl.get(name),
                **{k: v for k, v in noted.items() if k in LinearRecord.model_fields},
            )
        )
    cache: Literal["fp8"] | None = "fp8" if plan.kv_scales else None
    return CalibrationRecord(
        model=reader.folder.resolve().name,
        format=recipe.format,
        scheme=recipe.scheme,
        rounding="feedback" if recipe.feedback else "nearest",
        experts=plan.experts,
        samples=len(tokens) if known is None else known.record.samples,
        tokens=sum(tokens) if known is None else known.record.tokens,
        source_bytes=reader.total_bytes(),
        output_bytes=sum(sizes.values()),
        accuracy_target=recipe.accuracy_target if known is None else known.target,
        linears=tuple(linears),
        layers=tuple(
            LayerRecord(layer=layer, kv_cache=cache, **facts.get(layer_step(layer), {}))
            for layer in range(skeleton.layers)
        ),
        mixes=() if known is None else tuple(known.mixes),
    )


def layer_step(layer: int) -> str:
    """Name under which a decoder layer's facts are noted."""
    return f"model.layers.{layer}"


def _earlier(record: CalibrationRecord, plan: Plan) -> dict[str, dict[str, Any]]:
    """Facts as the steps of that run noted them, where this plan serves the linear alike."""
    facts = {}
    measured = {"output_error", "error", "clip_ratio"}
    for linear in record.linears:
        scheme = plan.schemes[linear.name]
        if scheme is not None and schemes.name_of(scheme) == linear.scheme:
            facts[linear.name] = linear.model_dump(include=measured, exclude_none=True)
    for layer in record.layers:
        facts[layer_step(layer.layer)] = layer.model_dump(exclude={"layer", "kv_cache"})
    return facts
