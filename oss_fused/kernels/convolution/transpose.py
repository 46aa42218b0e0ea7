# SPDX-License-Identifier: MIT
"""Copies of images and weights between NCHW and NHWC.

Both are transpositions of a matrix for each image: channels by pixels, or pixels by channels. A
tile is read along one of them and written along the other; it turns in shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs

# values of a tile in each direction
_TILE = 64


@triton.jit
def _transpose_kernel(
    source,
    target,
    rows,
    columns,
    stride_image,
    stride_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    image = (tile // (across * down)).to(tl.int64)
    row = tile // across % down * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    place = image * stride_image + row.to(tl.int64) * stride_row + column
    values = tl.load(source + place, mask=inside, other=0.0)
    place = image * rows * columns + column.to(tl.int64) * rows + row
    tl.store(target + place, values, mask=inside)


def _transpose(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill ``target`` [images, columns, rows]; ``source`` has columns side by side."""
    images, rows, columns = source.shape
    if source.numel() == 0:
        return
    down, across = (min(_TILE, max(next_power_of_2(size), 16)) for size in (rows, columns))
    _transpose_kernel[(images * cdiv(rows, down) * cdiv(columns, across),)](
        source,
        target,
        rows,
        columns,
        source.stride(0),
        source.stride(1),
        ROWS=down,
        COLUMNS=across,
        num_warps=4,
        **pdl_options(source.device),
    )


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [N, C, H, W] with channels last; x is NCHW in memory, or is copied to that."""
    if x.stride(3) != 1 or x.stride(2) != x.shape[3]:
        x = x.contiguous()
    images, channels, height, width = x.shape
    target = torch.empty_like(x, memory_format=torch.channels_last)
    pixels = (images, channels, height * width)
    _transpose(x.as_strided(pixels, (x.stride(0), x.stride(1), 1)), target)
    return target


def from_channels_last(y: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` [N, C, H, W], contiguous, from ``y``, which has channels last."""
    images, channels, height, width = y.shape
    pixels = (images, height * width, channels)
    _transpose(y.as_strided(pixels, (pixels[1] * channels, channels, 1)), out)
