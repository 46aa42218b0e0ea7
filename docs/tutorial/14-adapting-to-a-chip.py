# SPDX-License-Identifier: MIT
# %% [markdown]
# # 14. Adapting to a chip
#
# **Goal.** Move kernels to a device that you may not have: describe it, retune, report what
# changed, and state what can be kept.
#
# ## Two descriptions
#
# `default_gpu` ([devices/default_gpu.json](devices/default_gpu.json)) is what kernels were tuned
# for in this chapter. `low_bw` (of the package) is a weak device: a tenth of the bandwidth, half
# the registers, less shared memory. Both are descriptions, not hardware: times of this chapter
# that name them come from a model, and say so.

# %%
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import book

from oss_fused import FP8_GEMM_CONFIGS
from oss_fused.specs import FP8GEMMInput, RMSNormRoPEInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import DeviceDescription, load_description
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.simulate import simulated_gemm_ms, tune_simulated

DEFAULT_GPU = load_description(str(book.FOLDER / "devices" / "default_gpu.json"))
LOW_BW = load_description("low_bw")


# %%
def descriptions() -> list[dict]:
    """Fields that differ between the two."""
    before, after = asdict(DEFAULT_GPU), asdict(LOW_BW)
    flat = [("peak_tflops", "float8_e4m3fn")]
    rows = [
        {"field": name, "default_gpu": before[name], "low_bw": after[name]}
        for name in before
        if isinstance(before[name], int | float) and before[name] != after[name]
    ]
    for name, part in flat:
        field = f"{name}, {part}"
        rows.append(
            {"field": field, "default_gpu": before[name][part], "low_bw": after[name][part]}
        )
    return rows


if __name__ == "__main__":
    book.show(book.table(descriptions()))

# %% [markdown]
# ## What can be kept
#
# The roofline gives a limit before any tuning. A kernel that is bound by bandwidth runs in
# proportion to bandwidth: on a device with 30 % less, it cannot exceed 70 % of its speed. A kernel
# that is bound by arithmetic can keep its speed, if the arithmetic is the same.
#
# So "80 % after adaptation" must name what it is a share of. Here: of the best that the new device
# allows, not of the old device's speed.


# %%
def kept(before: DeviceDescription, after: DeviceDescription, problem, dtype: str) -> float:
    """Largest share of its speed on ``before`` that a perfect kernel keeps on ``after``."""

    def roof(device: DeviceDescription) -> float:
        slope = problem.flops / problem.num_bytes * device.memory_bandwidth_gbps * 1e-3
        return min(device.peak_tflops[dtype], slope)

    return roof(after) / roof(before)


def limits() -> list[dict]:
    """What an H200's kernels can keep on an H100, and default_gpu's on low_bw."""
    problems = {
        "RMSNorm + RoPE 8192 x 4096": (RMSNormRoPEInput(1, 8192, 4096), "bfloat16"),
        "FP8 product, 1 row": (FP8GEMMInput(1, 4096, 4096), "float8_e4m3fn"),
        "FP8 product, 4096 rows": (FP8GEMMInput(4096, 4096, 4096), "float8_e4m3fn"),
    }
    h200, h100 = load_description("h200"), load_description("h100")
    return [
        {
            "problem": name,
            "H100 of H200, at most": book.percent(kept(h200, h100, problem, dtype)),
            "low_bw of default_gpu, at most": book.percent(
                kept(DEFAULT_GPU, LOW_BW, problem, dtype)
            ),
        }
        for name, (problem, dtype) in problems.items()
    ]


if __name__ == "__main__":
    book.show(book.table(limits(), "Arithmetic from nominal values."))

# %% [markdown]
# An H100 is an H200 with 30 % less bandwidth: the first two rows of its column are that 70 %.
#
# ## Retune
#
# The search of [chapter 10](10-autotuning.py), unchanged, against a model of each device. The model
# counts what changes with a tile: operand re-reads, idle multiprocessors of the last wave, resident
# programs, pipeline depth. It ranks configs. Its milliseconds are no measurement.

# %%
PROBLEMS = ((4096, 4096, 4096), (1024, 5120, 2880), (64, 4096, 4096))


