# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 10

# %%
import tempfile
from collections import Counter
from pathlib import Path

import book
import torch

from oss_fused import TritonAutoTuner
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import load_description
from oss_fused.tuning.objective import KernelMetrics, Objective
from oss_fused.tuning.prune import reason_to_skip

tuning = book.chapter("10-autotuning")


# %%
def exercise_1() -> tuple[int, str]:
    """Configs that fit low_bw, and the first word of the commonest reason."""
    low = load_description("low_bw")
    reasons = [reason_to_skip(c, low, (4096,) * 3) for c in tuning.MATMUL_CONFIGS]
    words = Counter(reason.split()[0] for reason in reasons if reason)
    assert words.most_common(1)[0][0] == "shared"
    return reasons.count(None), "shared memory"


# %%
def exercise_2() -> dict[str, int]:
    """Memory has no measurement on a CPU; scores of made metrics show how the weight decides."""
    quick = KernelMetrics(1.0, 1.0, 1.0, 0.0, 20, memory_bytes=4000)
    small = KernelMetrics(1.5, 1.5, 1.5, 0.0, 20, memory_bytes=1000)
    assert Objective().score(quick) < Objective().score(small)
    assert Objective(1, 1).score(small) < Objective(1, 1).score(quick)
    with tempfile.TemporaryDirectory() as folder:
        tuner = TritonAutoTuner(
            lambda x, BLOCK: x + BLOCK,
            {"BLOCK": (16, 32, 64)},
            warmup_runs=0,
            benchmark_runs=20,
            operation="exercise",
            cache=TuningCache(Path(folder) / "tuning.json"),
            # a timer of our own: the call says nothing, the config does
            timer=lambda call, repeats, device: [1.0 + abs(float(call()[0]) - 32)] * repeats,
        )
        found = tuner.tune(torch.zeros(1), problem_size=(1,), device="cpu")
    assert found.best_config == {"BLOCK": 32}
    return found.best_config


# %%
def exercise_3() -> int:
    """Two values of each of six parameters: 2^6."""
    count = len(tuning.MATMUL_CONFIGS.coarse())
    assert count == 64
    return count


if __name__ == "__main__":
    book.show(f"{exercise_1()}, {exercise_2()}, {exercise_3()} configs")
