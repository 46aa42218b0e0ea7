# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 12

# %%
import book
import torch
import torch.nn.functional as F

from oss_fused.tuning.device import load_description

epilogue = book.chapter("12-epilogue-patterns")


# %%
def exercise_1(rows: int = 4096, columns: int = 4096) -> float:
    """Share of bytes saved: 2 written, 2 read and 1 written become 1 written, per value."""
    scales = 4 * rows
    apart, together = rows * columns * (2 + 2 + 1) + scales, rows * columns + scales
    saved = 1 - together / apart
    assert abs(saved - 0.8) < 0.001
    return saved


# %%
def exercise_2(size: int = 4096) -> int:
    """The first multiple of 64 for K at which arithmetic is the limit, by nominal values."""
    device = load_description("h200")
    corner = device.peak_tflops["bfloat16"] * 1e3 / device.memory_bandwidth_gbps
    k = 64
    while 2 * size * size * k / (2 * (2 * size * k + size * size)) < corner:
        k += 64
    assert k == 256
    return k


# %%
def exercise_3(m: int = 6, n: int = 20, k: int = 32) -> float:
    """Exchange the weights: ``silu(x up') * (x gate')`` is gated(x, up, gate)."""
    g = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(s, k, generator=g).to(book.DEVICE) for s in (m, n, n))
    found = epilogue.gated(x, up, gate)
    wanted = (x.double() @ gate.double().t()) * F.silu(x.double() @ up.double().t())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    return float((found.double() - wanted).abs().max())


if __name__ == "__main__":
    book.show(f"{exercise_1():.1%} saved, K = {exercise_2()}, error {exercise_3():.1e}")
