# SPDX-License-Identifier: MIT
"""Convolution in float32 by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oss_fused.kernels.convolution.shape import layout_of


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
    method: str,
) -> torch.Tensor:
    """The sum over window and channels; both methods compute the same."""
    wide = None if bias is None else bias.float()
    y = F.conv2d(x.float(), w.float(), wide, stride, padding, dilation)
    y = torch.relu(y) if relu else y
    return y.to(x.dtype).contiguous(memory_format=layout_of(x))


def im2col(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """One row a position of the window."""
    columns = F.unfold(
        x.float(), tuple(kernel_size), tuple(dilation), tuple(padding), tuple(stride)
    )
    return columns.transpose(1, 2).reshape(-1, columns.shape[1]).to(x.dtype).contiguous()
