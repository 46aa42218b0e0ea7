# SPDX-License-Identifier: MIT
# %% [markdown]
# # 8. Convolution
#
# **Goal.** Compute a 2-D convolution in three ways (direct, im2col, implicit product), count the
# bytes of each, and fuse bias and ReLU.
#
# x is [N, IC, H, W], w is [OC, IC, KH, KW]. With stride s, padding p and dilation d, result
# position o reads x at `o * s + i * d - p` for tap i of the window.

# %%
import book
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.problems import ConvolutionInput
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.numerics import round_to

# %% [markdown]
# ## Direct
#
# A program owns some positions of one result channel. It loops over channels and taps. A tap that
# falls outside the image is masked and counts as 0: that is padding, without a padded copy.


# %%
@triton.jit
def _direct_kernel(
    x, w, out, channels, height, width, out_height, out_width, stride, padding, dilation,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, out_channel = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < out_height * out_width
    top = pixel // out_width * stride - padding
    left = pixel % out_width * stride - padding
    x += image * channels * height * width
    w += out_channel * channels * KH * KW
    acc = tl.zeros([BLOCK], tl.float32)
    for c in range(0, channels):
        for i in range(KH):
            for j in range(KW):
                h, v = top + i * dilation, left + j * dilation
                seen = inside & (h >= 0) & (h < height) & (v >= 0) & (v < width)
                value = tl.load(x + (c * height + h) * width + v, mask=seen, other=0.0)
                weight = tl.load(w + (c * KH + i) * KW + j)
                acc += value.to(tl.float32) * weight.to(tl.float32)
    place = (image * tl.num_programs(1) + out_channel) * out_height * out_width + pixel
    tl.store(out + place, round_to(acc, out.dtype.element_ty), mask=inside)


def size_of(size: int, window: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Positions of a window along one axis."""
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def conv_direct(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    block: int = 128,
) -> torch.Tensor:
    """Convolution of contiguous x [N, IC, H, W] with w [OC, IC, KH, KW]; float32 sums."""
    images, channels, height, width = x.shape
    out_channels, _, kh, kw = w.shape
    oh = size_of(height, kh, stride, padding, dilation)
    ow = size_of(width, kw, stride, padding, dilation)
    out = torch.empty(images, out_channels, oh, ow, dtype=x.dtype, device=x.device)
    if out.numel():
        _direct_kernel[(images, out_channels, cdiv(oh * ow, block))](
            x.contiguous(), w.contiguous(), out, channels, height, width, oh, ow,
            stride, padding, dilation, KH=kh, KW=kw, BLOCK=block,
        )  # fmt: skip
    return out


# %% [markdown]
# It loads a value of x once per tap and result channel, and multiplies without tensor cores.
#
# ## im2col: a matrix product with a copy
#
# Write each window as a row of a matrix [N OH OW, IC KH KW]. Then a convolution is one matrix
# product, and [chapter 6](06-matmul.py) makes it fast. The price is the buffer: up to KH * KW
# times the input.


# %%
def conv_im2col(
    x: torch.Tensor, w: torch.Tensor, stride: int = 1, padding: int = 0, dilation: int = 1
) -> torch.Tensor:
    """Convolution by the package's ``im2col`` and the product of chapter 6."""
    from oss_fused import im2col

    product = book.chapter("06-matmul").matmul_v3
    images, out_channels = x.shape[0], w.shape[0]
    oh = size_of(x.shape[2], w.shape[2], stride, padding, dilation)
    ow = size_of(x.shape[3], w.shape[3], stride, padding, dilation)
    window = tuple(w.shape[2:])
    rows = im2col(x, window, stride=stride, padding=padding, dilation=dilation)
    tile = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4}
    y = product(rows, w.reshape(out_channels, -1).t(), **tile)
    return y.view(images, oh, ow, out_channels).permute(0, 3, 1, 2)


# %% [markdown]
# ## The implicit product
#
# The matrix of im2col need not exist. A kernel can compute, for each row and column of a tile,
# which value of x it would hold, and load that. The package's `conv2d` does so: the tile of the
# left operand is gathered, then multiplied on tensor cores.


# %%
def versions(
    n: int = 1, ic: int = 4, oc: int = 4, size: int = 8, window: int = 3, stride: int = 1
) -> list[dict]:
    """The version table: error and bytes beside the input, of each way."""
    from oss_fused import conv2d

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, ic, size, size, generator=generator).to(book.DEVICE)
    w = torch.randn(oc, ic, window, window, generator=generator).to(book.DEVICE)
    padding = window // 2
    wanted = F.conv2d(x.double(), w.double(), stride=stride, padding=padding)
    positions = size_of(size, window, stride, padding) ** 2
    buffer = n * positions * ic * window**2 * x.element_size()
    found = {
        "direct": ("no tensor cores", conv_direct(x, w, stride, padding), 0),
        "im2col": ("a buffer, then a product", conv_im2col(x, w, stride, padding), buffer),
        "implicit": ("the product gathers", conv2d(x, w, stride=stride, padding=padding), 0),
    }
    rows = []
    for name, (change, y, extra) in found.items():
        result = check_accuracy(y, wanted)
        row = {"version": name, "change": change, "input bytes": x.numel() * x.element_size()}
        row |= {"extra bytes": extra, "relative L2": result.metrics.relative_l2}
        rows.append(row | {"accepted": result.passed})
    return rows


