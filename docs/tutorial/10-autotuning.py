# SPDX-License-Identifier: MIT
# %% [markdown]
# # 10. Autotuning
#
# **Goal.** Let a search choose tile sizes, and keep it from choosing a config that is wrong, lucky
# or only fast on one shape.
#
# [Chapter 6](06-matmul.py) ended with a kernel whose config is an argument. Six parameters with
# three or four values each are hundreds of configs. Trying all takes minutes per shape. The tuner
# of this package tries some tens.

# %%
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import book
import torch

from oss_fused import TritonAutoTuner, TuningResult
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import load_description
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.result import Status
from oss_fused.tuning.space import ConfigSpace
from oss_fused.tuning.targets import TARGETS, Target

matmul = book.chapter("06-matmul")

# %% [markdown]
# ## The space
#
# Values are ordered: refinement tries the next smaller and the next larger one.

# %%
MATMUL_CONFIGS = ConfigSpace(
    {
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (32, 64, 128),
        "GROUP_M": (4, 8, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
    }
)


# %% [markdown]
# ## The problem
#
# A problem states sizes, FLOPs and the bytes that an ideal kernel moves. Then a time becomes
# TFLOP/s and GB/s. A target joins function, space, problem, reference and the config to beat.
# Importing this chapter adds the target "matmul" to `scripts/tune.py`.


# %%
@dataclass(frozen=True)
class MatmulProblem(FP8GEMMInput):
    """A product of bfloat16 operands, whose bytes count double those of FP8."""

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n)


def _arguments(problem: FP8GEMMInput, device: torch.device) -> tuple[Any, ...]:
    made = problem.make(device)
    return made["a"], made["b"].contiguous()


def matmul_target() -> Target:
    """v3 of chapter 6, over the config of v2."""
    return Target(
        matmul.matmul_v3,
        MATMUL_CONFIGS,
        torch.mm,
        _arguments,
        MatmulProblem,
        default=matmul.UNTUNED,
    )


TARGETS["matmul"] = matmul_target

# %% [markdown]
# ## How it searches
#
# 1. **Prune.** What cannot fit the device, or is mostly padding, is not compiled.
# 2. **Seed.** Winners of near shapes from the cache, then a coarse grid.
# 3. **Refine.** Neighbours of the best, one step in one parameter, then two.
# 4. **Reject.** A config whose result is wrong gets no time.
#
# The first row of the table is all configs; then what pruning leaves for each device.


# %%
def pruning(size: int = 4096, names: tuple[str, ...] = ("h200", "rtx4090", "low_bw")) -> list[dict]:
    """Configs of the space that are worth compiling, by device."""
    rows = [{"device": "all", "configs": len(MATMUL_CONFIGS), "first reason": "-"}]
    for name in names:
        reasons = [
            reason_to_skip(config, load_description(name), (size,) * 3) for config in MATMUL_CONFIGS
        ]
        first = next((reason for reason in reasons if reason), "none")
        rows.append({"device": name, "configs": reasons.count(None), "first reason": first})
    return rows


if __name__ == "__main__":
    book.show(book.table(pruning(), "4096^3 bfloat16."))

# %% [markdown]
# ## A search here
#
# A small space and a small product, so that it also runs under the interpreter. One config is
# spoilt on purpose: its result is off by a percent. It must get no time.


# %%
def search(size: int = 16, benchmark_runs: int = 20) -> TuningResult:
    """Tune BLOCK_K of v3; the config with BLOCK_K = 64 is wrong."""
    a, b = (torch.randn(size, size, device=book.DEVICE) for _ in "ab")

    def sometimes_wrong(a: torch.Tensor, b: torch.Tensor, BLOCK_K: int) -> torch.Tensor:
        out = matmul.matmul_v3(a, b, 16, 16, BLOCK_K, num_warps=4, num_stages=1)
        return out * 1.01 if BLOCK_K == 64 else out

    with tempfile.TemporaryDirectory() as folder:
        tuner = TritonAutoTuner(
            sometimes_wrong,
            {"BLOCK_K": (16, 32, 64)},
            warmup_runs=0,
            benchmark_runs=benchmark_runs,
            reference=torch.mm,
            cache=TuningCache(Path(folder) / "tuning.json"),
            exhaustive=True,
        )
        return tuner.tune(a, b, problem_size=MatmulProblem(size, size, size), device=book.DEVICE)


