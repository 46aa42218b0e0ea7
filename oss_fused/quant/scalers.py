# SPDX-License-Identifier: MIT
"""Scalers by name: each learns scales from tensors it sees, and its state can be saved.

``DynamicScaler`` follows a moving average of amax for the whole tensor, ``PerChannelScaler`` keeps
the largest amax of each row, ``GroupScaler`` of each group of neighbouring values in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from oss_fused.errors import NumericalOverflowError, SchemeError, ShapeMismatchError
from oss_fused.quant.formats import (
    E4M3,
    E5M2,
    FORMATS,
    FP8Format,
    amax_to_scale,
    dequantize,
    quantize,
    relative_error,
)


class Scaler(ABC):
    """Observes tensors and turns what it saw into a scale.

    Attributes:
        fmt: the target format.
        margin: factor on amax; above 1 leaves room for values not seen yet.
    """

    name: str

    def __init__(self, fmt: FP8Format = E4M3, margin: float = 1.0) -> None:
        """Start with nothing seen.

        Raises:
            SchemeError: margin is not positive.
        """
        if not margin > 0:
            raise SchemeError(f"margin={margin}: expected a number above 0")
        self.fmt, self.margin = fmt, margin
        self.amax: torch.Tensor | None = None

    def update(self, x: torch.Tensor) -> None:
        """Take a tensor [..., K] into account.

        Raises:
            NumericalOverflowError: x has NaN or Inf; the state is left as it was.
            ShapeMismatchError: x does not fit what was seen before.
        """
        amax = self._amax_of(x.detach().float())
        if not bool(amax.isfinite().all()):
            raise NumericalOverflowError(f"{self.name} scaler: x holds NaN or Inf")
        if self.amax is None:
            self.amax = amax
            return
        if amax.shape != self.amax.shape:
            raise ShapeMismatchError(
                f"{self.name} scaler: x {tuple(x.shape)} gives scales of shape "
                f"{tuple(amax.shape)}; expected {tuple(self.amax.shape)}, as before"
            )
        self.amax = self._merge(self.amax, amax)

    def scale(self) -> torch.Tensor:
        """The scale learnt.

        Raises:
            NumericalOverflowError: nothing was seen.
        """
        if self.amax is None:
            raise NumericalOverflowError(f"{self.name} scaler: nothing was seen; call update first")
        return amax_to_scale(self.amax * self.margin, self.fmt)

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Codes of ``x`` under the scale learnt; larger values saturate."""
        return self._code(x, self.scale())

    def dequantize(self, q: torch.Tensor) -> torch.Tensor:
        """Values of codes [..., K] in float32."""
        return self._decode(q, self.scale())

    def clip_ratio(self, x: torch.Tensor) -> float:
        """Share of x's values that saturate."""
        # up to half a step above the largest value, rounding alone would give that value
        top = self.fmt.max * (1 + 2.0 ** -(self.fmt.mantissa_bits + 2))
        limit = self._spread(self.scale(), x) * top
        return float((x.abs().float() > limit).float().mean()) if x.numel() else 0.0

    def absorb_overflow(self, x: torch.Tensor) -> bool:
        """Widen the scale if ``x`` would saturate; True if it did (requirement R3.5)."""
        if self.clip_ratio(x) == 0:
            return False
        amax = self._amax_of(x.detach().float()) / self.margin
        if not bool(amax.isfinite().all()):
            raise NumericalOverflowError(f"{self.name} scaler: x holds NaN or Inf")
        assert self.amax is not None  # clip_ratio needed a scale
        self.amax = torch.maximum(self.amax, amax)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        return {
            "name": self.name,
            "format": self.fmt.name,
            "margin": self.margin,
            "amax": self.amax,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            SchemeError: the state is of another kind of scaler, or incomplete.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing or state["name"] != self.name:
            raise SchemeError(
                f"state: name={state.get('name')!r}, missing {sorted(missing)}; expected the "
                f"state of a {self.name!r} scaler"
            )
        self.fmt, self.margin = FORMATS[state["format"]], state["margin"]
        amax = state["amax"]
        self.amax = None if amax is None else amax.clone()

    @abstractmethod
    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        """Largest magnitudes of float32 x, in the shape of the scale."""

    def _merge(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.maximum(old, new)

    def _spread(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The scale, broadcastable against x."""
        return scale

    def _code(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return quantize(x, "tensor" if scale.numel() == 1 else "channel", scale, self.fmt)[0]

    def _decode(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return dequantize(q, scale)


class DynamicScaler(Scaler):
    """One scale [1] from an exponential moving average of amax."""

    name = "dynamic"

    def __init__(self, fmt: FP8Format = E4M3, margin: float = 1.0, momentum: float = 0.9) -> None:
        """``momentum`` is the weight of the past, in [0, 1)."""
        super().__init__(fmt, margin)
        if not 0 <= momentum < 1:
            raise SchemeError(f"momentum={momentum}: expected a number in [0, 1)")
        self.momentum = momentum

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().view(1)

    def _merge(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return self.momentum * old + (1 - self.momentum) * new

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        return {**super().state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.momentum = state["momentum"]


class PerChannelScaler(Scaler):
    """A scale per row [N, 1] of a matrix [N, K], from the largest amax seen."""

    name = "per_channel"

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1, keepdim=True)


class GroupScaler(Scaler):
    """A scale per ``group_size`` neighbours of a row: [N, K / group_size]."""

    name = "group"

    def __init__(self, fmt: FP8Format = E4M3, margin: float = 1.0, group_size: int = 128) -> None:
        """``group_size`` divides the last dimension of every tensor to come."""
        super().__init__(fmt, margin)
        if group_size < 1:
            raise SchemeError(f"group_size={group_size}: expected a number above 0")
        self.group_size = group_size

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        return {**super().state_dict(), "group_size": self.group_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.group_size = state["group_size"]

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        return self._grouped(x).abs().amax(-1)

    def _spread(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return scale.repeat_interleave(self.group_size, -1)

    def _code(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        groups = self._grouped(x).reshape(-1, self.group_size)
        return quantize(groups, "channel", scale.reshape(-1, 1), self.fmt)[0].view(x.shape)

    def _decode(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q.float() * self._spread(scale, q)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % self.group_size:
            raise ShapeMismatchError(
                f"x.shape={tuple(x.shape)}: expected a last dimension that is a multiple of "
                f"group_size={self.group_size}"
            )
        return x.unflatten(-1, (-1, self.group_size))


SCALERS: dict[str, type[Scaler]] = {
    scaler.name: scaler for scaler in (DynamicScaler, PerChannelScaler, GroupScaler)
}


def make_scaler(name: str, **settings: Any) -> Scaler:
    """The scaler of that name.

    Raises:
        SchemeError: unknown name; the message lists them.
    """
    if name not in SCALERS:
        raise SchemeError(f"scaler={name!r}: expected one of {', '.join(SCALERS)}")
    return SCALERS[name](**settings)


def choose_format(x: torch.Tensor, strategy: str = "channel") -> tuple[FP8Format, float]:
    """E4M3 or E5M2, whichever keeps ``x`` better, with its relative RMS error; ties take E4M3."""
    errors = {
        fmt.name: relative_error(x, dequantize(*quantize(x, strategy, fmt=fmt)))
        for fmt in (E4M3, E5M2)
    }
    best = min(errors, key=lambda name: errors[name])
    return FORMATS[best], errors[best]


def choose_group_size(
    samples: Iterable[torch.Tensor],
    clip_target: float,
    candidates: Iterable[int],
    margin: float = 1.0,
    fmt: FP8Format = E4M3,
) -> tuple[int, float, float]:
    """The group size with the least error among those that clip at most ``clip_target``.

    Scales are learnt from the first sample and judged on the others.

    Returns:
        Group size, relative RMS error and clip ratio.

    Raises:
        SchemeError: no candidate keeps the target; says what the best one clips.
    """
    first, *others = samples
    judged = others or [first]
    results = []
    for size in candidates:
        scaler = GroupScaler(fmt, margin, size)
        scaler.update(first)
        clipped = sum(scaler.clip_ratio(x) for x in judged) / len(judged)
        errors = [relative_error(x, scaler.dequantize(scaler.quantize(x))) for x in judged]
        results.append((sum(errors) / len(errors), size, clipped))
    within = [result for result in results if result[2] <= clip_target]
    if not within:
        least = min(results, key=lambda result: result[2])
        raise SchemeError(
            f"--clip-target={clip_target}: not met by any of --group-candidates; the best, "
            f"{least[1]}, clips {least[2]:.2%}"
        )
    error, size, clipped = min(within)
    return size, error, clipped
