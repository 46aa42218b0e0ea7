# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 6

# %%
import book
import torch
import torch.nn.functional as F

from oss_fused.tuning.prune import estimate_resources

matmul = book.chapter("06-matmul")
elementwise = book.chapter("05-elementwise-and-reduction")


# %%
def exercise_1(element_bytes: int = 2) -> dict[str, float]:
    """FLOPs per byte that a program loads: 2 m n k over (m k + k n) times the element size."""
    tiles = {"v1": (64, 64), "v2": (128, 128)}
    found = {name: 2 * m * n / ((m + n) * element_bytes) for name, (m, n) in tiles.items()}
    # a tile twice as wide and high reuses each value twice as often
    assert found == {"v1": 32.0, "v2": 64.0}
    return found


# %%
def exercise_2() -> dict[str, int]:
    """Bytes of shared memory that the stages take; v3 has tiles of 128 x 256."""
    v3 = {**matmul.UNTUNED, "BLOCK_N": 256, "num_warps": 8}
    found = {
        name: estimate_resources(config, 2).shared_memory_bytes
        for name, config in (("v2", matmul.UNTUNED), ("v3", v3))
    }
    assert found == {"v2": 3 * (128 + 128) * 64 * 2, "v3": 3 * (128 + 256) * 64 * 2}
    return found


# %%
def exercise_3(m: int = 9, n: int = 20, k: int = 17) -> float:
    """Largest error of v4 and an addition; the addition moves three more times the result."""
    g = torch.Generator().manual_seed(0)
    a, b, bias, r = (
        torch.randn(s, generator=g).to(book.DEVICE) for s in ((m, k), (k, n), (n,), (m, n))
    )
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "num_warps": 4}
    product = matmul.matmul_v4(a, b, bias, **tile)
    found = elementwise.add(product.flatten(), r.flatten()).view(m, n)
    wanted = F.silu(a.double() @ b.double() + bias.double()) + r.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    return float((found.double() - wanted).abs().max())


if __name__ == "__main__":
    book.show(f"{exercise_1()}, {exercise_2()}, error {exercise_3():.2g}")
