# SPDX-License-Identifier: MIT
"""The measuring method: enough samples, outliers by IQR, percentiles, Mann-Whitney U.

A measurement is taken in rounds of at least ``MIN_SAMPLES``; while the relative standard deviation
of what the IQR filter keeps exceeds ``TARGET_RELATIVE_STD``, another round is added, up to a limit.
Two versions are compared by medians and a two-sided Mann-Whitney U test, because kernel times are
skewed and a t-test would take one slow sample for a regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np

from oss_fused.errors import SchemeError

MIN_SAMPLES = 20
TARGET_RELATIVE_STD = 0.05
IQR_FACTOR = 1.5


@dataclass(frozen=True)
class TimingSummary:
    """Statistics of the samples that the IQR filter kept, in the unit of the samples."""

    count: int
    outliers: int
    mean: float
    std: float
    relative_std: float
    minimum: float
    maximum: float
    p50: float
    p90: float
    p99: float
    stable: bool

    def to_dict(self) -> dict[str, float | int | bool]:
        """The fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class MannWhitneyResult:
    """U of the first sample, two-sided p-value, and P(first < second) + P(tie) / 2."""

    u: float
    p_value: float
    probability_less: float


class Verdict(Enum):
    """Outcome of comparing a candidate with a baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"


@dataclass(frozen=True)
class Comparison:
    """A candidate against a baseline: ratio of medians (below 1 is faster), p-value, verdict."""

    ratio: float
    p_value: float
    verdict: Verdict


def _checked(name: str, samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise SchemeError(f"{name}: no samples, expected at least one")
    if not np.isfinite(values).all():
        raise SchemeError(f"{name}: holds a value that is not finite, expected finite times")
    return values


def iqr_filter(samples: Sequence[float], factor: float = IQR_FACTOR) -> list[float]:
    """Samples within ``factor`` interquartile ranges of the quartiles, in their order.

    Raises:
        SchemeError: no samples, or one is not finite.
    """
    values = _checked("samples", samples)
    low, high = np.percentile(values, [25, 75])
    margin = factor * (high - low)
    return [float(v) for v in values if low - margin <= v <= high + margin]


def summarize(
    samples: Sequence[float], target_relative_std: float = TARGET_RELATIVE_STD
) -> TimingSummary:
    """Filter ``samples`` and describe what is left.

    Raises:
        SchemeError: no samples, or one is not finite.
    """
    kept = np.asarray(iqr_filter(samples))
    mean = float(kept.mean())
    std = float(kept.std(ddof=1)) if kept.size > 1 else 0.0
    relative = std / mean if mean else 0.0
    p50, p90, p99 = (float(p) for p in np.percentile(kept, [50, 90, 99]))
    return TimingSummary(
        count=int(kept.size),
        outliers=len(samples) - int(kept.size),
        mean=mean,
        std=std,
        relative_std=relative,
        minimum=float(kept.min()),
        maximum=float(kept.max()),
        p50=p50,
        p90=p90,
        p99=p99,
        stable=relative < target_relative_std,
    )


def collect(
    sampler: Callable[[int], Sequence[float]],
    samples_per_round: int = MIN_SAMPLES,
    max_rounds: int = 5,
    target_relative_std: float = TARGET_RELATIVE_STD,
) -> tuple[list[float], TimingSummary]:
    """Sample in rounds until the relative standard deviation is small enough.

    Args:
        sampler: returns that many samples.
        samples_per_round: at least MIN_SAMPLES.
        max_rounds: where a noisy machine makes it stop; the summary then has ``stable=False``.
        target_relative_std: the goal.

    Returns:
        All raw samples and the summary of what the filter kept.

    Raises:
        SchemeError: too few samples per round, or no round at all.
    """
    if samples_per_round < MIN_SAMPLES:
        raise SchemeError(f"samples_per_round={samples_per_round}: expected at least {MIN_SAMPLES}")
    if max_rounds < 1:
        raise SchemeError(f"max_rounds={max_rounds}: expected at least 1")
    samples: list[float] = []
    for _ in range(max_rounds):
        samples.extend(sampler(samples_per_round))
        summary = summarize(samples, target_relative_std)
        if summary.stable:
            break
    return samples, summary


def mann_whitney_u(first: Sequence[float], second: Sequence[float]) -> MannWhitneyResult:
    """Two-sided Mann-Whitney U by the normal approximation with tie and continuity correction.

    Source: Mann and Whitney 1947; the correction for ties as in scipy's ``method="asymptotic"``.

    Raises:
        SchemeError: a sample is empty or not finite.
    """
    a, b = _checked("first", first), _checked("second", second)
    pooled = np.concatenate([a, b])
    _, inverse, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    # a group of ties shares the mean of its ranks
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    u = float(ranks[: a.size].sum() - a.size * (a.size + 1) / 2)
    total = pooled.size
    ties = float((counts**3 - counts).sum()) / (total * (total - 1)) if total > 1 else 0.0
    variance = a.size * b.size / 12 * (total + 1 - ties)
    less = 1 - u / (a.size * b.size)
    if variance <= 0:
        return MannWhitneyResult(u, 1.0, less)
    z = (abs(u - a.size * b.size / 2) - 0.5) / math.sqrt(variance)
    return MannWhitneyResult(u, min(1.0, math.erfc(max(z, 0.0) / math.sqrt(2))), less)


def compare_samples(
    baseline: Sequence[float],
    candidate: Sequence[float],
    min_change: float = 0.03,
    alpha: float = 0.01,
) -> Comparison:
    """Is ``candidate`` faster, slower or the same as ``baseline``?

    A difference counts only where the medians differ by more than ``min_change`` and the U test
    rejects equality at ``alpha``: many samples make a meaningless difference significant.

    Raises:
        SchemeError: a sample is empty or not finite, or the baseline's median is not positive.
    """
    base, new = (float(np.median(iqr_filter(s))) for s in (baseline, candidate))
    if base <= 0:
        raise SchemeError(f"baseline: median {base}, expected a positive time")
    p_value = mann_whitney_u(baseline, candidate).p_value
    ratio = new / base
    verdict = Verdict.SAME
    if p_value < alpha and abs(ratio - 1) > min_change:
        verdict = Verdict.FASTER if ratio < 1 else Verdict.SLOWER
    return Comparison(ratio, p_value, verdict)
