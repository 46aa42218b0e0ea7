# SPDX-License-Identifier: MIT
"""What differs between the configs that two devices' tuning found."""

from __future__ import annotations

from collections.abc import Iterable

from oss_fused.bench.report import Report
from oss_fused.tuning.cache import CacheEntry

Problem = tuple[str, str, str]


def differences(entries: Iterable[CacheEntry], first: str, second: str) -> Report:
    """A report of every problem that both devices were tuned for.

    Args:
        entries: of a cache; where versions or kernels differ, the latest one of a problem counts.
        first: name of a device, as in the cache.
        second: another.

    Raises:
        ValueError: a device without entries; names those that have some.
    """
    found: dict[str, dict[Problem, CacheEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.tuned_at):
        key = entry.key
        sizes = "x".join(map(str, key.shape))
        problem = (key.operation, f"{sizes}:{key.dtype}", key.objective)
        found.setdefault(key.device, {})[problem] = entry
    for name in (first, second):
        if name not in found:
            known = ", ".join(found) or "none"
            raise ValueError(
                f"--differences {name!r}: no tuned entries; devices with some: {known}"
            )
    ones, others = found[first], found[second]
    shared = [problem for problem in ones if problem in others]
    rows = []
    same = 0
    for problem in shared:
        one, other = ones[problem], others[problem]
        changed = [
            f"{name} {one.config.get(name, '-')} -> {other.config.get(name, '-')}"
            for name in dict.fromkeys((*one.config, *other.config))
            if one.config.get(name) != other.config.get(name)
        ]
        same += not changed
        times = [float(entry.metrics["latency_ms"]) for entry in (one, other)]
        rows.append(
            (
                problem[0],
                problem[1],
                ", ".join(changed) or "same",
                f"{times[0]:.4g}",
                f"{times[1]:.4g}",
                f"{times[1] / times[0]:.2f}",
            )
        )
    report = Report(f"Tuned configs: {first} -> {second}")
    alone = len(ones) + len(others) - 2 * len(shared)
    report.paragraph(
        f"{len(shared)} problems in common, {len(shared) - same} with another config; {alone} of "
        "one device only."
    )
    header = ("operation", "problem", "what differs", "first ms", "second ms", "second / first")
    report.table(header, rows)
    return report
