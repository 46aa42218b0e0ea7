# SPDX-License-Identifier: MIT
"""Sizes and layouts of convolutions; no compiler is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def output_size(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width of the result; not positive where the window does not fit."""
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel_size[i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    )
    return height, width


def layout_of(x: torch.Tensor) -> torch.memory_format:
    """channels_last where x is NHWC in memory and not NCHW as well, else contiguous."""
    nhwc = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if nhwc else torch.contiguous_format
