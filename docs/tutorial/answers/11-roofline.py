# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 11

# %%
import book

from oss_fused.bench.roofline import analyse

roofs = book.chapter("11-roofline")


# %%
def exercise_1(size: int = 4096, wanted: float = 200.0) -> int:
    """Rows m at which 2 m n k FLOPs over 2 (m k + k n + m n) bytes reach ``wanted``."""
    m = 1
    while m * size * size / (2 * m * size + size * size) < wanted:
        m += 1
    # m n k / (m k + k n + m n) = 200 with n = k = 4096
    assert m == 222
    return m


# %%
def exercise_2() -> str:
    """300 MB in 100 us are 3000 GB/s; 10 GFLOP in 100 us are 100 TFLOP/s."""
    ceilings = roofs.h200_ceilings() or roofs.EXAMPLE
    point = analyse("kernel", 0.1, int(10e9), int(300e6), "bfloat16", ceilings)
    assert point.bottleneck.value == "memory bandwidth"
    return f"{point.share_of_roof:.0%} of {point.bottleneck.value}"


# %%
def exercise_3() -> float:
    """Both are bound by bytes: half the bytes, at best twice the speed."""
    before, after = 2.0, 1.0
    assert before / after == 2.0
    return before / after


if __name__ == "__main__":
    book.show(f"{exercise_1()} rows; {exercise_2()}; {exercise_3()}x")
