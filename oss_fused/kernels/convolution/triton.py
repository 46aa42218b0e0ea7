# SPDX-License-Identifier: MIT
"""Convolution; see kernels/convolution.

"implicit": the reduction runs over taps of the window, and over blocks of channels inside a tap. In
NHWC a block of channels is one run of memory, and loads are vectors. In NCHW neighbours along the
channels are H * W values apart: a warp then reads along the width, a value a thread. Weights are
taken with channels last, one copy if they are not. On Hopper hopper.py takes halves in NHWC, and
NCHW images by way of NHWC copies of image and result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.convolution.shape import layout_of, output_size
from oss_fused.kernels.convolution.transpose import from_channels_last, to_channels_last
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.numerics import INTERPRETED, round_to


class _Strided(NamedTuple):
    """A tensor and its strides: x [n, c, h, w], w [output channel as n, c, h, w]."""

    data: Any
    n: Any
    c: Any
    h: Any
    w: Any


class _Result(NamedTuple):
    """The result, and its strides of image, channel and pixel."""

    data: Any
    n: Any
    c: Any
    pixel: Any


class _Sizes(NamedTuple):
    """Output positions (of all images), channels, sizes of x; width and pixels of a result."""

    rows: Any
    in_channels: Any
    out_channels: Any
    height: Any
    width: Any
    out_width: Any
    pixels: Any


class _Window(NamedTuple):
    """Where the window's taps are."""

    stride_h: Any
    stride_w: Any
    pad_h: Any
    pad_w: Any
    dilation_h: Any
    dilation_w: Any


@triton.jit
def _positions(m, sizes, window):
    """Image, row and column of x at the first tap of output positions ``m``."""
    pixel = m % sizes.pixels
    top = pixel // sizes.out_width * window.stride_h - window.pad_h
    left = pixel % sizes.out_width * window.stride_w - window.pad_w
    return m // sizes.pixels, top, left


@triton.jit
def _inside(h, v, m, sizes):
    """Which taps are in x, of positions that exist."""
    return (h >= 0) & (h < sizes.height) & (v >= 0) & (v < sizes.width) & (m < sizes.rows)


