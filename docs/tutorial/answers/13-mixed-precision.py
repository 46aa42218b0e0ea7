# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 13

# %%
import book
import torch

from oss_fused import quantize_fp8
from oss_fused.quant.formats import E4M3, E5M2, fake_quantize, relative_error


# %%
def exercise_1() -> int:
    """2^(mantissa bits + 1): beyond it, the next 1 is lost to rounding."""
    n = 2048
    largest = torch.tensor(float(n), dtype=torch.float16)
    before = torch.tensor(float(n - 1), dtype=torch.float16)
    assert float(before + 1) == n and float(largest + 1) == n
    return n


# %%
def exercise_2(n: int = 20_000) -> float:
    """Half of the scale that 3 standard deviations need: values beyond 1.5 of them saturate."""
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).to(book.DEVICE)
    scale = torch.full((1,), 1.5 / E4M3.max, device=book.DEVICE)
    codes, _ = quantize_fp8(x, scale=scale, on_overflow="saturate")
    # a value that rounds to the largest code without saturating counts as well: few
    share = float((codes.float().abs() == E4M3.max).float().mean())
    exact = float((x.abs() > 1.5).float().mean())
    assert exact <= share < exact + 0.02
    return share


# %%
def exercise_3(n: int = 4096) -> dict[str, float]:
    """Over 12 powers of two both formats hold all values; E4M3 has the extra mantissa bit."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, n, generator=g) * 2.0 ** -torch.randint(0, 12, (1, n), generator=g)
    found = {
        fmt.name: relative_error(x, fake_quantize(x, "tensor", fmt=fmt)) for fmt in (E4M3, E5M2)
    }
    assert found["e4m3"] < 0.6 * found["e5m2"]
    return found


if __name__ == "__main__":
    book.show(f"{exercise_1()}, {exercise_2():.1%} saturate, {exercise_3()}")