def retuned(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Winners of default_gpu and of low_bw, and the least time of all configs on low_bw."""
    problem = FP8GEMMInput(*sizes)
    with tempfile.TemporaryDirectory() as folder:
        cache = TuningCache(Path(folder) / "tuning.json")
        old, new = (tune_simulated(device, problem, cache) for device in (DEFAULT_GPU, LOW_BW))
    fitting = [c for c in FP8_GEMM_CONFIGS if reason_to_skip(c, LOW_BW, (), 1) is None]
    best = min(simulated_gemm_ms(LOW_BW, problem, config) for config in fitting)
    return {"problem": problem, "old": old.best_config, "new": new.best_config, "best": best}


def difference_report(problems: tuple[tuple[int, int, int], ...] = PROBLEMS) -> list[dict]:
    """What differs between the tuned configs of default_gpu and low_bw, per problem.

    "old config" is what default_gpu's winner costs on low_bw, "best" the best of all configs there;
    "reached" is the best over the retuned config's time.
    """
    rows = []
    for sizes in problems:
        found = retuned(sizes)
        problem, old, new = found["problem"], found["old"], found["new"]
        refused = reason_to_skip(old, LOW_BW, (), 1)
        ms = simulated_gemm_ms(LOW_BW, problem, new)
        changed = [f"{k} {v} -> {new[k]}" for k, v in old.items() if v != new[k]]
        old_ms = f"refused: {refused}" if refused else simulated_gemm_ms(LOW_BW, problem, old)
        rows.append(
            {
                "M x N x K": "x".join(map(str, sizes)),
                "changed": ", ".join(changed) or "nothing",
                "old config, model ms": old_ms,
                "retuned, model ms": ms,
                "best, model ms": found["best"],
                "reached": book.percent(found["best"] / ms),
            }
        )
    return rows


if __name__ == "__main__":
    report = difference_report()
    book.show(book.table(report, "Times of a model of low_bw; no measurement."))

# %% [markdown]
# Read the report by column: what changed, whether the old config runs at all, and whether the
# search found what there is.
#
# ## One-page checklist
#
# Before you tune:
#
# 1. Description: SMs, shared memory, registers, L2, bandwidth, peak per dtype. From the datasheet,
#    then measure the roofs with `measure_ceilings` and write them beside.
# 2. Which instructions are missing? FP8 tensor cores, TMA, wgmma: each needs another kernel, not
#    another tile.
# 3. Corner of the roofline: which of your problems change sides?
# 4. The limit per kernel, by `kept`. Write it down before you measure.
#
# Then:
#
# 5. All tests of the kernels on the device. A wrong kernel gets no time.
# 6. Old configs as they are: the first table. Some will not compile.
# 7. Retune the kernels that take most of the time; the cache of the old device gives seeds.
# 8. Difference report. A change that you cannot explain is noise until measured twice.
# 9. Table of tiles for the device, and thresholds ([chapter 15](15-regression-control.py)).
# 10. State shares of this device's own roofs, and what was not measured.
#
# ## Design note
#
# **Decision.** Devices are data (`oss_fused/tuning/devices/*.json`), tiles are data (one table per
# device), kernels have a rule for everything else. **Why.** A rule that reads the device serves an
# unknown GPU at once; a table serves a known one best; neither compiles while a request waits.
# **Rejected.** Autotuning at the first call: unsteady latency, unchecked results. One config for
# all: refused by small devices. **Consequence.** An unknown GPU takes the description of the
# nearest older architecture with the limits that the driver reports. **Limit.** The model ranks
# tiles of one product; it knows neither caches nor clocks, so hardware has the last word.
#
# ## The production version
#
# ```
# python scripts/tune.py simulate --device low_bw --sizes 4096x4096x4096
# python scripts/tune.py tiles --sizes 1x5120x2880 1024x5120x2880      # on a GPU: writes its table
# ```
#
# `match_description` chooses a description by the GPU's name ([tuning](../tuning.md)).


# %%
def matched(
    names: tuple[str, ...] = ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA B300"),
) -> list[dict]:
    """Description that the package takes for a GPU's name and compute capability."""
    from oss_fused.tuning.device import match_description

    capability = {"NVIDIA B300": (10, 3)}
    return [
        {"GPU": name, "description": match_description(name, capability.get(name, (9, 0))).name}
        for name in names
    ]


if __name__ == "__main__":
    book.show(book.table(matched()))

# %% [markdown]
# ## Acceptance numbers
#
# The figure of the model is arithmetic: it runs with this chapter. Recovery between two real
# devices is a measurement; without one the table says so.


# %%
def acceptance(sizes: tuple[int, int, int] = PROBLEMS[0]) -> list[book.Bar]:
    """The retuned config, of the best for low_bw; and an H100 retuned from an H200's tiles."""
    found = retuned(sizes)
    reached = found["best"] / simulated_gemm_ms(LOW_BW, found["problem"], found["new"])
    recovery = book.measured("summary.json", "tuning.h100_from_h200_recovery")
    file = "summary.json"
    return [
        book.Bar("retuned for low_bw, of its best (a model)", 0.8, reached, "arithmetic"),
        book.Bar("retuned on an H100, of its best", 0.8, recovery, file),
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Can I tune on a simulated device and ship?** Ship the rule, not the milliseconds. Measure on
# the first device that you get.
#
# **The new device is faster and my kernel is not.** It was bound by latency or launches. Those do
# not grow with the datasheet.
#
# **Why does a device with fewer registers want smaller tiles?** The accumulator is in registers:
# 128 x 256 float32 over 256 threads are 128 per thread, which is all that `low_bw` has.
#
# ## Exercises
#
# 1. Describe a device with 30 % less bandwidth than an H200 and prove by `kept` the 70 % of one
#    row.
# 2. Which fields of `low_bw` refuse the most configs of `FP8_GEMM_CONFIGS`: shared memory or
#    registers?
# 3. Double the shared memory of `low_bw`. Does the retuned config of 4096^3 change?
#
# Answers: [answers/14-adapting-to-a-chip.py](answers/14-adapting-to-a-chip.py).
#
# Next: [regression control](15-regression-control.py).
