# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 9

# %%
import book
import torch
import torch.nn.functional as F


# %%
def exercise_1(heads: int = 32, element_bytes: int = 2) -> int:
    """The first power of two N at which logits and weights of level a pass 1 GiB."""
    n = 1
    while 2 * heads * n * n * element_bytes <= 2**30:
        n *= 2
    assert n == 4096
    return n


# %%
def causal_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> torch.Tensor:
    """Causal attention of one head by blocks of keys; q, k [N, D], v [N, Dv]."""
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    m = torch.full((q.shape[0], 1), float("-inf"), device=q.device)
    total = torch.zeros_like(m)
    acc = torch.zeros(q.shape[0], v.shape[1], device=q.device)
    for start in range(0, k.shape[0], block):
        keys = torch.arange(start, min(start + block, k.shape[0]), device=q.device)
        logits = q @ k[keys].t() / q.shape[1] ** 0.5
        logits = logits.masked_fill(keys[None, :] > rows, float("-inf"))
        new = torch.maximum(m, logits.amax(1, keepdim=True))
        # a row that saw nothing yet keeps a finite number to subtract
        safe = new.masked_fill(new == float("-inf"), 0.0)
        weights = torch.exp(logits - safe)
        total = total * torch.exp(m - safe) + weights.sum(1, keepdim=True)
        acc = acc * torch.exp(m - safe) + weights @ v[keys]
        m = new
    return acc / total


def exercise_2(n: int = 40) -> float:
    """Largest difference to PyTorch's causal attention."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 8, generator=g) for _ in "qkv")
    found = causal_flash(q, k, v, 16)
    heads = [t.double()[None, None] for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, is_causal=True)[0, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    return float((found.double() - wanted).abs().max())


# %%
def merge(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]):
    """One (acc, m, l) of two that saw different keys."""
    (acc, m, total), (other, best, more) = first, second
    new = torch.maximum(m, best)
    left, right = torch.exp(m - new), torch.exp(best - new)
    return acc * left + other * right, new, total * left + more * right


def exercise_3(n: int = 24) -> float:
    """Largest difference of attention over two halves of the keys, merged, to the whole."""
    g = torch.Generator().manual_seed(1)
    logits, v = 5 * torch.randn(4, n, generator=g), torch.randn(n, 8, generator=g)

    def part(keys: slice) -> tuple[torch.Tensor, ...]:
        best = logits[:, keys].amax(1, keepdim=True)
        weights = torch.exp(logits[:, keys] - best)
        return weights @ v[keys], best, weights.sum(1, keepdim=True)

    acc, _, total = merge(part(slice(0, 7)), part(slice(7, n)))
    wanted = torch.softmax(logits, -1) @ v
    torch.testing.assert_close(acc / total, wanted, rtol=1e-4, atol=1e-5)
    return float((acc / total - wanted).abs().max())


if __name__ == "__main__":
    book.show(f"N = {exercise_1()}, {exercise_2():.1e}, {exercise_3():.1e}")
