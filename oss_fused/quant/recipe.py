# SPDX-License-Identifier: MIT
"""The recipe: every setting that decides what a calibrated checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oss_fused.errors import SchemeError
from oss_fused.quant.scheme import QuantizationScheme, preset

_YOUNGER = (
    *("clip_target", "group_candidates", "smoothing", "self_check", "base"),
    "keep_sensitive",
)
# settings that mean nothing where no linear is quantised
OF_LINEARS = (
    *("scheme", "targets", "ignore", "overrides", "lm_head", "kv_cache"),
    *("accuracy_target", "keep_sensitive", "clip_target", "group_candidates", "smoothing"),
)
KEEP = "BF16"  # in an override: leave these linears as they are


class Override(BaseModel):
    """Another scheme for some linears: a preset's name, or "BF16" for none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheme: str
    targets: tuple[str, ...] = Field(min_length=1)

    @property
    def weight_scheme(self) -> QuantizationScheme | None:
        """The scheme of that name, None for "BF16"."""
        if self.scheme.upper() == KEEP:
            return None
        try:
            return preset(self.scheme)
        except SchemeError as error:
            raise SchemeError(f"{error}, {KEEP}") from None

    @model_validator(mode="after")
    def _known_scheme(self) -> Override:
        _ = self.weight_scheme
        return self


