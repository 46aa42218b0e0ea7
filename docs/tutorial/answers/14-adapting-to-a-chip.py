# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 14

# %%
from collections import Counter
from dataclasses import replace

import book

from oss_fused import FP8_GEMM_CONFIGS
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.device import DeviceDescription, load_description
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.simulate import simulated_gemm_ms

adapting = book.chapter("14-adapting-to-a-chip")


# %%
def exercise_1() -> float:
    """A product of one row is bound by bandwidth: it keeps just the share of bandwidth."""
    h200 = load_description("h200")
    less = replace(h200, memory_bandwidth_gbps=0.7 * h200.memory_bandwidth_gbps)
    share = adapting.kept(h200, less, FP8GEMMInput(1, 4096, 4096), "float8_e4m3fn")
    assert abs(share - 0.7) < 1e-9
    return share


# %%
def exercise_2() -> str:
    """What low_bw refuses most of FP8_GEMM_CONFIGS for."""
    reasons = [reason_to_skip(c, adapting.LOW_BW, (), 1) for c in FP8_GEMM_CONFIGS]
    words = Counter(reason.split()[0] for reason in reasons if reason)
    assert set(words) == {"shared", "registers"}
    return words.most_common(1)[0][0]


# %%
def _best(device: DeviceDescription, problem: FP8GEMMInput) -> tuple[float, dict[str, int]]:
    """Least time of the model, and its config."""
    fitting = [c for c in FP8_GEMM_CONFIGS if reason_to_skip(c, device, (), 1) is None]
    config = min(fitting, key=lambda c: simulated_gemm_ms(device, problem, c))
    return simulated_gemm_ms(device, problem, config), config


def exercise_3(problem: tuple[int, int, int] = (4096, 4096, 4096)) -> dict[str, int]:
    """What changes in the model's best config with twice the shared memory; it is no slower."""
    size = FP8GEMMInput(*problem)
    rich = replace(adapting.LOW_BW, shared_memory_per_block=131072)
    before, config = _best(adapting.LOW_BW, size)
    after, other = _best(rich, size)
    assert after <= before
    return {name: value for name, value in other.items() if value != config[name]}


if __name__ == "__main__":
    book.show(f"{exercise_1():.0%}; {exercise_2()}; {exercise_3()}")
