# SPDX-License-Identifier: MIT
"""When and how the convolution for Hopper is launched; hopper_kernel.py is the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.convolution.hopper_kernel import convolution_hopper_kernel, view_of
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import multiprocessors, pdl_options

# positions of a consumer, and channels of a block
_ROWS, _CHANNELS = 64, 64
# of 227 KB that a CTA can have; barriers take the rest
_SHARED_BYTES = 224 * 1024
# bytes a cycle that all multiprocessors together get from L2, as an H200 showed it
_L2_BYTES = 4400
# cycles of a product over those of the tensor cores alone: 64 columns wait for shared memory
_SLOWER = {64: 1.27, 128: 1.1}


class Tile(NamedTuple):
    """Consumers, output channels, rows, images and columns of a consumer's box, sharing of taps."""

    consumers: int
    block_n: int
    box: tuple[int, int, int]
    shared: bool


def fits(x: torch.Tensor, w: torch.Tensor, stride: list[int]) -> bool:
    """Whether the kernel takes images and weights [OC, IC, KH, KW] of these shapes as NHWC.

    Halves of 32 channels or more, whole 16 bytes of channels, a stride of one or two.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] >= 32
        and all(size % 8 == 0 for size in w.shape[:2])
        and stride[0] == stride[1] <= min(2, *x.shape[2:])
    )


def takes(x: torch.Tensor, w: torch.Tensor, stride: list[int]) -> bool:
    """Whether ``x`` and ``w`` fit as they lie in memory: NHWC, in steps of 16 bytes."""
    steps = (x.data_ptr(), w.data_ptr(), *(x.stride(dim) * x.element_size() for dim in (0, 2, 3)))
    aligned = x.stride(1) == 1 and all(step > 0 and step % 16 == 0 for step in steps)
    return aligned and fits(x, w, stride)


def _boxes() -> Iterator[tuple[int, int, int]]:
    """Boxes of 64 positions: rows, images, columns.

    A row of a box is 8 positions or more, whole rows of a swizzle.
    """
    for rows, images in itertools.product((8, 4, 2, 1), (1, 2, 4, 8, 16, 32, 64)):
        if rows * images <= _ROWS:
            yield rows, images, _ROWS // (rows * images)


def _tile(size: tuple[int, int, int], out_channels: int, shares: bool, sms: int) -> Tile:
    """The tile of least estimated time for ``size`` = rows, images and columns of the result."""

    def cycles(tile: Tile) -> float:
        """Of a step of 64 channels on the busiest multiprocessor, times its tiles."""
        covered = [cdiv(whole, part) for whole, part in zip(size, tile.box)]
        boxes = cdiv(covered[0] * covered[1] * covered[2], tile.consumers)
        tiles = boxes * cdiv(out_channels, tile.block_n)
        positions = tile.consumers * _ROWS
        read = positions * (1 + 2 / tile.box[0]) / 3 if tile.shared else positions
        nbytes = 2 * _CHANNELS * (read + tile.block_n) * min(tiles, sms)
        products = positions * tile.block_n / 32 * _SLOWER[tile.block_n]
        return cdiv(tiles, sms) * max(products, nbytes / _L2_BYTES)

    widths = (128, 64) if out_channels > 64 else (64,)
    shared = (True, False) if shares else (False,)
    return min(
        itertools.starmap(Tile, itertools.product((3, 2), widths, _boxes(), shared)), key=cycles
    )


def _descriptor(t: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Boxes [rows, images, columns, channels] of ``t`` [N, C, H, W]; zeros outside."""
    seen = t.permute(2, 0, 3, 1)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), box, layout)


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    relu: bool,
    config: Tile | None = None,
) -> None:
    """Fill ``out``, NHWC; ``w`` is NHWC too. See kernels/convolution and ``takes``."""
    out_channels, channels, kh, kw = w.shape
    size = (out.shape[2], out.shape[0], out.shape[3])
    shares = view_of is not None and kh == 3 and stride[0] == dilation[0] == 1
    sms = multiprocessors(x.device)
    tile = config or _tile(size, out_channels, shares, sms)
    consumers, block_n, box, shared = tile
    phases = itertools.product(range(stride[0]), repeat=2)
    parts = [x[:, :, i :: stride[0], j :: stride[0]] for i, j in phases]
    counts = [cdiv(whole, part) for whole, part in zip(size, box)]
    blocks_n = cdiv(out_channels, block_n)
    tiles = cdiv(counts[0] * counts[1] * counts[2], consumers) * blocks_n
    a_bytes = consumers * (box[0] + 2 * shared) * box[1] * box[2] * 2 * _CHANNELS
    b_bytes = 2 * block_n * _CHANNELS
    room = _SHARED_BYTES - 2 * consumers * _ROWS * block_n
    # a slot of weights for each tap, and then as many of both
    a_stages = max(2, min(6, room // (a_bytes + (3 if shared else 1) * b_bytes)))
    b_stages = min((room - a_stages * a_bytes) // b_bytes, 12)
    weights = w.permute(0, 2, 3, 1).reshape(out_channels, kh * kw, channels).contiguous()
    convolution_hopper_kernel[(min(tiles, sms),)](
        # a launch of Triton 3.6 takes no tuple of descriptors
        *(_descriptor(part, [*box, _CHANNELS]) for part in (parts * 4)[:4]),
        _descriptor(x, [2, *box[1:], _CHANNELS]),
        TensorDescriptor(
            weights,
            list(weights.shape),
            [kh * kw * channels, channels, 1],
            [block_n, 1, _CHANNELS],
            gl.NVMMASharedLayout(128, 16, rank=3),
        ),
        _descriptor(out, [*box, block_n]),
        bias,
        out_channels,
        tiles,
        blocks_n,
        counts[2],
        counts[0],
        cdiv(channels, _CHANNELS),
        *padding,
        *dilation,
        KH=kh,
        KW=kw,
        STRIDE=stride[0],
        RELU=relu,
        SHARED=shared,
        CONSUMERS=consumers,
        A_STAGES=a_stages,
        B_STAGES=b_stages,
        REGISTERS=240 if consumers == 2 else 160,
        num_warps=4,
        **pdl_options(x.device),
    )
