# SPDX-License-Identifier: MIT
"""Convolution; see kernels/convolution.

"implicit": the reduction runs over taps of the window, and over blocks of channels inside a tap. In
NHWC a block of channels is one run of memory, and loads are vectors. In NCHW neighbours along the
channels are H * W values apart: a warp then reads along the width, a value a thread. Weights are
taken with channels last, one copy if they are not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.convolution.shape import layout_of, output_size
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.numerics import INTERPRETED, round_to


@triton.jit
def _positions(m, width, pixels, stride_h, stride_w, pad_h, pad_w):
    """Image, row and column of x at the first tap of output positions ``m``."""
    pixel = m % pixels
    return m // pixels, pixel // width * stride_h - pad_h, pixel % width * stride_w - pad_w


@triton.jit
def _finish(acc, bias, out, m, channels, n, pixel, rows, out_channels, strides, RELU: tl.constexpr):
    """Bias, ReLU and store of acc [positions, channels]; strides of image, channel and pixel."""
    in_channels = channels < out_channels
    if bias is not None:
        acc += tl.load(bias + channels, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    if RELU:
        # not a maximum with 0, which would swallow NaN
        acc = tl.where(acc < 0.0, 0.0, acc)
    place = (n * strides[0] + pixel * strides[2])[:, None] + channels[None, :] * strides[1]
    mask = (m < rows)[:, None] & in_channels[None, :]
    tl.store(out + place, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit
def _implicit_kernel(
    x, w, bias, out, rows, in_channels, out_channels, height, width, out_width, pixels,
    stride_xn, stride_xc, stride_xh, stride_xw, stride_wo, stride_wc, stride_wh, stride_ww,
    stride_on, stride_oc, stride_op, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KH: tl.constexpr, KW: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(out_channels, BLOCK_N)
    # all channels of some positions follow each other: they find x in L2
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, top, left = _positions(m, out_width, pixels, stride_h, stride_w, pad_h, pad_w)
    lane = tl.arange(0, BLOCK_K)
    x_rows = x + n * stride_xn
    w_columns = w + channels.to(tl.int64) * stride_wo
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, KH * KW * CHANNEL_BLOCKS):
        tap = step // CHANNEL_BLOCKS
        c = step % CHANNEL_BLOCKS * BLOCK_K + lane
        h = top + tap // KW * dilation_h
        v = left + tap % KW * dilation_w
        inside = (h >= 0) & (h < height) & (v >= 0) & (v < width) & (m < rows)
        a = tl.load(
            (x_rows + h * stride_xh + v * stride_xw)[:, None] + c[None, :] * stride_xc,
            mask=inside[:, None] & (c < in_channels)[None, :],
            other=0.0,
        )
        b = tl.load(
            (w_columns + tap // KW * stride_wh + tap % KW * stride_ww)[None, :]
            + c[:, None] * stride_wc,
            mask=(c < in_channels)[:, None] & (channels < out_channels)[None, :],
            other=0.0,
        )
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    strides = (stride_on, stride_oc, stride_op)
    _finish(acc, bias, out, m, channels, n, m % pixels, rows, out_channels, strides, RELU)


@triton.jit
def _direct_kernel(
    x, w, bias, out, rows, in_channels, out_channels, height, width, out_width, pixels,
    stride_xn, stride_xc, stride_xh, stride_xw, stride_wo, stride_wc, stride_wh, stride_ww,
    stride_on, stride_oc, stride_op, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KH: tl.constexpr, KW: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(out_channels, BLOCK_N)
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, top, left = _positions(m, out_width, pixels, stride_h, stride_w, pad_h, pad_w)
    x_rows = x + n * stride_xn
    w_columns = w + channels.to(tl.int64) * stride_wo
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h = top + i * dilation_h
            v = left + j * dilation_w
            inside = (h >= 0) & (h < height) & (v >= 0) & (v < width) & (m < rows)
            taps = x_rows + h * stride_xh + v * stride_xw
            for c in range(0, in_channels):
                value = tl.load(taps + c * stride_xc, mask=inside, other=0.0).to(tl.float32)
                weight = tl.load(
                    w_columns + c * stride_wc + i * stride_wh + j * stride_ww,
                    mask=channels < out_channels,
                    other=0.0,
                ).to(tl.float32)
                acc += value[:, None] * weight[None, :]
    strides = (stride_on, stride_oc, stride_op)
    _finish(acc, bias, out, m, channels, n, m % pixels, rows, out_channels, strides, RELU)


@triton.jit
def _im2col_kernel(
    x, out, rows, columns, height, width, out_width, pixels,
    stride_xn, stride_xc, stride_xh, stride_xw, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n, top, left = _positions(m, out_width, pixels, stride_h, stride_w, pad_h, pad_w)
    h = top[:, None] + (k // KW % KH * dilation_h)[None, :]
    v = left[:, None] + (k % KW * dilation_w)[None, :]
    stored = (m < rows)[:, None] & (k < columns)[None, :]
    inside = (h >= 0) & (h < height) & (v >= 0) & (v < width) & stored
    place = (n * stride_xn)[:, None] + (k // (KH * KW)).to(tl.int64)[None, :] * stride_xc
    tile = tl.load(x + place + h * stride_xh + v * stride_xw, mask=inside, other=0.0)
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
    w = w.contiguous(memory_format=torch.channels_last)
    pixels = size[0] * size[1]
    rows = images * pixels
    tile = config or _tile(x, out_channels, channels, method)
    grid = (cdiv(rows, tile["BLOCK_M"]) * cdiv(out_channels, tile["BLOCK_N"]),)
    kernel = _implicit_kernel if method == "implicit" else _direct_kernel
    kernel[grid](
        x,
        w,
        bias if bias is None else bias.contiguous(),
        out,
        rows,
        channels,
        out_channels,
        height,
        width,
        size[1],
        pixels,
        *x.stride(),
        *w.stride(),
        out.stride(0),
        out.stride(1),
        # rows of a result follow each other without gaps in both layouts
        out_channels if layout_of(x) is torch.channels_last else 1,
        *stride,
        *padding,
        *dilation,
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
            x,
            out,
            rows,
            columns,
            height,
            width,
            size[1],
            size[0] * size[1],
            *x.stride(),
            *stride,
            *padding,
            *dilation,
            KH=kh,
            KW=kw,
            BLOCK_M=64,
            BLOCK_K=64,
        )
    return out
