# SPDX-License-Identifier: MIT
"""FP8 operands of attention: scales that are learnt from step to step, and kept in a file."""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError, SchemeError, ShapeMismatchError
from oss_fused.files import write_json
from oss_fused.quant.formats import E4M3, FORMATS, FP8Format
from oss_fused.quant.scalers import AveragingScaler, DynamicScaler, GroupScaler, PerChannelScaler

MODES = ("tensor", "channel", "group")
_FORMAT = 1
_LOGGED_STEPS = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operands:
    """What the kernel takes: FP8 codes with scales of the last dimension, or floating values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None

    def wide(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k and v as the numbers that they stand for."""
        pairs = ((self.q, self.q_scale), (self.k, self.k_scale), (self.v, self.v_scale))
        return tuple(t if s is None else (t.float() * s).to(dtype) for t, s in pairs)


def default_group_size(channels: int) -> int:
    """16 where it divides ``channels``, else 8.

    Raises:
        ShapeMismatchError: 8 does not divide ``channels``.
    """
    if channels % 8:
        raise ShapeMismatchError(
            f"channels={channels}: expected a multiple of 8, or a group size that divides it"
        )
    return 16 if channels % 16 == 0 else 8


class AttentionFP8:
    """Quantises V, and Q and K if asked, for ``flash_attention``; keeps moving averages.

    Attributes:
        history: of the last 100 steps and each tensor: step, tensor, means and maxima of amax and
            of the scale, share of values that were clipped.
    """

    def __init__(
        self,
        mode: str = "channel",
        fmt: FP8Format | str = E4M3,
        *,
        group_size: int | None = None,
        momentum: float = 0.9,
        margin: float = 1.1,
        quantize_qk: bool = False,
        quantize_output: bool = False,
    ) -> None:
        """Start with nothing seen.

        Args:
            mode: "tensor", "channel" or "group": how many values of the last dimension share a
                scale.
            fmt: E4M3, the precise format, or E5M2, the wide one; also by name, "e4m3" or "e5m2".
            group_size: of "group"; default 16 where it divides the dimension, else 8.
            momentum: weight of the past in the averages of amax.
            margin: factor on amax: room for a tensor whose amax is above the average.
            quantize_qk: quantise q and k as well.
            quantize_output: quantise the result to E4M3 on store. It is a mean of rows of V, so
                that V's scales hold it.

        Raises:
            SchemeError: unknown mode or format, or a group size of another mode.
        """
        if mode not in MODES:
            raise SchemeError(f"fp8={mode!r}: expected one of {', '.join(MODES)}")
        if group_size is not None and (mode != "group" or group_size < 1):
            raise SchemeError(
                f"group_size={group_size}: expected a number above 0 of mode 'group', "
                f"or None for mode {mode!r}"
            )
        known = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
        if not isinstance(known, FP8Format):
            raise SchemeError(f"fmt={fmt!r}: expected one of {', '.join(FORMATS)}, or an FP8Format")
        self.mode, self.fmt, self.group_size = mode, known, group_size
        self.momentum, self.margin = momentum, margin
        self.quantize_qk, self.quantize_output = quantize_qk, quantize_output
        self.scalers: dict[str, AveragingScaler] = {}
        self.history: deque[dict[str, Any]] = deque(maxlen=_LOGGED_STEPS)

    def quantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0
    ) -> Operands:
        """Take the tensors into account, and give what the kernel takes.

        Raises:
            NumericalOverflowError: a tensor to quantise holds NaN or Inf.
            ShapeMismatchError: the last dimension changed, or groups do not divide it.
        """
        v_codes, v_scale = self._coded("v", v)
        out_scale = None
        if self.quantize_output:
            # E4M3 whatever V is; dropout divides weights by 1 - p
            out_scale = v_scale * (self.fmt.max / E4M3.max / (1 - dropout_p))
        if not self.quantize_qk:
            return Operands(q, k, v_codes, None, None, v_scale, out_scale)
        q_codes, q_scale = self._coded("q", q)
        k_codes, k_scale = self._coded("k", k)
        return Operands(q_codes, k_codes, v_codes, q_scale, k_scale, v_scale, out_scale)

    def _coded(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach()
        scaler = self.scalers.get(name)
        if scaler is None:
            scaler = self.scalers[name] = self._scaler(x.shape[-1])
        if scaler.amax is not None:
            # a state that was loaded lies on the CPU
            scaler.amax = scaler.amax.to(x.device)
        scaler.update(x)
        scale = scaler.scale()
        if isinstance(scaler, GroupScaler):
            scale = scaler.per_channel()
        expanded = scale.to(x.device).expand(x.shape[-1]).contiguous()
        self._record(name, scaler, x)
        return scaler.quantize(x), expanded

    def _scaler(self, channels: int) -> AveragingScaler:
        common: dict[str, Any] = {"fmt": self.fmt, "margin": self.margin, "momentum": self.momentum}
        if self.mode == "tensor":
            return DynamicScaler(**common)
        if self.mode == "channel":
            return PerChannelScaler(**common)
        size = self.group_size or default_group_size(channels)
        if channels % size:
            raise ShapeMismatchError(
                f"fp8_group_size={size}: expected a divisor of the last dimension, {channels}"
            )
        return GroupScaler(group_size=size, channels=channels, **common)

    def _record(self, name: str, scaler: AveragingScaler, x: torch.Tensor) -> None:
        seen, scale = scaler.seen, scaler.scale()
        assert seen is not None  # update came before
        entry = {
            "step": scaler.steps,
            "tensor": name,
            "amax_mean": float(seen.mean()),
            "amax_max": float(seen.max()),
            "scale_mean": float(scale.mean()),
            "scale_max": float(scale.max()),
            "clip_ratio": scaler.clip_ratio(x),
        }
        self.history.append(entry)
        _log.debug("attention FP8: %s", entry)

    def save(self, path: str | Path) -> None:
        """Write amax, averages and settings as JSON, in one step."""
        save_per_channel_state(self.scalers, path)

    def load(self, path: str | Path) -> None:
        """Go on from a file that ``save`` wrote.

        Raises:
            CheckpointError: the file is unreadable or no such state.
            SchemeError: it is of another mode.
        """
        found = load_per_channel_state(path)
        wanted = type(self._scaler(self.group_size or 16)).name
        for name, scaler in found.items():
            if scaler.name != wanted:
                raise SchemeError(
                    f"{path}: {name!r} is of a {scaler.name!r} scaler, expected {wanted!r}"
                )
        self.scalers = found


def save_per_channel_state(scalers: dict[str, AveragingScaler], path: str | Path) -> None:
    """Write each scaler's last amax, moving average and settings as JSON, in one step."""
    document = {
        name: {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in scaler.state_dict().items()
        }
        for name, scaler in scalers.items()
    }
    write_json(Path(path), {"format": _FORMAT, "scalers": document})


def load_per_channel_state(path: str | Path) -> dict[str, AveragingScaler]:
    """Scalers as ``save_per_channel_state`` wrote them.

    Raises:
        CheckpointError: the file is missing, not JSON, or holds no such state; names it.
    """
    kinds = {kind.name: kind for kind in (DynamicScaler, PerChannelScaler, GroupScaler)}
    found: dict[str, AveragingScaler] = {}
    try:
        document = json.loads(Path(path).read_text())
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r}, expected {_FORMAT}")
        for name, state in document["scalers"].items():
            if state["format"] not in FORMATS:
                raise ValueError(f"scaler {name!r} of format {state['format']!r}")
            for key in ("amax", "seen"):
                value = state[key]
                state[key] = None if value is None else torch.tensor(value, dtype=torch.float32)
            scaler = kinds[state["name"]]()
            scaler.load_state_dict(state)
            found[name] = scaler
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected a state of attention scalers ({type(error).__name__}: {error})"
        ) from error
    return found
