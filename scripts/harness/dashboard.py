# SPDX-License-Identifier: MIT
"""What to follow of the kernels from run to run, and when to raise an alert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dashboard:
    """Settings: how often, what, and limits of slow-down, added relative error, leaked bytes."""

    interval_seconds: int = 3600
    metrics: tuple[str, ...] = ("throughput", "memory", "accuracy", "compilation time")
    slowdown: float = 0.10
    accuracy: float = 1e-4
    leaked_bytes: int = 2**20


DASHBOARD = Dashboard()
Rows = Mapping[str, Mapping[str, float]]


def alerts(before: Rows, now: Rows, settings: Dashboard = DASHBOARD) -> list[str]:
    """A line per kernel and limit exceeded.

    Args:
        before: kernel -> "latency_ms", "relative_error", "leaked_bytes", "first_call_seconds".
        now: of this run; kernels that are new raise nothing but leaks.
        settings: the limits.
    """
    found = [f"{name}: gone" for name in before if name not in now]
    for name, row in now.items():
        leaked = row["leaked_bytes"]
        if leaked > settings.leaked_bytes:
            found.append(f"{name}: leaked {leaked / 2**20:.1f} MiB in 1000 calls")
        old = before.get(name)
        if old is None:
            continue
        slower = row["latency_ms"] / old["latency_ms"] - 1
        # NaN is no pass
        if not slower <= settings.slowdown:
            found.append(f"{name}: slower by {slower:.0%}")
        added = row["relative_error"] - old["relative_error"]
        if not added <= settings.accuracy:
            found.append(f"{name}: error grew by {added:.2e}")
    return found
