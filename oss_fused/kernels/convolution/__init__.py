# SPDX-License-Identifier: MIT
"""``conv2d`` and ``im2col``.

conv2d: x [N, IC, H, W], w [OC, IC, KH, KW], bias [OC] or None -> [N, OC, OH, OW], the sum over c, i
and j of ``x[n, c, oh * stride + i * dilation - padding, ...] * w[oc, c, i, j]``, x being 0 outside,
with float32 sums; then bias and, if ``relu``, max(y, 0), rounded once. ``OH = (H + 2 padding -
dilation (KH - 1) - 1) // stride + 1``. stride, padding and dilation are [vertical, horizontal].

``method`` "direct" walks over window and channels with multiplications of its own; "implicit" is a
matrix product [N OH OW, IC KH KW] x [IC KH KW, OC] whose left operand is gathered tile by tile and
never stored. The layout of the result is x's: NHWC (channels_last) or NCHW.

im2col: x -> that left operand [N OH OW, IC KH KW], columns ordered as ``w.view(OC, -1)``.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import OneOf, Operand
from oss_fused.kernels.convolution import reference
from oss_fused.kernels.convolution.shape import layout_of, output_size
from oss_fused.kernels.op import declare


def _check_window(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> None:
    for name, pair, least in (
        ("kernel_size", kernel_size, 1),
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        if len(pair) != 2 or min(pair) < least:
            raise SchemeError(f"{name}={list(pair)}: expected two numbers of at least {least}")
    if min(x.shape[1:]) < 1:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected IC, H and W of at least 1")
    if min(output_size(x, kernel_size, stride, padding, dilation)) < 1:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected an image that holds the window, "
            f"kernel_size={list(kernel_size)}, padding={list(padding)}, dilation={list(dilation)}"
        )


def _check(
    x: torch.Tensor, w: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    if not w.shape[0]:
        raise ShapeMismatchError(f"w.shape={tuple(w.shape)}: expected OC of at least 1")
    _check_window(x, list(w.shape[2:]), stride, padding, dilation)


def _fake(
    x: torch.Tensor, w: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    size = output_size(x, list(w.shape[2:]), stride, padding, dilation)
    return torch.empty(
        (x.shape[0], w.shape[0], *size),
        dtype=x.dtype,
        device=x.device,
        memory_format=layout_of(x),
    )


_WINDOW = {"stride": [2, 1], "padding": [1, 2], "dilation": [1, 2]}

declare(
    reference.conv2d,
    {
        "x": Operand("N IC H W", *FLOAT_DTYPES),
        "w": Operand("OC IC KH KW", like="x"),
        "bias": Operand("OC", *FLOAT_DTYPES),
        "method": OneOf("implicit", "direct"),
    },
    {"triton": "triton"},
    check=_check,
    fake=_fake,
    example={"N": 2, "IC": 5, "H": 9, "W": 8, "OC": 7, "KH": 3, "KW": 2, **_WINDOW, "relu": True},
)
declare(
    reference.im2col,
    {"x": Operand("N IC H W", *FLOAT_DTYPES)},
    {"triton": "triton"},
    check=_check_window,
    example={"N": 2, "IC": 5, "H": 9, "W": 8, "kernel_size": [3, 2], **_WINDOW},
)
