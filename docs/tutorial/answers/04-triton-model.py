# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 4

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv

# %% [markdown]
# ## 1. A transpose by tiles
#
# The tile is loaded along rows of x and stored along rows of the result: both coalesced.


# %%
@triton.jit
def _transpose_kernel(x, out, rows, columns, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(x + r[:, None] * columns + c[None, :], mask=inside)
    turned = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(tile), mask=turned)


def transpose(x: torch.Tensor, block: int = 16) -> torch.Tensor:
    """Contiguous transpose of contiguous x [rows, columns]."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (cdiv(rows, block), cdiv(columns, block))
        _transpose_kernel[grid](x, out, rows, columns, BLOCK=block)
    return out


def exercise_1(rows: int = 35, columns: int = 18) -> bool:
    """Whether the kernel transposes a matrix that no tile divides."""
    x = torch.arange(rows * columns, dtype=torch.float32, device=book.DEVICE).view(rows, columns)
    assert torch.equal(transpose(x), x.t())
    return True


# %%
def exercise_2() -> list[int]:
    """Every N below 32: one block of 64 with more than half of it idle. Above, never."""
    found = [n for n in range(1, 201) if 1 - n / (cdiv(n, 64) * 64) > 0.5]
    assert found == list(range(1, 32))
    return found


if __name__ == "__main__":
    book.show(f"Transposed: {exercise_1()}. N = {exercise_2()[0]} to {exercise_2()[-1]}.")
