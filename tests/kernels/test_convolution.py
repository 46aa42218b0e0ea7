# SPDX-License-Identifier: MIT
"""Convolution against PyTorch: every method, layout and option."""

import pytest
import torch
import torch.nn.functional as F

from oss_fused import conv2d, conv2d_bias_relu, conv2d_direct, conv2d_im2col, im2col
from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.convolution import triton as kernels
from oss_fused.kernels.op import get_kernel

METHODS = {"implicit": conv2d, "direct": conv2d_direct, "im2col": conv2d_im2col}
LAYOUTS = [torch.contiguous_format, torch.channels_last]
# float32 sums in another order; halves round once, a tie may fall to either side
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-2},
}
WINDOWS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (0, 3), "dilation": (2, 1)},
]


def inputs(n=2, ic=5, h=7, w=9, oc=20, kh=3, kw=2, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, ic, h, w, generator=g)
    weight = torch.randn(oc, ic, kh, kw, generator=g) * (ic * kh * kw) ** -0.5
    bias = torch.randn(oc, generator=g)
    return tuple(t.to(dtype).to(device) for t in (x, weight, bias))


def run(backend, method, x, w, bias=None, relu=False, **window):
    pairs = [
        [value, value] if isinstance(value, int) else list(value)
        for value in ({"stride": 1, "padding": 0, "dilation": 1} | window).values()
    ]
    return get_kernel(backend, "conv2d")(x, w, bias, *pairs, relu, method)


@pytest.mark.parametrize("method", ["implicit", "direct"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize("window", WINDOWS, ids=["plain", "strided", "all"])
def test_equal_to_pytorch(method, layout, window, device):
    x, w, bias = inputs(device=device)
    x = x.to(memory_format=layout)
    wanted = F.conv2d(x.double(), w.double(), bias.double(), **window)
    for backend in ("torch", "triton"):
        y = run(backend, method, x, w, bias, **window)
        assert y.is_contiguous(memory_format=layout)
        torch.testing.assert_close(y.double(), wanted, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_bias_and_relu(dtype, device):
    x, w, bias = inputs(ic=17, oc=3, kh=1, kw=1, dtype=dtype, device=device)
    wide = (x.double(), w.double(), bias.double())
    for relu in (False, True):
        wanted = F.conv2d(*wide)
        wanted = wanted.relu() if relu else wanted
        y = run("triton", "implicit", x, w, bias, relu)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("name", METHODS)
def test_the_functions_agree(name, device):
    x, w, bias = inputs(device=device)
    window = WINDOWS[2]
    wanted = F.conv2d(x, w, **window)
    torch.testing.assert_close(METHODS[name](x, w, **window), wanted, rtol=1e-5, atol=1e-5)
    if name != "im2col":
        y = METHODS[name](x, w, bias, **window)
        torch.testing.assert_close(y, F.conv2d(x, w, bias, **window), rtol=1e-5, atol=1e-5)
    fused = conv2d_bias_relu(x, w, bias, padding=1)
    torch.testing.assert_close(fused, F.conv2d(x, w, bias, padding=1).relu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
def test_im2col_copies_windows(backend, layout, device):
    x = inputs(device=device)[0].to(memory_format=layout)
    rows = get_kernel(backend, "im2col")(x, [3, 2], [1, 2], [0, 3], [2, 1])
    expected = F.unfold(x, (3, 2), (2, 1), (0, 3), (1, 2)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows, expected)
    # the buffer beside the input
    assert im2col(x, (3, 2), padding=1).numel() == 2 * 7 * 10 * 5 * 3 * 2


def test_special_values_strides_and_empty(device):
    x, w, bias = inputs(device=device)
    x[0, 0, 0, 0] = float("nan")
    for method in ("implicit", "direct"):
        y = run("triton", method, x, w, bias, True)
        assert y[0, :, 0, 0].isnan().all() and y.isnan().sum() == y.shape[1]
    x, w, _ = inputs(h=14, w=18, device=device)
    part = x[:, 1:4, ::2, ::2]
    y = run("triton", "implicit", part, w[:, 1:4])
    torch.testing.assert_close(y, F.conv2d(part, w[:, 1:4]), rtol=1e-5, atol=1e-5)
    for backend in ("torch", "triton"):
        assert run(backend, "implicit", x[:0], w).shape == (0, 20, 12, 17)
        assert get_kernel(backend, "im2col")(x[:0], [3, 2], [1, 1], [0, 0], [1, 1]).shape == (0, 30)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients(relu, device):
    x, w, bias = (t.requires_grad_() for t in inputs(device=device))
    function = conv2d_bias_relu if relu else conv2d
    y = function(x, w, bias, **WINDOWS[1])
    wanted = F.conv2d(x, w, bias, **WINDOWS[1])
    wanted = wanted.relu() if relu else wanted
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    found = torch.autograd.grad(y, (x, w, bias), grad)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, (x, w, bias), grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bad_arguments_are_named(device):
    x, w, bias = inputs(device=device)
    cases = [
        (SchemeError, r"stride=\[0, 0\]: expected two numbers of at least 1", {"stride": 0}),
        (SchemeError, r"padding=\[-1, 0\]", {"padding": (-1, 0)}),
        (
            SchemeError,
            r"dilation=\(1, 2, 3\): expected a whole number or two",
            {"dilation": (1, 2, 3)},
        ),
        (ShapeMismatchError, r"x.shape=\(2, 5, 7, 9\): expected an image", {"dilation": 9}),
    ]
    for error, words, window in cases:
        with pytest.raises(error, match=words):
            conv2d(x, w, **window)
    with pytest.raises(SchemeError, match=r"kernel_size=1.5: expected a whole number or two"):
        im2col(x, 1.5)
    with pytest.raises(ShapeMismatchError, match="w.shape"):
        conv2d(x[:, :3], w)
    with pytest.raises(UnsupportedDtypeError, match="w.dtype"):
        conv2d(x, w.half())
    with pytest.raises(SchemeError, match="method='winograd'"):
        run("torch", "winograd", x, w, bias)


def far_apart(channels, height, width, device):
    """An image of zeros whose channels' distance times their number passes 2^31."""
    data = torch.empty((channels - 1) * 2**30 + height * width, dtype=torch.float16, device=device)
    return data.as_strided((1, channels, height, width), (0, 2**30, width, 1)).zero_()


@pytest.mark.parametrize("method", ["implicit", "direct"])
def test_channels_far_apart(method, device):
    """Only the pages of values that are there cost memory."""
    x, w, _ = inputs(1, 3, 4, 4, 3, dtype=torch.float16, device=device)
    image = far_apart(3, 4, 4, device).copy_(x)
    y = run("triton", method, image, w)
    assert torch.equal(y, run("triton", method, x, w))
    result = far_apart(3, *y.shape[2:], device)
    rows = y.shape[2] * y.shape[3]
    w = w.contiguous(memory_format=torch.channels_last)
    kernel = kernels._implicit_kernel if method == "implicit" else kernels._direct_kernel
    kernel[(1,)](
        kernels._Strided(x, *x.stride()),
        kernels._Strided(w, *w.stride()),
        None,
        kernels._Result(result, 0, 2**30, 1),
        kernels._Sizes(rows, 3, 3, 4, 4, y.shape[3], rows),
        kernels._Window(1, 1, 0, 0, 1, 1),
        *(3, 2, 1, False, 16, 16, 16),
    )
    assert torch.equal(result, y)
