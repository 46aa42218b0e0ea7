# SPDX-License-Identifier: MIT
"""The Gluon convolution: when it is chosen, and on a Hopper GPU what it returns."""

import math

import pytest
import torch

from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.op import get_kernel

hopper_kernel = pytest.importorskip("oss_fused.kernels.convolution.hopper")

CUDA = torch.device("cuda")
BF16, HALF = torch.bfloat16, torch.float16


def operands(n=2, ic=64, h=9, w=7, oc=72, kh=3, kw=3, dtype=BF16, device="cpu"):
    g = torch.Generator().manual_seed(h + w)
    x = torch.randn(n, ic, h, w, generator=g).to(dtype).to(device)
    weight = torch.randn(oc, ic, kh, kw, generator=g) * (ic * kh * kw) ** -0.5
    bias = torch.randn(oc, generator=g).to(dtype).to(device)
    return x.to(memory_format=torch.channels_last), weight.to(dtype).to(device), bias


@pytest.mark.parametrize(
    "shape,stride,taken",
    [
        ({}, [1, 1], True),
        ({"dtype": HALF}, [2, 2], True),
        ({"dtype": torch.float32}, [1, 1], False),
        ({"ic": 24}, [1, 1], False),
        ({"ic": 36}, [1, 1], False),
        ({"oc": 12}, [1, 1], False),
        ({}, [3, 3], False),
        ({}, [1, 2], False),
        ({"h": 1}, [2, 2], False),
    ],
)
def test_the_rule(shape, stride, taken):
    x, w, _ = operands(**shape)
    assert hopper_kernel.takes(x, w, stride) == taken
    assert not hopper_kernel.takes(x.contiguous(), w, stride)
    # one value beyond 16 bytes
    moved = torch.empty(w.numel() + 1, dtype=w.dtype)[1:].view(w.shape)
    assert not hopper_kernel.takes(x, moved, stride)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    "size,channels,most",
    # 64 positions by 64 channels that the busiest of 132 multiprocessors computes
    [((56, 32, 56), 64, 12), ((28, 32, 28), 128, 6), ((7, 32, 7), 512, 4), ((1, 1, 1), 8, 3)],
)
def test_tiles_fill_the_gpu(size, channels, most, shares):
    tile = hopper_kernel._tile(size, channels, shares, 132)
    assert tile.box[0] * tile.box[1] * tile.box[2] == 64 and tile.box[1] * tile.box[2] >= 8
    assert shares or not tile.shared
    covered = math.prod(-(-whole // part) for whole, part in zip(size, tile.box))
    tiles = -(-covered // tile.consumers) * -(-channels // tile.block_n)
    assert -(-tiles // 132) * tile.consumers * tile.block_n // 64 <= most


@pytest.fixture
def hopper():
    if not runs_gluon(CUDA):
        pytest.skip("needs a Hopper GPU and Gluon")


def run(backend, x, w, bias, relu=False, stride=1, padding=0, dilation=1):
    kernel = get_kernel(backend, "conv2d")
    return kernel(x, w, bias, [stride] * 2, [padding] * 2, [dilation] * 2, relu, "implicit")


def assert_near(got, want):
    assert got.dtype == want.dtype and got.is_contiguous(memory_format=torch.channels_last)
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-6)
    assert error < 4e-3, float(error)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape,window",
    [
        ({}, {"padding": 1}),
        ({"dtype": HALF}, {"padding": 1}),
        ({"n": 1, "h": 3, "w": 3}, {}),
        ({"n": 33, "h": 14, "w": 14, "ic": 96, "oc": 136}, {"padding": 1}),
        ({"h": 56, "w": 41}, {"padding": 2, "dilation": 2}),
        ({"h": 29, "w": 30, "ic": 128}, {"padding": 1, "stride": 2}),
        ({"h": 29, "w": 30, "kh": 1, "kw": 1, "oc": 256}, {}),
        ({"h": 30, "w": 29, "kh": 1, "kw": 1}, {"stride": 2}),
        ({"h": 12, "w": 20, "kh": 5, "kw": 2, "ic": 40}, {"padding": 3, "stride": 2}),
        ({"h": 12, "w": 20, "kh": 3, "kw": 5}, {"padding": 4}),
    ],
)
def test_equal_to_the_twin(hopper, shape, window):
    x, w, bias = operands(**shape, device=CUDA)
    assert hopper_kernel.takes(x, w, [window.get("stride", 1)] * 2)
    for relu, bias_or_none in ((False, None), (True, bias.float())):
        arguments = (x, w, bias_or_none, relu)
        assert_near(run("triton", *arguments, **window), run("torch", *arguments, **window))


@pytest.mark.gpu
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("box,shared", [((8, 1, 8), True), ((1, 8, 8), True), ((4, 2, 8), False)])
def test_tiles(hopper, consumers, block_n, box, shared):
    if shared and hopper_kernel.view_of is None:
        pytest.skip("this Triton has no views that overlap")
    x, w, bias = operands(n=5, h=19, w=23, ic=160, oc=200, device=CUDA)
    out = torch.full((5, 200, 19, 23), float("nan"), dtype=BF16, device=CUDA)
    out = out.to(memory_format=torch.channels_last)
    tile = hopper_kernel.Tile(consumers, block_n, box, shared)
    last = w.to(memory_format=torch.channels_last)
    hopper_kernel.convolve(x, last, bias, out, [1, 1], [1, 1], [1, 1], True, tile)
    assert_near(out, run("torch", x, w, bias, True, padding=1))


@pytest.mark.gpu
def test_slices_of_images_and_channels(hopper):
    whole, w, bias = operands(n=4, ic=128, h=20, w=20, device=CUDA)
    x = whole[1:, 64:]
    # a slice of channels is NCHW to PyTorch: the other kernel takes it
    for part in (x, x.contiguous(memory_format=torch.channels_last)):
        narrow = w[:, :64]
        got, want = (run(backend, part, narrow, bias) for backend in ("triton", "torch"))
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2e-2)


@pytest.mark.gpu
def test_special_values(hopper):
    """NaN passes ReLU, and padding adds zeros even beside infinities."""
    x, w, bias = operands(device=CUDA)
    x[0, 3, 4, 4] = float("nan")
    x[1, 5, 0, 0] = float("inf")
    got = run("triton", x, w, bias, True, padding=1)
    want = run("torch", x, w, bias, True, padding=1)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 1])
