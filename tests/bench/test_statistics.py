# SPDX-License-Identifier: MIT
"""The measuring method: filter, percentiles, rounds until stable, Mann-Whitney U, verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from oss_fused.bench import timing
from oss_fused.bench.statistics import (
    Verdict,
    collect,
    compare_samples,
    iqr_filter,
    mann_whitney_u,
    summarize,
)


def test_iqr_filter_drops_only_the_outlier_and_keeps_order():
    assert iqr_filter([3.0, 1.0, 2.0, 100.0, 2.5]) == [3.0, 1.0, 2.0, 2.5]
    assert iqr_filter([1.0, 1.0]) == [1.0, 1.0]


def test_summary_is_that_of_the_kept_samples():
    samples = [float(v) for v in range(1, 101)]
    summary = summarize([*samples, 1e6])
    assert (summary.count, summary.outliers) == (100, 1)
    assert summary.mean == pytest.approx(50.5)
    assert summary.std == pytest.approx(np.std(samples, ddof=1))
    assert (summary.p50, summary.p90, summary.p99) == pytest.approx((50.5, 90.1, 99.01))
    assert not summary.stable


def test_collect_stops_at_once_when_stable():
    calls = []

    def sampler(count):
        calls.append(count)
        return [1.0 + 0.001 * (i % 3) for i in range(count)]

    samples, summary = collect(sampler)
    assert calls == [20] and len(samples) == 20 and summary.stable


def test_collect_takes_more_samples_while_noisy_and_gives_up_honestly():
    rng = np.random.default_rng(0)
    samples, summary = collect(lambda n: list(rng.uniform(1, 3, n)), max_rounds=4)
    assert len(samples) == 80 and not summary.stable
    with pytest.raises(ValueError, match="samples_per_round=5"):
        collect(lambda n: [1.0] * n, samples_per_round=5)


@pytest.mark.parametrize("ties", [False, True])
def test_mann_whitney_agrees_with_scipy(ties):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, 30), rng.normal(0.7, 1, 41)
    if ties:
        a, b = a.round(), b.round()
    ours = mann_whitney_u(a, b)
    theirs = stats.mannwhitneyu(a, b, method="asymptotic")
    assert ours.u == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.probability_less > 0.5


def test_identical_constant_samples_are_no_evidence():
    assert mann_whitney_u([1.0] * 5, [1.0] * 7).p_value == 1.0


def test_verdicts():
    rng = np.random.default_rng(2)
    base = list(rng.normal(1.0, 0.01, 60))
    assert compare_samples(base, [0.8 * v for v in base]).verdict is Verdict.FASTER
    assert compare_samples(base, [1.2 * v for v in base]).verdict is Verdict.SLOWER
    assert compare_samples(base, list(rng.normal(1.0, 0.01, 60))).verdict is Verdict.SAME
    # significant, but too small to matter
    assert compare_samples(base, [1.02 * v for v in base]).verdict is Verdict.SAME
    # large, but two samples prove nothing
    assert compare_samples([1.0, 1.1], [1.5, 1.6]).verdict is Verdict.SAME


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")]])
def test_bad_samples_are_named(samples):
    with pytest.raises(ValueError, match="samples"):
        summarize(samples)


def test_percentiles_of_graph_replays():
    found = timing.of_replays([value / 1000 for value in range(100, 0, -1)])
    assert (found.median, found.p90, found.p95, found.p99) == pytest.approx((50.5, 91, 96, 100))
    assert timing.of_replays([0.002]) == timing.Timing(2.0, 2.0, 2.0, 2.0)
