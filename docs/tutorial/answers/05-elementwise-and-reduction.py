# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 5

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import round_to

elementwise = book.chapter("05-elementwise-and-reduction")
_load = elementwise._load


# %%
@triton.jit
def _silu_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    value, offsets, mask = _load(x, n, BLOCK_SIZE)
    value = value / (1.0 + tl.exp(-value))
    tl.store(out + offsets, round_to(value, out.dtype.element_ty), mask=mask)


def exercise_1(n: int = 300) -> float:
    """SiLU equals PyTorch's, and is -0 at -200: e^200 is Inf, and -200 / Inf is -0."""
    x = torch.linspace(-200, 50, n, device=book.DEVICE)
    found = elementwise._launch(_silu_kernel, x, BLOCK_SIZE=128)
    torch.testing.assert_close(found, torch.nn.functional.silu(x), rtol=1e-5, atol=1e-6)
    return float(found[0])


# %%
def exercise_2(n: int = 1_000_000, element_bytes: int = 4) -> tuple[int, int]:
    """Two kernels read and write twice, one kernel once: half the bytes."""
    two, one = 4 * n * element_bytes, 2 * n * element_bytes
    assert one * 2 == two
    return two, one


# %%
@triton.jit
def _max_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # minus infinity is the neutral element of a maximum; 0 would win over negative values
    values = tl.load(x + offsets, mask=offsets < n, other=float("-inf"))
    tl.store(out + tl.program_id(0), tl.max(values, 0))


def exercise_3(n: int = 100) -> float:
    """The maximum of values that are all negative."""
    part = -1.0 - torch.rand(n, generator=torch.Generator().manual_seed(0)).to(book.DEVICE)
    wanted = float(part.max())
    while part.numel() > 1:
        found = torch.empty(cdiv(part.numel(), 64), device=part.device)
        _max_kernel[(found.numel(),)](part, found, part.numel(), 64)
        part = found
    assert float(part[0]) == wanted
    return wanted


if __name__ == "__main__":
    book.show(f"silu(-200) = {exercise_1()}; bytes {exercise_2()}; maximum {exercise_3():.3f}")
