# SPDX-License-Identifier: MIT
"""What a calibration run found, as calibration.json beside recipe.yaml: the input of reports.

Nothing in it depends on the machine or the time: a resumed run writes the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from oss_fused.errors import CheckpointError

RECORD = "calibration.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(_Frozen):
    """Of the relative error ``|y' - y| / |y|`` of a linear's output, token by token."""

    p50: float
    p90: float
    p99: float


class Group(_Frozen):
    """The size of groups of a row's values, each with a scale, that rounds a weight best."""

    size: int
    error: float
    clip_ratio: float


class Histogram(_Frozen):
    """Counts of values in equal bins between ``low`` and ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


class LinearRecord(_Frozen):
    """One linear layer; figures that were not measured are None.

    Attributes:
        name: full module name.
        layer: decoder layer, None for lm_head.
        scheme: "FP8_DYNAMIC", "FP8_STATIC", "W8A16", another preset's name, or "BF16".
        elements: of the weight.
        bytes_before: of the weight in the source.
        bytes_after: of weight and scales in the output.
        weight_error: relative RMS error of the weight.
        format_errors: relative RMS error of plain rounding by format, "e4m3" and "e5m2".
        group: the best of ``--group-candidates`` that divide a row.
        output_error: relative RMS error of the output; weight and input are unquantised in the
            baseline.
        error: the same token by token.
        clip_ratio: share of the input's values that saturate; 0 for dynamic scales.
        kl: mean KL divergence of the model's next-token distribution when this linear (with those
            it is fused with) alone is quantised; measured by a policy search.
        weight_histogram: of the source's weight.
    """

    name: str
    layer: int | None
    scheme: str
    elements: int
    bytes_before: int
    bytes_after: int
    weight_error: float | None = None
    format_errors: dict[str, float] | None = None
    group: Group | None = None
    output_error: float | None = None
    error: Percentiles | None = None
    clip_ratio: float | None = None
    kl: float | None = None
    weight_histogram: Histogram | None = None


class LayerRecord(_Frozen):
    """One decoder layer.

    Attributes:
        layer: its index.
        cumulative_error: RMS over tokens of ``|h' - h| / |h|`` for the hidden states behind it and
            those of the unquantised model: what all quantised layers so far add up to.
        k_scale: static scale of the cached keys.
        v_scale: static scale of the cached values.
        kv_cache: "fp8", or "bf16" where the cache of this layer is kept in 16 bits.
        expert_tokens: calibration tokens routed to each expert.
        mxfp4_blocks: blocks of 32 values that were rounded to MXFP4.
        base_blocks: those of them that are, bit for bit, the base checkpoint's.
    """

    layer: int
    cumulative_error: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    kv_cache: Literal["fp8", "bf16"] | None = None
    expert_tokens: tuple[int, ...] | None = None
    mxfp4_blocks: int | None = None
    base_blocks: int | None = None


class MixRecord(_Frozen):
    """One mix of precisions that a policy search compared.

    Attributes:
        inputs_share: share of the linears' weights whose inputs stay in 16 bits.
        weights_share: share of the linears' weights that stay in bf16.
        factor: exp of the mean KL divergence from the unquantised model on held-out samples.
        chosen: it was written.
    """

    inputs_share: float
    weights_share: float
    factor: float
    chosen: bool


class CalibrationRecord(_Frozen):
    """A whole run.

    Attributes:
        model: name of the source folder.
        format: "oss-fp8", "compressed-tensors" or "mxfp4".
        scheme: of the recipe.
        rounding: of linears: "feedback" or "nearest".
        expert_rounding: of experts to MXFP4: "nearest", "mse" or "feedback"; None where they were
            not rounded to it.
        base: hash of the checkpoint that ``--base`` names, as ``source``.
        experts: how experts are stored, None without experts.
        samples: number of calibration samples, 0 without data.
        tokens: in them.
        source_bytes: of the source's shards.
        output_bytes: of the output's tensors.
        accuracy_target: perplexity factor asked for.
        requested: hash of the recipe asked for; after a search recipe.yaml holds what it found.
        source: hash of the source's config and weights, as ``CheckpointReader.digest`` makes it.
        data: hash of the samples' tokens.
        linears: every linear, in model order.
        layers: every decoder layer.
        mixes: what a policy search compared, cheapest first.
    """

    kind: Literal["oss_fused.calibration"] = "oss_fused.calibration"
    version: Literal[1] = 1
    model: str
    format: str
    scheme: str
    rounding: str
    expert_rounding: Literal["nearest", "mse", "feedback"] | None = None
    base: str | None = None
    experts: str | None
    samples: int
    tokens: int
    source_bytes: int
    output_bytes: int
    accuracy_target: float | None = None
    requested: str | None = None
    source: str | None = None
    data: str | None = None
    linears: tuple[LinearRecord, ...]
    layers: tuple[LayerRecord, ...]
    mixes: tuple[MixRecord, ...] = ()


def write_record(folder: Path, record: CalibrationRecord) -> None:
    """Write calibration.json into ``folder``."""
    (folder / RECORD).write_text(record.model_dump_json(indent=1) + "\n")


def load_record(folder: str | Path) -> CalibrationRecord:
    """Read calibration.json of a calibrated checkpoint.

    Raises:
        CheckpointError: it is missing or malformed; names the file and the field.
    """
    path = Path(folder) / RECORD
    try:
        return CalibrationRecord(**json.loads(path.read_text()))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{path}: is no calibration record: {error}") from None
