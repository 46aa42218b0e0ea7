# SPDX-License-Identifier: MIT
"""What is quantised and how: schemes, presets, and the patterns that choose modules.

The dictionaries written into config.json use the vocabulary of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, model_validator

from oss_fused.errors import SchemeError

_REGEX_SECONDS = 0.5  # seconds to match one name; a reasonable pattern takes microseconds

Strategy = Literal["tensor", "channel", "token"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuantizationArgs(_Frozen):
    """How one tensor is quantised.

    ``strategy`` is the scope of a scale; ``dynamic`` scales are taken from the tensor at run
    time, static ones are stored in the checkpoint.
    """

    num_bits: Literal[8] = 8
    type: Literal["float"] = "float"
    strategy: Strategy
    dynamic: bool = False
    symmetric: Literal[True] = True

    @model_validator(mode="after")
    def _token_means_dynamic(self) -> QuantizationArgs:
        if (self.strategy == "token") != self.dynamic:
            raise ValueError(
                f"strategy={self.strategy!r}, dynamic={self.dynamic}: dynamic scales are per "
                f"token, static ones per tensor or channel"
            )
        return self


WEIGHT_CHANNEL = QuantizationArgs(strategy="channel")
INPUT_TOKEN = QuantizationArgs(strategy="token", dynamic=True)
INPUT_TENSOR = QuantizationArgs(strategy="tensor")
KV_TENSOR = QuantizationArgs(strategy="tensor")


class QuantizationScheme(_Frozen):
    """How a linear layer is quantised: its weight and, unless None, its input."""

    weights: QuantizationArgs = WEIGHT_CHANNEL
    input_activations: QuantizationArgs | None = INPUT_TOKEN

    @model_validator(mode="after")
    def _served_combinations(self) -> QuantizationScheme:
        if self.weights.strategy != "channel":
            raise ValueError(
                f"weights.strategy={self.weights.strategy!r}: expected 'channel', a scale per "
                f"output row"
            )
        inputs = self.input_activations
        if inputs is not None and inputs.strategy == "channel":
            raise ValueError(
                "input_activations.strategy='channel': expected 'token' (dynamic) or 'tensor' "
                "(static)"
            )
        return self

    @property
    def needs_data(self) -> bool:
        """True if the input scale is static, so that calibration must see activations."""
        return self.input_activations is not None and not self.input_activations.dynamic


FP8_DYNAMIC = QuantizationScheme()
FP8_STATIC = QuantizationScheme(input_activations=INPUT_TENSOR)
W8A16 = QuantizationScheme(input_activations=None)
PRESETS: Mapping[str, QuantizationScheme] = {
    "FP8_DYNAMIC": FP8_DYNAMIC,
    "FP8_STATIC": FP8_STATIC,
    "W8A16": W8A16,
}

# schemes others write, which this package's kernels do not compute
_UNSERVED: Mapping[str, str] = {
    "FP8": "one scale for a whole weight is coarser than need be",
    "FP8_TENSOR": "one scale for a whole weight is coarser than need be",
    "FP8_GROUP": "scales per group of inputs are not served",
    "FP8_BLOCK": "scales per block of 128 x 128 are not served",
}


def preset(name: str) -> QuantizationScheme:
    """Return the preset of that name (any case, ``-`` as good as ``_``).

    Raises:
        SchemeError: unknown name; the message lists the presets.
    """
    key = name.upper().replace("-", "_")
    if key in _UNSERVED:
        raise SchemeError(
            f"scheme={name!r}: {_UNSERVED[key]}; the kernels take a scale per output row; "
            f"expected one of {', '.join(PRESETS)}"
        )
    if key not in PRESETS:
        raise SchemeError(f"scheme={name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[key]


def name_of(scheme: QuantizationScheme) -> str:
    """The name of a preset."""
    return next(name for name, known in PRESETS.items() if known == scheme)


def matches(pattern: str, name: str, class_name: str) -> bool:
    """True if ``pattern`` is the module's name or class, or ``re:`` and a regex of its name."""
    if pattern.startswith("re:"):
        return matches_regex(pattern, name)
    return pattern in (name, class_name)


