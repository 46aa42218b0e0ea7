# SPDX-License-Identifier: MIT
"""2-D convolution as functions: direct, by im2col, as an implicit matrix product; with bias, ReLU.

Where an input requires grad they are differentiable, by PyTorch's backward.
"""

from __future__ import annotations

from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  (registers the operators)
from oss_fused.autograd import needs_grad
from oss_fused.errors import SchemeError
from oss_fused.kernels.convolution.shape import layout_of, output_size
from oss_fused.kernels.op import check_arguments

_ops = torch.ops.oss_fused
Pair = int | tuple[int, int] | list[int]


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> torch.Tensor:
    """Convolution as an implicit matrix product on tensor cores; no buffer beside the result.

    Args:
        x: [N, IC, H, W] bfloat16, float16 or float32; NHWC in memory (channels_last) is faster.
        w: [OC, IC, KH, KW] in x.dtype; channels_last saves a copy.
        bias: [OC].
        stride: step of the window; one number or [vertical, horizontal], as the others.
        padding: zeros around x on each side.
        dilation: distance of the window's taps.

    Returns:
        [N, OC, OH, OW] in x.dtype and x's layout, ``OH = (H + 2 padding - dilation (KH - 1) - 1) //
        stride + 1``; float32 sums, rounded once. NaN and Inf propagate.

    Raises:
        ShapeMismatchError: the shapes do not fit, or the window does not fit into the image.
        UnsupportedDtypeError: a dtype.
        UnsupportedDeviceError: tensors on different devices.
        SchemeError: stride, padding or dilation is out of range.
    """
    return _convolution(x, w, bias, stride, padding, dilation, False, "implicit")


def conv2d_direct(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> torch.Tensor:
    """``conv2d`` by a loop over window and channels, without tensor cores; arguments as there."""
    return _convolution(x, w, bias, stride, padding, dilation, False, "direct")


def conv2d_bias_relu(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> torch.Tensor:
    """``relu(conv2d(x, w) + bias)`` in one kernel; arguments as in ``conv2d``."""
    return _convolution(x, w, bias, stride, padding, dilation, True, "implicit")


def im2col(
    x: torch.Tensor,
    kernel_size: Pair,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> torch.Tensor:
    """Windows of x as rows of a matrix [N OH OW, IC KH KW]; not differentiable.

    Args:
        x: [N, IC, H, W].
        kernel_size: of the window; one number or [KH, KW], as the others.
        stride: as in ``conv2d``.
        padding: likewise.
        dilation: likewise.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, SchemeError: as ``conv2d``.
    """
    pairs = (
        _pair("kernel_size", kernel_size),
        _pair("stride", stride),
        _pair("padding", padding),
        _pair("dilation", dilation),
    )
    return _ops.im2col(x.detach(), *pairs)


def conv2d_im2col(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> torch.Tensor:
    """``conv2d`` by ``im2col`` and PyTorch's matrix product; not differentiable.

    The expanded input is KH * KW times as large as x where stride is 1. Arguments as in ``conv2d``.
    """
    pairs = (_pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation))
    check_arguments("conv2d", x, w, None, *pairs, False, "implicit")
    kernel_size = list(w.shape[2:])
    rows = _ops.im2col(x.detach(), kernel_size, *pairs) @ w.detach().reshape(w.shape[0], -1).t()
    size = output_size(x, kernel_size, *pairs)
    y = rows.view(x.shape[0], *size, w.shape[0]).permute(0, 3, 1, 2)
    return y.contiguous(memory_format=layout_of(x))


def _pair(name: str, value: Pair) -> list[int]:
    pair = [value, value] if isinstance(value, int) else value
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(isinstance(part, int) for part in pair)
    ):
        raise SchemeError(f"{name}={value!r}: expected a whole number or two of them")
    return list(pair)


def _convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    relu: bool,
    method: str,
) -> torch.Tensor:
    window = (_pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation))
    check_arguments("conv2d", x, w, bias, *window, relu, method)
    if needs_grad(x, w, bias):
        return Convolution.apply(x, w, bias, window, relu, method)
    return _ops.conv2d(x, w, bias, *window, relu, method)


class Convolution(torch.autograd.Function):
    """``oss_fused::conv2d`` with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        window: tuple[list[int], list[int], list[int]],
        relu: bool,
        method: str,
    ) -> torch.Tensor:
        """Run the kernel; keep its inputs and, for ReLU, its result."""
        y = _ops.conv2d(x, w, bias, *window, relu, method)
        ctx.save_for_backward(x, w, bias, y if relu else None)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, w and bias, by PyTorch's convolution."""
        x, w, bias, y = ctx.saved_tensors
        if y is not None:
            grad = grad * (y > 0)
        needs = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
        dx, dw, db = torch.ops.aten.convolution_backward(
            grad, x, w, [w.shape[0]], *ctx.window, False, [0, 0], 1, needs
        )
        db = db if bias is None or db is None else db.to(bias.dtype)
        return dx, dw, db, None, None, None
