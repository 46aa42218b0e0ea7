# SPDX-License-Identifier: MIT
"""Scalers by name: each learns scales from tensors it sees, and its state can be saved.

``DynamicScaler`` follows a moving average of amax for the whole tensor, ``PerChannelScaler`` one of
each value of the last dimension. ``GroupScaler`` keeps the largest amax of each group of neighbours
in a row, or, where it is told the number of channels, a moving average of each group of them.

A moving average holds still where a new amax is ``outlier_factor`` times the average: one outlier
would move the scale as far. ``patience`` of them in a row are no outliers but a new level.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch

from oss_fused.errors import NumericalOverflowError, SchemeError, ShapeMismatchError
from oss_fused.quant.formats import (
    E4M3,
    FORMATS,
    FP8Format,
    amax_to_scale,
    dequantize,
    quantize,
)

_log = logging.getLogger(__name__)


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
        if not x.numel():
            return
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
        """State for ``load_state_dict``."""
        return {
            "name": self.name,
            "format": self.fmt.name,
            "margin": self.margin,
            "amax": self.amax,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            SchemeError: the state is of another kind of scaler or format, or incomplete.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing or state["name"] != self.name:
            raise SchemeError(
                f"state: name={state.get('name')!r}, missing {sorted(missing)}; expected the "
                f"state of a {self.name!r} scaler"
            )
        if state["format"] not in FORMATS:
            raise SchemeError(
                f"state: format={state['format']!r}; expected one of {', '.join(FORMATS)}"
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
        return quantize(x, "tensor", scale, self.fmt)[0]

    def _decode(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return dequantize(q, scale)


class AveragingScaler(Scaler):
    """Follows an exponential moving average of amax, and holds still for outliers.

    Attributes:
        seen: amax of the last tensor, whether it was merged or held.
        steps: tensors seen.
        anomalies: of each tensor with an outlier: step, how many scales were held, largest ratio.
    """

    def __init__(
        self,
        fmt: FP8Format = E4M3,
        margin: float = 1.0,
        momentum: float = 0.9,
        outlier_factor: float = 32.0,
        patience: int = 3,
    ) -> None:
        """Start with nothing seen.

        Args:
            fmt: the target format.
            margin: factor on amax.
            momentum: weight of the past, in [0, 1).
            outlier_factor: an amax of more than so many averages is held back.
            patience: so many of them in a row become the new average.

        Raises:
            SchemeError: a setting is out of range.
        """
        super().__init__(fmt, margin)
        if not 0 <= momentum < 1:
            raise SchemeError(f"momentum={momentum}: expected a number in [0, 1)")
        if not outlier_factor > 1:
            raise SchemeError(f"outlier_factor={outlier_factor}: expected a number above 1")
        if patience < 1:
            raise SchemeError(f"patience={patience}: expected at least 1")
        self.momentum, self.outlier_factor, self.patience = momentum, outlier_factor, patience
        self.seen: torch.Tensor | None = None
        self.steps = 0
        self.anomalies: list[dict[str, float]] = []
        self._streak: torch.Tensor | None = None

    def update(self, x: torch.Tensor) -> None:
        """Take a tensor [..., K] into account; see Scaler.update."""
        first = self.amax is None
        super().update(x)
        self.steps += 1
        if first:
            self.seen = self.amax

    def _merge(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        self.seen = new
        outlier = (old > 0) & (new > self.outlier_factor * old)
        streak = torch.zeros_like(old) if self._streak is None else self._streak
        self._streak = torch.where(outlier, streak + 1, 0.0)
        settled = self._streak >= self.patience
        held = outlier & ~settled
        if bool(held.any()):
            self._report(held, new / old)
        average = self.momentum * old + (1 - self.momentum) * new
        # of a channel that was zero so far there is no average
        average = torch.where((old == 0) | settled, new, average)
        return torch.where(held, old, average)

    def _report(self, held: torch.Tensor, ratio: torch.Tensor) -> None:
        largest = float(ratio[held].max())
        count = int(held.sum())
        self.anomalies.append({"step": self.steps, "held": count, "ratio": largest})
        _log.warning(
            "%s scaler: step %d: amax is %.0f times its average in %d of %d scales; held",
            self.name,
            self.steps,
            largest,
            count,
            held.numel(),
        )

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        return {
            **super().state_dict(),
            "momentum": self.momentum,
            "outlier_factor": self.outlier_factor,
            "patience": self.patience,
            "steps": self.steps,
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        for setting in ("momentum", "outlier_factor", "patience", "steps"):
            setattr(self, setting, state[setting])
        self.seen = None if state["seen"] is None else state["seen"].clone()
        self._streak = None


class DynamicScaler(AveragingScaler):
    """One scale [1] from a moving average of amax."""

    name = "dynamic"

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().view(1)


def _code_columns(x: torch.Tensor, scale: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
    wide = x.float()
    scaled = (wide * scale.reciprocal()).clamp_(-fmt.max, fmt.max)
    return scaled.masked_fill_(wide.isinf(), float("nan")).to(fmt.dtype)


class PerChannelScaler(AveragingScaler):
    """A scale per value of the last dimension [K], over all others: their sizes may change."""

    name = "per_channel"

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().reshape(-1, x.shape[-1]).amax(0)

    def _code(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _code_columns(x, scale, self.fmt)

    def _decode(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q.float() * scale


class GroupScaler(AveragingScaler):
    """A scale per ``group_size`` neighbours.

    Of a matrix: [N, K / group_size], from the largest amax seen. With ``channels`` = K: [K /
    group_size], a moving average over all other dimensions; ``per_channel`` expands it to [K], what
    a kernel takes.
    """

    name = "group"

    def __init__(
        self,
        fmt: FP8Format = E4M3,
        margin: float = 1.0,
        group_size: int = 128,
        channels: int | None = None,
        **averaging: Any,
    ) -> None:
        """``group_size`` divides the last dimension of every tensor to come.

        Raises:
            SchemeError: ``group_size`` is below 1, or does not divide ``channels``.
        """
        super().__init__(fmt, margin, **averaging)
        if group_size < 1:
            raise SchemeError(f"group_size={group_size}: expected a number above 0")
        if channels is not None and channels % group_size:
            raise SchemeError(f"group_size={group_size}: expected a divisor of channels={channels}")
        self.group_size, self.channels = group_size, channels

    def per_channel(self) -> torch.Tensor:
        """The scale of each value of a row: [..., K]."""
        return self.scale().repeat_interleave(self.group_size, -1)

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` restores."""
        return {
            **super().state_dict(),
            "group_size": self.group_size,
            "channels": self.channels,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.group_size, self.channels = state["group_size"], state["channels"]

    def _amax_of(self, x: torch.Tensor) -> torch.Tensor:
        if self.channels is not None and x.shape[-1] != self.channels:
            raise ShapeMismatchError(
                f"x.shape={tuple(x.shape)}: expected a last dimension of channels={self.channels}"
            )
        amax = self._grouped(x).abs().amax(-1)
        return amax if self.channels is None else amax.reshape(-1, amax.shape[-1]).amax(0)

    def _merge(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.maximum(old, new) if self.channels is None else super()._merge(old, new)

    def _spread(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return scale.repeat_interleave(self.group_size, -1)

    def _code(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.channels is not None:
            return _code_columns(x, self._spread(scale, x), self.fmt)
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