def test_runs_are_equal_bit_by_bit(hopper, padding):
    x, w, bias = operands(n=16, ic=256, oc=256, h=28, w=28, device=CUDA)
    first = run("triton", x, w, bias, padding=padding)
    for _ in range(5):
        assert torch.equal(first, run("triton", x, w, bias, padding=padding))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{}, {"n": 3, "h": 14, "w": 14, "ic": 96, "oc": 136}])
def test_channels_first(hopper, shape):
    """NCHW images and weights go by copies with channels last; the result is NCHW again."""
    x, w, bias = operands(**shape, device=CUDA)
    first = x.contiguous()
    got = run("triton", first, w, bias, True, padding=1)
    assert got.is_contiguous()
    assert torch.equal(got, run("triton", x, w, bias, True, padding=1))


@pytest.mark.gpu
def test_operands_off_16_bytes(hopper):
    """Descriptors take none of these: they are copied."""
    x, w, bias = operands(device=CUDA)
    moved = []
    for each in (x, w.contiguous(memory_format=torch.channels_last)):
        room = torch.empty(each.numel() + 1, dtype=each.dtype, device=CUDA)[1:]
        moved.append(room.as_strided(each.shape, each.stride(), 1).copy_(each))
    want = run("triton", x, w, bias, padding=1)
    assert torch.equal(run("triton", *moved, bias, padding=1), want)
