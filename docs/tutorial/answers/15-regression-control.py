# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 15

# %%
import itertools
import statistics
import tempfile
from pathlib import Path

import book
from harness.regression import Thresholds

from oss_fused.bench.statistics import Verdict, compare_samples

control = book.chapter("15-regression-control")


# %%
def exercise_1() -> int:
    """The fewest samples per side at which 5 % slower is seen, with 1 % of noise."""
    for count in range(2, 40):
        pair = (control.samples(1.0, count, 1), control.samples(1.05, count, 2))
        if compare_samples(*pair).verdict is Verdict.SLOWER:
            break
    assert 4 <= count <= 8
    return count


# %%
def drifted(medians: list[float], limit: float = 0.05) -> bool:
    """Whether the last five runs are slower than the first five by more than ``limit``."""
    return statistics.median(medians[-5:]) > (1 + limit) * statistics.median(medians[:5])


def exercise_2() -> bool:
    """2 % per run is a drift that no comparison with the run before would fail."""
    drift = [1.02**run for run in range(20)]
    assert all(now / before < 1.03 for before, now in itertools.pairwise(drift))
    assert drifted(drift) and not drifted([1.0, 1.01] * 10)
    return True


# %%
def exercise_3() -> str:
    """It is new: reported, and no failure."""
    row = {"operation": "add", "problem": "8", "implementation": "triton"}
    row |= {"status": "ok", "latency_ms": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        (found,) = Thresholds(Path(folder) / "none.json").check({"format": 1, "rows": [row]})
    assert found.verdict.value == "new" and not found.verdict.fails
    return found.verdict.value


if __name__ == "__main__":
    book.show(f"{exercise_1()} samples; {exercise_2()}; {exercise_3()}")
