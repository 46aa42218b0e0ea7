# SPDX-License-Identifier: MIT
"""Builds the content of calibration.json from the metrics of the steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oss_fused.quant import scheme as schemes
from oss_fused.quant.plan import CheckpointPlan
from oss_fused.quant.recipe import KEEP, Recipe
from oss_fused.quant.record import CalibrationRecord, LayerRecord, LinearRecord, MixRecord
from oss_fused.quant.skeleton import ModelSkeleton, layer_of, layer_step

StepMetrics = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class SearchResult:
    """Result of a policy search; the run that writes the chosen mix does not measure it again.

    Attributes:
        record: record of the run that quantised every linear.
        kl: linear -> KL divergence when only its group of fused linears is quantised.
        mixes: the mixes compared.
        target: the perplexity factor that the user asked for, None for none.
        requested: digest of the recipe that asked for the search, None for none.
    """

    record: CalibrationRecord
    kl: Mapping[str, float]
    mixes: Sequence[MixRecord]
    target: float | None
    requested: str | None = None


def build_record(
    skeleton: ModelSkeleton,
    plan: CheckpointPlan,
    recipe: Recipe,
    metrics: StepMetrics,
    tokens: Sequence[int],
    search: SearchResult | None,
) -> CalibrationRecord:
    """The record of a run.

    Args:
        skeleton: the model.
        plan: the plan that the run carried out.
        recipe: the settings of the run.
        metrics: step -> its metrics; those of a decoder layer are under ``layer_step``.
        tokens: number of tokens of every calibration sample; ignored with ``search``.
        search: result of the policy search, None if there was none.
    """
    if search is not None:
        earlier = _earlier(search.record, plan)
        names = earlier.keys() | metrics.keys()
        metrics = {name: {**earlier.get(name, {}), **metrics.get(name, {})} for name in names}
    reader, sizes = skeleton.reader, {spec.name: spec.nbytes for spec in plan.specs}
    cache: Literal["fp8"] | None = "fp8" if plan.kv_scales else None
    return CalibrationRecord(
        model=reader.folder.resolve().name,
        format=recipe.format,
        scheme=recipe.scheme,
        rounding="feedback" if recipe.feedback else "nearest",
        expert_rounding=plan.expert_rounding,
        experts=plan.experts,
        samples=len(tokens) if search is None else search.record.samples,
        tokens=sum(tokens) if search is None else search.record.tokens,
        source_bytes=reader.total_bytes(),
        output_bytes=sum(sizes.values()),
        accuracy_target=recipe.accuracy_target if search is None else search.target,
        requested=(search and search.requested) or recipe.digest(),
        linears=tuple(_linears(skeleton, plan, metrics, sizes, search)),
        layers=tuple(
            LayerRecord(
                layer=layer,
                kv_cache=cache,
                **{
                    **metrics.get(layer_step(layer), {}),
                    **metrics.get(str(skeleton.experts_of(layer)), {}),
                },
            )
            for layer in range(skeleton.layers)
        ),
        mixes=() if search is None else tuple(search.mixes),
    )


def _linears(
    skeleton: ModelSkeleton,
    plan: CheckpointPlan,
    metrics: StepMetrics,
    sizes: Mapping[str, int],
    search: SearchResult | None,
) -> Iterator[LinearRecord]:
    """The records of the linears; ``sizes``: tensor written -> its bytes."""
    reader = skeleton.reader
    for name, scheme in plan.schemes.items():
        source = f"{name}.weight" if f"{name}.weight" in reader else "model.embed_tokens.weight"
        shape, parts = reader.shape(source), ("weight", "weight_scale", "input_scale")
        noted = metrics.get(name, {}) if scheme is not None else {}
        yield LinearRecord(
            name=name,
            layer=layer_of(name),
            scheme=KEEP if scheme is None else schemes.name_of(scheme),
            elements=shape[0] * shape[1],
            bytes_before=shape[0] * shape[1] * reader.dtype(source).itemsize,
            bytes_after=sum(sizes.get(f"{name}.{part}", 0) for part in parts),
            kl=None if search is None else search.kl.get(name),
            **{k: v for k, v in noted.items() if k in LinearRecord.model_fields},
        )


def _earlier(record: CalibrationRecord, plan: CheckpointPlan) -> dict[str, dict[str, Any]]:
    """Metrics in ``record`` of the linears that ``plan`` stores in the same scheme."""
    metrics = {}
    measured = {"output_error", "error", "clip_ratio"}
    for linear in record.linears:
        scheme = plan.schemes[linear.name]
        if scheme is not None and schemes.name_of(scheme) == linear.scheme:
            metrics[linear.name] = linear.model_dump(include=measured, exclude_none=True)
    for layer in record.layers:
        metrics[layer_step(layer.layer)] = layer.model_dump(exclude={"layer", "kv_cache"})
    return metrics
