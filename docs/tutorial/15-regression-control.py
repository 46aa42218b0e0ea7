# SPDX-License-Identifier: MIT
# %% [markdown]
# # 15. Regression control
#
# **Goal.** Notice when a kernel becomes slower or less exact, without a false alarm each week.
#
# A check needs three things: samples of before and now, a test of the difference, and a limit below
# which a difference does not matter.

# %%
import copy
import tempfile
from pathlib import Path

import book
import torch
from harness.attention_regression import adaptive_limits, failures
from harness.regression import Thresholds, compare_results
from harness.regression_report import trend_chart

from oss_fused.bench.statistics import compare_samples, mann_whitney_u

# %% [markdown]
# ## Is it slower?
#
# Times are skewed: most samples lie close together, some are much longer. Means and t-tests are
# then misled by one sample. The Mann-Whitney U test compares ranks. It answers whether one set of
# samples tends to be larger. With many samples it finds differences of no interest, so the medians
# must also differ by 3 %.
#
# The samples below are made, not measured, so that you see the same verdicts.


# %%
def samples(center: float, count: int = 60, seed: int = 0) -> list[float]:
    """Made times in ms: a narrow distribution with a tail."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, generator=generator).abs() * 0.01
    return (center * (1 + noise)).tolist()


def verdicts() -> list[dict]:
    """Pairs of samples, with ratio of medians, p-value and verdict."""
    base = samples(1.0)
    pairs = {
        "the same": samples(1.0, seed=1),
        "1 % slower": samples(1.01, seed=2),
        "10 % slower": samples(1.1, seed=3),
        "10 % faster": samples(0.9, seed=4),
        "one outlier of 50": [*samples(1.0, seed=5), 50.0],
    }
    rows = []
    for name, other in pairs.items():
        found = compare_samples(base, other)
        p_value = mann_whitney_u(base, other).p_value
        row = {"now": name, "ratio of medians": found.ratio, "p": p_value}
        rows.append(row | {"verdict": found.verdict.value})
    return rows


if __name__ == "__main__":
    book.show(book.table(verdicts(), "Made samples."))

# %% [markdown]
# "1 % slower" is significant and the same: significance is no importance.
#
# ## Thresholds
#
# A file holds the best known time of each row and what it may cost in addition. A check has a
# verdict per row: ok, faster, slower, wrong, missing, new. "missing" fails as well: a row that is
# no longer measured is the easiest way to pass.
#
# The rows are those of one H200, and the bars are made of them; "now" is the same file with one row
# made slower, one wrong and one removed.


# %%
def checked(slower: float = 1.5) -> list[dict]:
    """Verdicts of bars made of the H200's results, on the same results with three rows spoilt."""
    results = book.measured("library-suite.json")
    if results is None:
        return [{"row": None}]
    spoilt = copy.deepcopy(results)
    late, wrong, lost = [row for row in spoilt["rows"] if row["status"] == "ok"][:3]
    late["latency_ms"] *= slower
    wrong["status"], wrong["message"] = "wrong", "relative_l2 too large"
    spoilt["rows"].remove(lost)
    with tempfile.TemporaryDirectory() as folder:
        thresholds = Thresholds(Path(folder) / "bars.json")
        thresholds.adapt(results)
        found = thresholds.check(spoilt)
    rows = [row for row in found if row.verdict.fails] + [r for r in found if not r.verdict.fails][
        :2
    ]
    return [
        {
            "row": row.name,
            "verdict": row.verdict.value,
            "fails": row.verdict.fails,
            "ratio": "-" if row.ratio is None else f"{row.ratio:.2f}",
        }
        for row in rows
    ]


if __name__ == "__main__":
    book.show(book.table(checked(), book.source("library-suite.json")))

# %% [markdown]
# ## Adaptive bars
#
# `--adapt` takes over stable better times and new rows. It never raises a bar: a series of small
# slow-downs would otherwise pass one by one. A row's allowance follows its noise, within limits.