class Recipe(BaseModel):
    """Settings of a run, as read from and written to recipe.yaml.

    ``format`` "mxfp4" keeps all but the experts of gpt-oss in bf16, as OpenAI publishes it.

    ``overrides`` give linears that ``targets`` chose another scheme; the last that matches wins.

    ``lm_head`` and ``experts`` of "auto" follow the model: gpt-oss has its lm_head in FP8 and its
    experts as they are; dense models keep lm_head. ``rounding`` of "auto" takes error feedback
    where there is a dataset, and else rounds to nearest, MXFP4 with the exponents of least squared
    error ("mse"). ``base`` is the MXFP4 checkpoint that was fine-tuned. ``accuracy_target`` is the
    perplexity factor, estimated as exp(mean KL), that a search for overrides must meet; the recipe
    it writes holds what it found. ``keep_sensitive`` is a rule per layer type for that search,
    pattern -> limit: linears that match stay in bf16 in every mix if their sensitivity is above the
    limit. A linear's sensitivity is the share of the others, 0 to 1, that cost the prediction less
    per weight (``quant.sensitivity``); linears served as one matrix have one sensitivity.

    ``clip_target`` is the share of values that may saturate: static scales (of inputs, keys and
    values) have the least squared error within it, instead of clipping nothing. Of
    ``group_candidates``, sizes of groups of a weight's inputs, calibration.json tells the best.
    ``smoothing`` is the alpha of ``quant.smoothing``. ``self_check`` of "auto" writes
    self_check.json where there is a dataset: it runs the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    format: Literal["oss-fp8", "compressed-tensors", "mxfp4"] = "oss-fp8"
    scheme: str = "FP8_DYNAMIC"
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    lm_head: Literal["auto", "fp8", "bf16"] = "auto"
    experts: Literal["auto", "mxfp4", "fp8", "bf16"] = "auto"
    kv_cache: Literal["none", "fp8"] = "none"
    rounding: Literal["auto", "nearest", "mse", "feedback"] = "auto"
    base: str | None = None
    accuracy_target: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    keep_sensitive: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field(default={})
    clip_target: float | None = Field(default=None, ge=0, lt=1)
    group_candidates: tuple[Annotated[int, Field(ge=1)], ...] = ()
    smoothing: float | None = Field(default=None, ge=0, le=1)
    self_check: Literal["auto", "on", "off"] = "auto"
    dataset: str | None = None
    num_samples: int = Field(default=64, ge=1)
    max_seq_length: int = Field(default=512, ge=2)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _data_where_needed(self) -> Recipe:
        given = {f"scheme={self.scheme!r}": self.weight_scheme} | {
            f"overrides={o.scheme}={o.targets[0]!r}": o.weight_scheme for o in self.overrides
        }
        static = [name for name, scheme in given.items() if scheme and scheme.needs_data]
        if self.dataset is None and static:
            raise ValueError(f"{static[0]} has static input scales: it needs a dataset")
        if self.dataset is None and self.rounding == "feedback":
            raise ValueError("rounding='feedback' weighs errors by inputs: it needs a dataset")
        if self.accuracy_target is not None and self.dataset is None:
            raise ValueError(f"accuracy_target={self.accuracy_target}: needs a dataset")
        if self.accuracy_target is not None and static:
            raise ValueError(
                f"accuracy_target={self.accuracy_target}: expected a scheme with dynamic input "
                f"scales, such as FP8_DYNAMIC"
            )
        if self.keep_sensitive and self.accuracy_target is None:
            raise ValueError(
                f"keep_sensitive={self.keep_sensitive}: needs accuracy_target, whose search "
                f"measures how sensitive linears are"
            )
        # lm_head='bf16' is what the format does; the plan refuses fp8
        unplaced = [name for name in OF_LINEARS if name != "lm_head" and self._is_set(name)]
        if self.format == "mxfp4" and unplaced:
            raise ValueError(
                f"format='mxfp4' has no place for {unplaced[0]}={getattr(self, unplaced[0])!r}: it "
                f"quantises no linear; expected format='oss-fp8', or no such setting"
            )
        if self.dataset is None and self.kv_cache == "fp8":
            raise ValueError("kv_cache='fp8' has calibrated scales: it needs a dataset")
        if self.smoothing is not None and self.dataset is None:
            raise ValueError(f"smoothing={self.smoothing}: looks at inputs: it needs a dataset")
        if self.smoothing is not None and self.accuracy_target is not None:
            raise ValueError(
                f"smoothing={self.smoothing}: not with accuracy_target, whose mixes put exact "
                f"weights beside rounded ones; give overrides instead"
            )
        clips = static or self.kv_cache == "fp8" or self.group_candidates
        if self.clip_target is not None and not clips:
            raise ValueError(
                f"clip_target={self.clip_target}: no scale is static; expected "
                f"scheme='FP8_STATIC', kv_cache='fp8' or group_candidates beside it"
            )
        return self

    @property
    def weight_scheme(self) -> QuantizationScheme:
        """The scheme of that name."""
        return preset(self.scheme)

    @property
    def feedback(self) -> bool:
        """True if weights are rounded with error feedback."""
        return self.rounding == "feedback" or (self.rounding == "auto" and self.dataset is not None)

    @property
    def checks_itself(self) -> bool:
        """True if the output holds self_check.json."""
        return self.self_check == "on" or (self.self_check == "auto" and self.dataset is not None)

    @property
    def expert_rounding(self) -> Literal["nearest", "mse", "feedback"]:
        """How values are rounded to MXFP4, where they are."""
        if self.feedback:
            return "feedback"
        return "nearest" if self.rounding == "nearest" else "mse"

    def digest(self, *parts: Any) -> str:
        """Short hash of the recipe and of whatever else decides the result."""
        text = json.dumps([self._settings(), *parts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The recipe as text that ``load_recipe`` reads back."""
        return yaml.safe_dump(self._settings(), sort_keys=False)

    def _settings(self) -> dict[str, Any]:
        """All settings. Newer ones are left out unless set, so that older runs can be resumed."""
        settings = self.model_dump(mode="json")
        unset = [name for name in _YOUNGER if not self._is_set(name)]
        return {name: value for name, value in settings.items() if name not in unset}

    def _is_set(self, name: str) -> bool:
        """Whether a setting is another than by default."""
        return bool(getattr(self, name) != type(self).model_fields[name].get_default())


def make_recipe(settings: dict[str, Any]) -> Recipe:
    """Validate settings.

    Raises:
        SchemeError: names the setting, its value and what was expected.
    """
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            shown = f"{where}={item['input']!r}: " if where else ""
            lines.append(f"{shown}{item['msg'].removeprefix('Value error, ')}")
        raise SchemeError("; ".join(lines)) from None


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Settings of a recipe file, for ``make_recipe``.

    Raises:
        SchemeError: the file is missing, is not YAML or holds no mapping.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SchemeError(f"--recipe={str(path)!r}: cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise SchemeError(f"--recipe={str(path)!r}: expected a mapping of settings")
    return loaded
