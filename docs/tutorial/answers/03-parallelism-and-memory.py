# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 3

# %%
import book

from oss_fused.tuning.device import load_description

memory = book.chapter("03-parallelism-and-memory")


# %%
def exercise_1() -> float:
    """Useful share of the sectors of a warp that reads bfloat16 at stride 2: a half."""
    sectors = memory.lines_per_warp(2, element_bytes=2)[1]
    share = 32 * 2 / (32 * sectors)
    assert share == 0.5
    return share


# %%
def exercise_2() -> int:
    """The largest square tile (BLOCK_K 64, 3 stages, 8 warps, bfloat16) that fits low_bw."""
    low = load_description("low_bw")
    common = {"BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    fits = [
        size
        for size in (16, 32, 64, 128, 256)
        if memory.resident(low, {"BLOCK_M": size, "BLOCK_N": size, **common})
    ]
    # 128: 3 stages of two tiles of 128 x 64 x 2 bytes are 96 KiB, more than 64 KiB
    assert max(fits) == 64
    return max(fits)


# %%
def exercise_3() -> float:
    """No: 1 GB in 0.5 ms are 2000 GB/s, which an H200 has; but the question is its share."""
    share = 1e9 / 0.5e-3 / (load_description("h200").memory_bandwidth_gbps * 1e9)
    # possible, at under half of the nominal bandwidth: the kernel is not bound by memory
    assert 0.4 < share < 0.5
    return share


if __name__ == "__main__":
    book.show(f"{exercise_1()}, {exercise_2()}, {exercise_3():.2f} of nominal")