def matches_regex(pattern: str, name: str) -> bool:
    """True if ``pattern``, ``re:`` and a regular expression, matches from the start of ``name``.

    Raises:
        SchemeError: it is no regular expression, or takes too long: patterns come from
            checkpoints, and some backtrack for ever.
    """
    try:
        return regex.match(pattern[3:], name, timeout=_REGEX_SECONDS) is not None
    except regex.error as error:
        raise SchemeError(f"pattern={pattern!r}: not a regular expression: {error}") from None
    except TimeoutError:
        raise SchemeError(
            f"pattern={pattern!r}: takes more than {_REGEX_SECONDS} s on {name!r}; expected one "
            f"without nested repeats"
        ) from None


def select(
    targets: Iterable[str], ignore: Iterable[str], modules: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Split ``modules`` (name -> class) into those to quantise and those to leave.

    Returns:
        Names matched by ``targets`` and not by ``ignore``, and all others, in model order.

    Raises:
        SchemeError: a pattern is no regular expression, or matches no module.
    """
    for option, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            check_pattern(option, pattern, modules)
    chosen = [
        name
        for name, kind in modules.items()
        if any(matches(p, name, kind) for p in targets)
        and not any(matches(p, name, kind) for p in ignore)
    ]
    picked = set(chosen)
    return chosen, [name for name in modules if name not in picked]


def matches_any(option: str, pattern: str, modules: Mapping[str, str]) -> bool:
    """Whether ``pattern``, a value of ``option``, means one of ``modules`` (name -> class).

    Raises:
        SchemeError: it is no regular expression; names the option.
    """
    try:
        return any(matches(pattern, name, kind) for name, kind in modules.items())
    except SchemeError as error:
        raise SchemeError(f"{option}{str(error).removeprefix('pattern')}") from None


def check_pattern(option: str, pattern: str, modules: Mapping[str, str]) -> None:
    """Raise SchemeError unless ``pattern`` means one of ``modules`` (name -> class)."""
    if not matches_any(option, pattern, modules):
        examples = ", ".join(list(modules)[:3])
        raise SchemeError(
            f"{option}={pattern!r}: matches no linear layer; expected a layer name, a class name "
            f"or 're:' and a regular expression; layers are named like {examples}"
        )


# linears that vLLM fuses into one: they must share a scheme
FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def siblings(name: str, modules: Iterable[str]) -> list[str]:
    """The linears fused with ``name`` in the served model, itself included, among ``modules``."""
    parent, _, leaf = name.rpartition(".")
    known = set(modules)
    for group in FUSED_SIBLINGS:
        if leaf in group:
            return [full for part in group if (full := f"{parent}.{part}") in known]
    return [name]


def check_siblings(schemes: Mapping[str, QuantizationScheme | None]) -> None:
    """Raise SchemeError if linears that are served as one have different schemes.

    Args:
        schemes: every linear of the model -> its scheme, None for not quantised.
    """
    for name, scheme in schemes.items():
        for other in siblings(name, schemes):
            if schemes[other] != scheme:
                raise SchemeError(
                    f"targets/ignore/overrides: {name} and {other} differ, but they are served as "
                    f"one matrix; expected both or neither"
                )


def config_groups(schemes: Mapping[str, QuantizationScheme | None]) -> dict[str, dict[str, Any]]:
    """``config_groups`` of config.json: the commonest scheme targets "Linear", others layers."""
    by_scheme: dict[QuantizationScheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            by_scheme.setdefault(scheme, []).append(name)
    ordered = sorted(by_scheme.items(), key=lambda item: -len(item[1]))
    return {
        f"group_{index}": {
            "targets": ["Linear"] if index == 0 else names,
            **scheme.model_dump(mode="json"),
        }
        for index, (scheme, names) in enumerate(ordered)
    }
