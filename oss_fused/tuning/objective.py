# SPDX-License-Identifier: MIT
"""What "best" means: latency, peak memory and energy of a call, weighed against each other."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oss_fused.bench.statistics import TimingSummary
from oss_fused.errors import BackendUnavailableError, SchemeError


@dataclass(frozen=True)
class KernelMetrics:
    """What one config costs: the median latency and what follows from it.

    Throughput and bandwidth are None where the problem's FLOPs and bytes are unknown;
    ``bandwidth_utilization`` is a share of the device description's nominal bandwidth.
    """

    latency_ms: float
    p90_ms: float
    p99_ms: float
    relative_std: float
    samples: int
    throughput_tflops: float | None = None
    bandwidth_gbps: float | None = None
    bandwidth_utilization: float | None = None
    memory_bytes: int | None = None
    energy_mj: float | None = None

    @classmethod
    def of(
        cls,
        timing: TimingSummary,
        flops: int | None = None,
        num_bytes: int | None = None,
        peak_bandwidth_gbps: float | None = None,
        memory_bytes: int | None = None,
        energy_mj: float | None = None,
    ) -> KernelMetrics:
        """Metrics of a timing in milliseconds and of the work that it did."""
        seconds = timing.p50 / 1e3
        bandwidth = num_bytes / seconds / 1e9 if num_bytes else None
        return cls(
            latency_ms=timing.p50,
            p90_ms=timing.p90,
            p99_ms=timing.p99,
            relative_std=timing.relative_std,
            samples=timing.count,
            throughput_tflops=flops / seconds / 1e12 if flops else None,
            bandwidth_gbps=bandwidth,
            bandwidth_utilization=(
                bandwidth / peak_bandwidth_gbps if bandwidth and peak_bandwidth_gbps else None
            ),
            memory_bytes=memory_bytes,
            energy_mj=energy_mj,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class Objective:
    """Weights of latency, memory and energy in the score ``sum(weight * log(value))``.

    A weighted product: halving one quantity is worth the same wherever it stands.

    Raises:
        SchemeError: a weight that is negative or not finite, or none above 0.
    """

    latency: float = 1.0
    memory: float = 0.0
    energy: float = 0.0

    def __post_init__(self) -> None:
        """Check the weights."""
        weights = (self.latency, self.memory, self.energy)
        # a score of NaN would make the cache unreadable
        if not all(0 <= weight < math.inf for weight in weights) or max(weights) == 0:
            raise SchemeError(f"objective={weights}: expected weights >= 0 and finite, one above 0")

    def __str__(self) -> str:
        """Weights above 0, e.g. ``latency`` or ``latency+0.5memory``."""
        weights = {name: getattr(self, name) for name in ("latency", "memory", "energy")}
        return "+".join(
            name if weight == 1 else f"{weight:g}{name}"
            for name, weight in weights.items()
            if weight
        )

    def check_device(self, device: torch.device) -> None:
        """Raise BackendUnavailableError where a weighted quantity cannot be measured."""
        for name in ("memory", "energy"):
            if getattr(self, name) and device.type != "cuda":
                raise BackendUnavailableError(
                    f"objective.{name}={getattr(self, name)}: needs an NVIDIA GPU, got {device}"
                )

    def score(self, metrics: KernelMetrics) -> float:
        """The score of ``metrics``; lower is better."""
        total = self.latency * math.log(max(metrics.latency_ms, 1e-9))
        if self.memory:
            total += self.memory * math.log(max(metrics.memory_bytes or 0, 1))
        if self.energy:
            total += self.energy * math.log(max(metrics.energy_mj or 0.0, 1e-9))
        return total
