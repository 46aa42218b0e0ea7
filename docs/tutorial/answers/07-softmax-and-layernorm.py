# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 7

# %%
import book
import torch

from oss_fused.kernels.integers import cdiv


# %%
def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """``x - max - log(sum(e^(x - max)))`` over the last dimension, float32."""
    shifted = x.float() - x.float().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def exercise_1() -> tuple[float, float]:
    """At -200 the softmax is 0 in float32, and its log is -Inf; log-softmax is -200."""
    x = torch.tensor([[0.0, -200.0]])
    direct, logged = log_softmax(x)[0, 1], torch.softmax(x, -1).log()[0, 1]
    torch.testing.assert_close(log_softmax(x), torch.log_softmax(x, -1))
    assert torch.isinf(logged) and float(direct) == -200.0
    return float(direct), float(logged)


# %%
def merge(
    first: tuple[int, float, float], second: tuple[int, float, float]
) -> tuple[int, float, float]:
    """Count, mean and sum of squared distances of two parts together."""
    (n, mean, squares), (m, other, more) = first, second
    delta, total = other - mean, n + m
    return total, mean + delta * m / total, squares + more + delta * delta * n * m / total


def exercise_2(n: int = 101) -> float:
    """Variance of two merged halves, less that of the whole."""
    x = 1000 + torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def of(part: torch.Tensor) -> tuple[int, float, float]:
        return len(part), float(part.mean()), float(((part - part.mean()) ** 2).sum())

    count, mean, squares = merge(of(x[:37]), of(x[37:]))
    assert abs(mean - float(x.mean())) < 1e-9
    difference = squares / count - float(x.var(unbiased=False))
    assert abs(difference) < 1e-9
    return difference


# %%
def exercise_3(block: int = 256, longest: int = 1024) -> list[int]:
    """Row lengths of which at least a fifth of the lanes lies beyond the row."""
    found = [n for n in range(1, longest + 1) if 1 - n / (cdiv(n, block) * block) >= 0.2]
    assert 204 in found and 205 not in found and 256 not in found and 257 in found
    return found


if __name__ == "__main__":
    book.show(f"{exercise_1()}; {exercise_2():.1e}; {len(exercise_3())} lengths up to 1024")
