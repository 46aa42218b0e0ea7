# SPDX-License-Identifier: MIT
"""What samples of activations say about each layer, and which layers misbehave."""

from __future__ import annotations

import numpy as np
from vllm.logger import init_logger

from oss_fused.plugin.monitor.metrics import LayerFigures, write_figures
from oss_fused.plugin.monitor.policy import add_layers

# an amax that exceeds the usual one by this factor is an outlier
_OUTLIER = 8.0
_MOMENTUM = 0.9
# share of a sample's tokens that a static scale does not fit that counts as misbehaviour
_BAD_SHARE = 0.01
# a token's largest value over the limit of a static scale below which rounding costs more than
# about 5 % of its values, twice the usual: they are subnormal, 2**-9 of the scale apart
UNDERFLOW = 2.0**-13

# counts of layers that have a static scale alone
_OF_STATIC = {"saturated": 0, "underflowed": 0}

logger = init_logger(__name__)


class Statistics:
    """Figures of all layers, sample by sample; knows nothing of devices."""

    def __init__(
        self,
        names: list[str],
        limits: list[float],
        rank: int,
        bits16: int = 0,
        policy: str | None = None,
    ) -> None:
        """Start empty.

        Args:
            names: of the layers, in model order.
            limits: the magnitude at which each saturates; inf for scales taken while serving.
            rank: tensor-parallel.
            bits16: number of layers that run with 16-bit activations by policy.
            policy: file that gets the layers that misbehave.
        """
        self.layers = {
            name: LayerFigures(**({} if limit == float("inf") else _OF_STATIC))
            for name, limit in zip(names, limits)
        }
        self.bits16, self.policy = bits16, policy
        # layers that a static scale does not fit: 16-bit activations cure this at once
        self.saturating: dict[str, str] = {}
        self.switched = 0
        self.scale_updates = 0
        # layers that have no form with 16-bit activations
        self.fp8_only: set[str] = set()
        self.limits, self.rank = limits, rank
        self.samples = 0
        self._warned: set[str] = set()

    def add(self, rows: np.ndarray, counts: list[int]) -> None:
        """Take a sample in, publish the figures, warn and write the policy where there is cause.

        Args:
            rows: [layers, rows] largest magnitude of each token, NaN or Inf as they came.
            counts: tokens seen at each layer.
        """
        self.samples += 1
        kinds = ("NaN or Inf", "saturation", "underflow", "outliers")
        faults: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
        for (name, figures), limit, row, count in zip(
            self.layers.items(), self.limits, rows, counts
        ):
            if count:
                self._add_layer(name, figures, limit, row[:count], faults)
        # what follows a NaN is full of it: the first layer is where to look
        first = dict(list(faults["NaN or Inf"].items())[:1])
        self._warn(faults)
        # a new dict: the thread that runs the model reads the old one meanwhile
        self.saturating = self.saturating | faults["saturation"] | faults["underflow"]
        write_figures(self.rank, self.samples, self.layers, self._totals)
        bad = first | faults["outliers"] | faults["underflow"] | faults["saturation"]
        bad = {name: reason for name, reason in bad.items() if name not in self.fp8_only}
        if bad and self.policy:
            add_layers(self.policy, bad)

    @property
    def _totals(self) -> dict[str, int]:
        return {
            "bits16": self.bits16,
            "switched": self.switched,
            "scale_updates": self.scale_updates,
        }

    def count_scale_updates(self, before: Statistics) -> None:
        """Count the static scales that differ from those of ``before``, the same model's."""
        old = dict(zip(before.layers, before.limits))
        self.scale_updates = before.scale_updates + sum(
            old.get(name, limit) != limit for name, limit in zip(self.layers, self.limits)
        )

    def _add_layer(
        self,
        name: str,
        figures: LayerFigures,
        limit: float,
        row: np.ndarray,
        faults: dict[str, dict[str, str]],
    ) -> None:
        finite = row[np.isfinite(row)]
        lost, full = len(row) - len(finite), int((finite >= limit).sum())
        faint = 0
        figures.tokens += len(row)
        figures.nonfinite += lost
        if figures.saturated is not None and figures.underflowed is not None:
            faint = int(((finite > 0) & (finite < UNDERFLOW * limit)).sum())
            figures.saturated += full
            figures.underflowed += faint
        figures.accuracy_drops += lost + full + faint > _BAD_SHARE * len(row)
        if lost:
            faults["NaN or Inf"][name] = f"NaN or Inf in {lost} of {len(row)} tokens"
        if full > _BAD_SHARE * len(row):
            faults["saturation"][name] = f"{full} of {len(row)} tokens reach the limit {limit:.4g}"
        if faint > _BAD_SHARE * len(row):
            faults["underflow"][name] = (
                f"{faint} of {len(row)} tokens lie below {UNDERFLOW:.4g} of the limit {limit:.4g}"
            )
        if not len(finite):
            return
        figures.amax = float(finite.max())
        if figures.usual and figures.amax > _OUTLIER * figures.usual:
            figures.outliers += 1
            faults["outliers"][name] = f"amax {figures.amax:.4g}, usually {figures.usual:.4g}"
        weight = _MOMENTUM if figures.usual else 0.0
        figures.usual = weight * figures.usual + (1 - weight) * figures.amax

    def _warn(self, faults: dict[str, dict[str, str]]) -> None:
        """One warning a kind of fault, at its first sight."""
        for kind, layers in faults.items():
            if not layers or kind in self._warned:
                continue
            self._warned.add(kind)
            name, reason = next(iter(layers.items()))
            more = f", and {len(layers) - 1} other layers" if len(layers) > 1 else ""
            remedy = (
                f"layers listed in {self.policy} run with 16-bit activations from the next start"
                if self.policy
                else "the option monitor_policy names a file that would list such layers, and "
                "serve them with 16-bit activations from the next start"
            )
            logger.warning(
                "oss_fused monitor: %s at the input of %s: %s%s. Counted from here on in "
                "/metrics (oss_fused:*); %s.",
                kind,
                name,
                reason,
                more,
                remedy,
            )