# %%
def adapted() -> list[dict]:
    """A bar before and after runs that are faster, slower and faster but unsteady."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        thresholds = Thresholds(Path(folder) / "bars.json")
        runs = ((1.0, True), (0.9, True), (1.2, True), (0.8, False))
        for ms, stable in runs:
            row = {"operation": "add", "problem": "1000", "implementation": "triton"}
            row |= {"status": "ok", "latency_ms": ms, "stable": stable, "relative_std": 0.01}
            changed = thresholds.adapt({"format": 1, "rows": [row]})
            bar = thresholds.rows["add/1000/triton"]["latency_ms"]
            rows.append({"run, ms": ms, "stable": stable, "rows changed": changed, "bar, ms": bar})
    return rows


if __name__ == "__main__":
    book.show(book.table(adapted(), "Made times."))

# %% [markdown]
# ## Accuracy has bars too
#
# For FP8 attention the figures are the 99th percentile of the absolute error and the share of
# clipped values. Limits follow the trend (mean and three standard deviations) and only go down.
# NaN is no pass.


# %%
def accuracy_bars() -> list[dict]:
    """Which runs fail the limits of FP8 attention."""
    limits = {"attention_fp8_p99_abs": 3e-2, "attention_fp8_clip_ratio": 0.03}
    runs = {
        "as usual": {"p99": 0.02, "clip": 0.001},
        "scale too small": {"p99": 0.02, "clip": 0.2},
        "broken": {"p99": float("nan"), "clip": 0.001},
    }
    rows = []
    for name, run in runs.items():
        found = failures(run, limits)
        rows.append({"run": name, "fails": bool(found), "why": "; ".join(found) or "-"})
    trend = [{"p99": 0.02 + 0.0001 * i, "clip": 0.001} for i in range(6)]
    limit = adaptive_limits(trend)["attention_fp8_p99_abs"]
    return [*rows, {"run": "limit after six runs", "fails": False, "why": f"p99 {limit:.4f}"}]


if __name__ == "__main__":
    book.show(book.table(accuracy_bars(), "Made runs."))

# %% [markdown]
# ## The trend
#
# The last 100 runs are kept and drawn, so that a slow drift shows.


# %%
def trend() -> bytes | None:
    """Chart of the runs of one H200; None where none is kept."""
    runs = book.measured("history.json", "runs")
    return trend_chart(runs) if runs else None


if __name__ == "__main__":
    if chart := trend():
        book.show_plot("trend", chart)
    runs = book.measured("history.json", "runs") or []
    book.show(f"Runs in docs/results/h200/history.json: {len(runs)}.")


# %% [markdown]
# ## The production version
#
# ```
# python scripts/ci_check.py --thresholds docs/results/cpu/thresholds.json          # what CI holds
# python scripts/ci_check.py --baseline before.json --results after.json --markdown verdict.md
# python scripts/ci_check.py --thresholds bars.json --results new.json --adapt --history runs.json
# ```
#
# [Measuring](../measuring.md) describes the files. A shared CI machine is noisy: its bars catch a
# tenfold slow-down. Real bars are held on a quiet GPU.


# %%
def self_compared() -> list[dict]:
    """A result file compared with itself: every row is ok."""
    results = book.measured("library-suite.json")
    if results is None:
        return [{"verdict": None}]
    rows = compare_results(results, results)
    kinds = sorted({row.verdict.value for row in rows})
    return [{"verdict": kind, "rows": sum(r.verdict.value == kind for r in rows)} for kind in kinds]


def acceptance() -> list[book.Bar]:
    """Times that the thresholds rest on scatter little."""
    rows = book.measured("library-suite.json", "rows") or []
    spread = max((row["relative_std"] for row in rows if row["relative_std"]), default=None)
    file = "library-suite.json"
    return [book.Bar("largest RSD of rows with thresholds", 0.05, spread, file, at_most=True)]


if __name__ == "__main__":
    book.show(book.table(self_compared(), "The file against itself."))
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **The check fails once a week without a change.** Look at the RSD of that row. Measure it longer,
# or give the row an allowance; do not loosen all.
#
# **Why compare with the best time and not with the last?** A drift of 2 % per week passes every
# comparison with last week.
#
# **May I raise a bar?** By hand, in a reviewed change that says why.
#
# ## Exercises
#
# 1. How many samples does the U test need to see a difference of 5 % with 1 % of noise at p < 0.01?
# 2. Write a rule that finds a drift: the median of the last five runs against the first five.
# 3. What does `Thresholds.check` say of a row that exists in the results only?
#
# Answers: [answers/15-regression-control.py](answers/15-regression-control.py).
#
# Next: [publishing](16-publishing.py).