if __name__ == "__main__":
    book.show(book.table(versions(), book.here("1x4x8x8, 4 channels out, 3x3, float32")))

# %% [markdown]
# ## Two layouts
#
# In NCHW neighbours in memory are neighbours along the width; along the channels they are H * W
# values apart. In NHWC (`channels_last`) the channels of a position are one run. The reduction of
# a convolution runs over channels, so in NHWC a thread loads eight of them at once (16 bytes), and
# a block of channels of a tap is a tile of the left operand as it lies. In NCHW neighbouring
# threads must read along the width: coalesced, but one value each, and a row of odd length begins
# between lines. So NHWC is the layout to use on tensor cores.
#
# ## Winograd, in a paragraph
#
# Winograd's algorithm computes a tile of 2 x 2 results of a 3 x 3 window with 16 multiplications
# instead of 36. It transforms input, window and result by small matrices. It costs accuracy in 16
# bits, and pays where multiplications are scarce. On tensor cores they are not, so the package
# does not use it.
#
# ## Fusing bias and ReLU
#
# Three kernels move x + w + y, then y + bias + y, then y + y. One kernel moves x + w + bias + y.
# This is arithmetic from shapes; times are another matter, and stand below.


# %%
RESNET = ((32, 64, 64, 56), (32, 128, 128, 28), (32, 256, 256, 14), (32, 512, 512, 7))


def bytes_saved(shapes: tuple[tuple[int, int, int, int], ...] = RESNET) -> list[dict]:
    """Bytes of three kernels and of one, for 3x3 convolutions of ResNet-50 in bfloat16."""
    rows = []
    for shape in shapes:
        problem = ConvolutionInput(*shape)
        rows.append(
            {
                "N x IC x OC x size": "x".join(map(str, shape)),
                "three kernels, MB": problem.unfused_bytes / 1e6,
                "one kernel, MB": problem.num_bytes / 1e6,
                "saved": book.percent(problem.saved),
                "im2col buffer, MB": problem.expanded_bytes / 1e6,
            }
        )
    return rows


if __name__ == "__main__":
    book.show(book.table(bytes_saved(), "Arithmetic from shapes, bfloat16."))

# %% [markdown]
# ## Time


# %%
def speed(size: int = 6, channels: int = 4) -> list[dict]:
    """Times of the three ways here, beside PyTorch's."""
    from oss_fused import conv2d

    x = torch.randn(1, channels, size, size, device=book.DEVICE)
    w = torch.randn(channels, channels, 3, 3, device=book.DEVICE)
    calls = {
        "direct": lambda: conv_direct(x, w, padding=1),
        "im2col": lambda: conv_im2col(x, w, padding=1),
        "implicit": lambda: conv2d(x, w, padding=1),
        "F.conv2d": lambda: F.conv2d(x, w, padding=1),
    }
    rows = []
    for name, call in calls.items():
        ms, spread, _ = book.timed(call)
        rows.append({"version": name, "ms": ms, "RSD": book.percent(spread)})
    return rows


