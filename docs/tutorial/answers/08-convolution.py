# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 8

# %%
import book
import torch
import torch.nn.functional as F

convolution = book.chapter("08-convolution")
matmul = book.chapter("06-matmul")


# %%
def exercise_1(size: int = 5) -> float:
    """A 1 x 1 convolution: in NHWC the input is the matrix [N H W, IC] as it lies."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, size, size, generator=g).to(book.DEVICE)
    w = torch.randn(4, 6, 1, 1, generator=g).to(book.DEVICE)
    rows = x.permute(0, 2, 3, 1).contiguous().view(-1, 6)
    y = matmul.matmul_v1(rows, w.view(4, 6).t()).view(2, size, size, 4).permute(0, 3, 1, 2)
    wanted = F.conv2d(x.double(), w.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    return float((y.double() - wanted).abs().max())


# %%
def exercise_2(size: int = 56, window: int = 3) -> dict[int, float]:
    """im2col's buffer over its input, by stride: 9 and 2.25."""
    found = {
        stride: convolution.size_of(size, window, stride, 1) ** 2 * window**2 / size**2
        for stride in (1, 2)
    }
    assert found == {1: 9.0, 2: 2.25}
    return found


# %%
def exercise_3() -> float:
    """Largest error of ``conv_direct`` with dilation 2."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 9, 9, generator=g).to(book.DEVICE)
    w = torch.randn(2, 3, 3, 3, generator=g).to(book.DEVICE)
    found = convolution.conv_direct(x, w, dilation=2)
    wanted = F.conv2d(x.double(), w.double(), dilation=2)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    return float((found.double() - wanted).abs().max())


if __name__ == "__main__":
    book.show(f"{exercise_1():.1e}, {exercise_2()}, {exercise_3():.1e}")
