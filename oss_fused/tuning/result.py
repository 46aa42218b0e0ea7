# SPDX-License-Identifier: MIT
"""What a search found: the winner, every trial, and the gain over a default config."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

from oss_fused.tuning.objective import KernelMetrics
from oss_fused.tuning.space import Config


class Status(Enum):
    """What became of a config."""

    OK = "ok"
    SKIPPED = "skipped"
    TOO_LARGE = "too large"
    FAILED = "failed"
    WRONG = "wrong result"


@dataclass(frozen=True)
class Trial:
    """One config: measured, or why not."""

    config: Config
    status: Status
    message: str = ""
    metrics: KernelMetrics | None = None


@dataclass(frozen=True)
class TuningResult:
    """The best config with its metrics; ``trials`` is empty where the cache had the answer."""

    best_config: Config
    metrics: KernelMetrics
    key: str
    trials: tuple[Trial, ...] = ()
    default_metrics: KernelMetrics | None = None
    from_cache: bool = False

    @property
    def gain(self) -> float | None:
        """Default latency over best latency, minus 1; None where no default was measured."""
        if self.default_metrics is None:
            return None
        return self.default_metrics.latency_ms / self.metrics.latency_ms - 1

    def count(self, status: Status) -> int:
        """Number of trials with this status."""
        return sum(trial.status is status for trial in self.trials)

    def summary(self) -> str:
        """One line for people."""
        config = " ".join(f"{name}={value}" for name, value in self.best_config.items())
        measured = f"{self.metrics.latency_ms:.4f} ms"
        if self.metrics.throughput_tflops is not None:
            measured += f", {self.metrics.throughput_tflops:.4g} TFLOP/s"
        if self.metrics.bandwidth_gbps is not None:
            measured += f", {self.metrics.bandwidth_gbps:.4g} GB/s"
        if self.metrics.bandwidth_utilization is not None:
            measured += f" ({self.metrics.bandwidth_utilization:.0%} of nominal)"
        if self.from_cache:
            return f"{self.key}: {measured} with {config} (cached)"
        counts = ", ".join(f"{self.count(s)} {s.value}" for s in Status if self.count(s))
        gain = "" if self.gain is None else f", {100 * self.gain:+.1f} % over the default"
        return f"{self.key}: {measured} with {config}{gain} ({counts})"


def trials_csv(results: Sequence[TuningResult]) -> str:
    """A line per config tried: key, parameters, status, metrics, and why it has none.

    A result from the cache has no trials.
    """
    pairs = [(result.key, trial) for result in results for trial in result.trials]
    # a default config may lack parameters, and one that failed has no metrics
    parameters = dict.fromkeys(name for _, trial in pairs for name in trial.config)
    metrics = [field.name for field in fields(KernelMetrics)]
    text = io.StringIO()
    columns = ["key", *parameters, "status", *metrics, "message"]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for key, trial in pairs:
        measured = trial.metrics.to_dict() if trial.metrics else {}
        row = {"key": key, **trial.config, "status": trial.status.value, **measured}
        writer.writerow({**row, "message": trial.message})
    return text.getvalue()