def h200_convolutions() -> list[dict]:
    """Convolution and its fused form on one H200, against cuDNN."""
    rows = []
    for shape in RESNET:
        for name in ("oss_fused", "oss_fused bias relu"):
            problem = ConvolutionInput(*shape).label()
            found = book.measured_rows(
                "operators-convolution.json",
                "rows",
                operation="convolution",
                implementation=name,
                problem=problem,
            )
            row = found[0] if found else {}
            tflops = row.get("tflops")
            rows.append(
                {
                    "problem": problem,
                    "version": name,
                    "us": row.get("us"),
                    "GFLOPS": tflops and 1e3 * tflops,
                    "over cuDNN": row.get("speedup"),
                }
            )
    return rows


if __name__ == "__main__":
    book.show(book.table(speed(), book.here("1x4x6x6 float32", True)))
    book.show(book.table(h200_convolutions(), book.source("operators-convolution.json")))

# %% [markdown]
# ## The production version
#
# `conv2d`, `conv2d_bias_relu`, `conv2d_direct` and `conv2d_im2col` of the package take stride,
# padding and dilation per axis, both layouts, and are differentiable
# ([operators](../operators.md#functions)).


# %%
def fused(size: int = 7, channels: int = 4) -> list[dict]:
    """``conv2d_bias_relu`` against convolution, bias and ReLU of this chapter."""
    from oss_fused import conv2d_bias_relu

    generator = torch.Generator().manual_seed(4)
    shapes = ((1, channels, size, size), (channels, channels, 3, 3), (channels,))
    x, w, bias = (torch.randn(shape, generator=generator).to(book.DEVICE) for shape in shapes)
    exact = F.conv2d(x.double(), w.double(), bias.double(), padding=1).relu()
    three = (conv_direct(x, w, padding=1) + bias[:, None, None]).relu()
    one = conv2d_bias_relu(x, w, bias, padding=1)
    return [
        {"version": name, "kernels": count, "largest error": float((y - exact).abs().max())}
        for name, count, y in (("chapter", 3, three), ("conv2d_bias_relu", 1, one))
    ]


if __name__ == "__main__":
    book.show(book.table(fused(), book.here("1x4x7x7, 3x3, float32")))

# %% [markdown]
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """Bytes saved by fusing, from shapes; time against cuDNN, measured."""
    saved = min(ConvolutionInput(*shape).saved for shape in RESNET)
    ratio = book.measured("summary.json", "operators.conv.vs_cudnn_min")
    return [
        book.Bar(
            "bytes saved by bias and ReLU in the kernel, ResNet-50", 0.25, saved, "arithmetic"
        ),
        book.Bar(
            "implicit convolution of cuDNN's speed, NHWC",
            0.8,
            ratio,
            "operators-convolution.json",
        ),
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Is a convolution memory or compute bound?** Count: the table above has the bytes, and 2 N OC OH
# OW IC KH KW are the FLOPs. With 64 channels and 3 x 3 taps, arithmetic decides.
#
# **Why is im2col still in use?** It needs no new kernel. For one image and few channels its buffer
# is small.
#
# **What does dilation cost?** Nothing in arithmetic. The taps lie further apart, so rows share
# fewer lines.
#
# ## Exercises
#
# 1. Write a 1 x 1 convolution as a matrix product without a buffer.
# 2. Compute the ratio of im2col's buffer to its input for stride 1 and stride 2, window 3, size 56.
# 3. Show that `conv_direct` with dilation 2 equals `F.conv2d`.
#
# Answers: [answers/08-convolution.py](answers/08-convolution.py).
#
# Next: [attention](09-attention.py).