def trials(found: TuningResult) -> list[dict]:
    """What became of each config."""
    return [
        {
            "BLOCK_K": trial.config["BLOCK_K"],
            "status": trial.status.value,
            "ms": trial.metrics.latency_ms if trial.metrics else "-",
            "message": trial.message[:60] or "-",
        }
        for trial in found.trials
    ]


if __name__ == "__main__":
    book.show(book.table(trials(search()), book.here("16^3 float32") + " Medians of 20 samples."))

# %% [markdown]
# ## What to measure
#
# The time of a config is a median of at least 20 samples after a warm-up, like every time here. Two
# configs that differ by less than the scatter are equal; the search then keeps the first. A gain is
# stated over what users had before: the default config, measured in the same run.
#
# ## One H200


# %%
def h200_gains() -> list[dict]:
    """Gains that the tuner found, over v2's config or over a kernel's own rule."""
    rows = []
    tuned = book.measured("library.json", "tuning", "matmul") or {}
    sources = [("library.json", "matmul 4096^3, over v2", tuned)]
    for name in ("gated_mlp", "rmsnorm_rope"):
        file = f"tuning-{name}.json"
        found = book.measured(file, "results", 0) or {}
        sources.append((file, f"{name}, over its own rule", found))
    for file, what, found in sources:
        config = found.get("config") or {}
        rows.append(
            {
                "kernel": what,
                "gain": book.percent(found.get("gain")),
                "config": " ".join(f"{key}={value}" for key, value in config.items()) or None,
                "file": file,
            }
        )
    return rows


def h200_trials() -> list[dict]:
    """What became of the configs of the matrix product on the H200."""
    found = book.measured("library.json", "tuning", "matmul", "trials") or []
    return [
        {"status": status.value, "configs": sum(trial[1] == status.value for trial in found)}
        for status in Status
    ]


if __name__ == "__main__":
    book.show(book.table(h200_gains(), book.source("library.json")))
    book.show(book.table(h200_trials(), "Trials of the matrix product, of the same file."))


# %% [markdown]
# ## The production version
#
# Nothing is searched while a model runs. `scripts/tune.py` writes tables per device,
# `oss_fused/kernels/tiles/*.json`, and kernels read them; for other shapes they have a rule
# ([tuning](../tuning.md)).
#
# ```
# python scripts/tune.py matmul --sizes 4096x4096x4096     # prints the gain over v2's config
# python scripts/tune.py --list                            # what the cache holds
# ```


# %%
def served() -> list[dict]:
    """Speed of the served matrix products, with tiles of the table, over the vendor's."""
    names = ("kernels.gemm_small.speedup_geomean", "kernels.gemm_large.speedup_geomean")
    return [{"figure": name, "value": book.measured("summary.json", name)} for name in names]


if __name__ == "__main__":
    book.show(book.table(served(), book.source("kernels.json")))

# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """The gain of tuning over v2's config."""
    gain = book.measured("summary.json", "library.tuning.gain")
    return [book.Bar("gain of tuning the matrix product at 4096^2", 0.15, gain, "library.json")]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Why not `@triton.autotune`?** It searches at the first call: a request waits for it, and a
# second process searches again. Its result is not checked.
#
# **Must I tune every M?** No. Tile tables have buckets, and the tuner starts from the winners of
# near shapes.
#
# **The winner changes from run to run.** Then it is no winner. Look at the scatter, and take the
# config that uses less shared memory.
#
# ## Exercises
#
# 1. Count the configs of `MATMUL_CONFIGS` that fit `low_bw`, and name the reason that strikes most.
# 2. Tune with an `Objective` that weighs peak memory, on a timer of your own.
# 3. How many configs does the coarse grid of `MATMUL_CONFIGS` have?
#
# Answers: [answers/10-autotuning.py](answers/10-autotuning.py).
#
# Next: [the roofline](11-roofline.py).