@triton.jit
def _finish(acc, bias, out, m, channels, n, sizes, RELU: tl.constexpr):
    """Bias, ReLU and store of acc [positions, channels]."""
    in_channels = channels < sizes.out_channels
    if bias is not None:
        acc += tl.load(bias + channels, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    if RELU:
        # not a maximum with 0, which would swallow NaN
        acc = tl.where(acc < 0.0, 0.0, acc)
    place = (n * out.n + m % sizes.pixels * out.pixel)[:, None]
    place += channels.to(tl.int64)[None, :] * out.c
    mask = (m < sizes.rows)[:, None] & in_channels[None, :]
    tl.store(out.data + place, round_to(acc, out.data.dtype.element_ty), mask=mask)


@triton.jit
def _implicit_kernel(
    x,
    w,
    bias,
    out,
    sizes,
    window,
    KH: tl.constexpr,
    KW: tl.constexpr,
    CHANNEL_BLOCKS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_n = tl.cdiv(sizes.out_channels, BLOCK_N)
    # all channels of some positions follow each other: they find x in L2
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, top, left = _positions(m, sizes, window)
    lane = tl.arange(0, BLOCK_K)
    x_rows = x.data + n * x.n
    w_columns = w.data + channels.to(tl.int64) * w.n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, KH * KW * CHANNEL_BLOCKS):
        tap = step // CHANNEL_BLOCKS
        c = step % CHANNEL_BLOCKS * BLOCK_K + lane
        # images and windows may be large: channels are then far apart
        far = c.to(tl.int64)
        h = top + tap // KW * window.dilation_h
        v = left + tap % KW * window.dilation_w
        a = tl.load(
            (x_rows + h * x.h + v * x.w)[:, None] + far[None, :] * x.c,
            mask=_inside(h, v, m, sizes)[:, None] & (c < sizes.in_channels)[None, :],
            other=0.0,
        )
        b = tl.load(
            (w_columns + tap // KW * w.h + tap % KW * w.w)[None, :] + far[:, None] * w.c,
            mask=(c < sizes.in_channels)[:, None] & (channels < sizes.out_channels)[None, :],
            other=0.0,
        )
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    _finish(acc, bias, out, m, channels, n, sizes, RELU)


@triton.jit
def _direct_kernel(
    x,
    w,
    bias,
    out,
    sizes,
    window,
    KH: tl.constexpr,
    KW: tl.constexpr,
    CHANNEL_BLOCKS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_n = tl.cdiv(sizes.out_channels, BLOCK_N)
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, top, left = _positions(m, sizes, window)
    x_rows = x.data + n * x.n
    w_columns = w.data + channels.to(tl.int64) * w.n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h = top + i * window.dilation_h
            v = left + j * window.dilation_w
            inside = _inside(h, v, m, sizes)
            taps = x_rows + h * x.h + v * x.w
            for channel in range(0, sizes.in_channels):
                c = tl.cast(channel, tl.int64)
                value = tl.load(taps + c * x.c, mask=inside, other=0.0).to(tl.float32)
                weight = tl.load(
                    w_columns + c * w.c + i * w.h + j * w.w,
                    mask=channels < sizes.out_channels,
                    other=0.0,
                ).to(tl.float32)
                acc += value[:, None] * weight[None, :]
    _finish(acc, bias, out, m, channels, n, sizes, RELU)


@triton.jit
def _im2col_kernel(
    x,
    out,
    columns,
    sizes,
    window,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n, top, left = _positions(m, sizes, window)
    h = top[:, None] + (k // KW % KH * window.dilation_h)[None, :]
    v = left[:, None] + (k % KW * window.dilation_w)[None, :]
    stored = (m < sizes.rows)[:, None] & (k < columns)[None, :]
    inside = _inside(h, v, m[:, None], sizes) & stored
    place = (n * x.n)[:, None] + (k // (KH * KW)).to(tl.int64)[None, :] * x.c
    tile = tl.load(x.data + place + h * x.h + v * x.w, mask=inside, other=0.0)
    tl.store(out + m[:, None] * columns + k[None, :], tile, mask=stored)


def _tile(x: torch.Tensor, out_channels: int, channels: int, method: str) -> dict[str, int]:
    """Tile of a shape; tensor cores take half precision only."""
    if x.device.type != "cuda" or method == "direct" or x.dtype == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
    # a gather along the width takes more registers
    wide = out_channels > 64 and layout_of(x) is torch.channels_last
    block_n = 128 if wide else 64
    # a block of channels is loaded and multiplied whole, however few there are
    block_k = min(max(next_power_of_2(channels), 16), 64)
    warps = 8 if block_n == 128 else 4
    return {
        "BLOCK_M": 128,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": warps,
        "num_stages": 3,
    }


def _on_hopper(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
) -> None:
    """Fill ``out``, which has channels last or first, by the kernel for channels last."""
    from oss_fused.kernels.convolution.hopper import convolve, takes

    if not w.is_contiguous(memory_format=torch.channels_last) or w.data_ptr() % 16:
        w = to_channels_last(w)
    if not takes(x, w, stride):
        x = to_channels_last(x)
    if layout_of(out) is torch.channels_last:
        convolve(x, w, bias, out, stride, padding, dilation, relu)
        return
    last = torch.empty_like(out, memory_format=torch.channels_last)
    convolve(x, w, bias, last, stride, padding, dilation, relu)
    from_channels_last(last, out)


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
    method: str,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Convolution; see kernels/convolution for the contract. ``config`` is the tuner's tile."""
    images, channels, height, width = x.shape
    out_channels, _, kh, kw = w.shape
    size = output_size(x, [kh, kw], stride, padding, dilation)
    out = torch.empty(
        (images, out_channels, *size),
        dtype=x.dtype,
        device=x.device,
        memory_format=layout_of(x),
    )
    if out.numel() == 0:
        return out
    if config is None and method == "implicit" and runs_gluon(x.device):
        # Gluon is experimental: another Triton may lack it
        from oss_fused.kernels.convolution.hopper import fits

        if fits(x, w, stride):
            _on_hopper(x, w, bias, out, stride, padding, dilation, relu)
            return out
    w = w.contiguous(memory_format=torch.channels_last)
    pixels = size[0] * size[1]
    rows = images * pixels
    # rows of a result follow each other without gaps in both layouts
    step = out_channels if layout_of(x) is torch.channels_last else 1
    tile = config or _tile(x, out_channels, channels, method)
    grid = (cdiv(rows, tile["BLOCK_M"]) * cdiv(out_channels, tile["BLOCK_N"]),)
    kernel = _implicit_kernel if method == "implicit" else _direct_kernel
    kernel[grid](
        _Strided(x, *x.stride()),
        _Strided(w, *w.stride()),
        bias if bias is None else bias.contiguous(),
        _Result(out, out.stride(0), out.stride(1), step),
        _Sizes(rows, channels, out_channels, height, width, size[1], pixels),
        _Window(*stride, *padding, *dilation),
        KH=kh,
        KW=kw,
        CHANNEL_BLOCKS=cdiv(channels, tile["BLOCK_K"]),
        RELU=relu,
        **tile,
    )
    return out


def im2col(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """One row a position of the window; see kernels/convolution for the contract."""
    images, channels, height, width = x.shape
    kh, kw = kernel_size
    size = output_size(x, kernel_size, stride, padding, dilation)
    rows, columns = images * size[0] * size[1], channels * kh * kw
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if out.numel():
        _im2col_kernel[(cdiv(rows, 64), cdiv(columns, 64))](
            _Strided(x, *x.stride()),
            out,
            columns,
            _Sizes(rows, channels, columns, height, width, size[1], size[0] * size[1]),
            _Window(*stride, *padding, *dilation),
            KH=kh,
            KW=kw,
            BLOCK_M=64,
            BLOCK_K=64,
        )
    return out
