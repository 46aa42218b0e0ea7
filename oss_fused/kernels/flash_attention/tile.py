# SPDX-License-Identifier: MIT
"""What forward and backward share: tiles of a head, scores of two tiles, what a query sees."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.numerics import (
    INTERPRETED,
    column_bits,
    from_fp8,
    kept,
    round_to,
    row_bits,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# head sizes above it are cut into tiles of it
_LARGEST_HEAD = 128


@triton.jit
def load_tile(
    base,
    first,
    rows,
    stride,
    column,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EDGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Tile [BLOCK_R, BLOCK_C] at row ``first`` and ``column``, 0 outside; EDGE: rows may end."""
    row = tl.arange(0, BLOCK_R)[:, None]
    cols = column + tl.arange(0, BLOCK_C)[None, :]
    # ``first`` of a loop is a Python integer under the interpreter
    wide = tl.program_id(0).to(tl.int64) * 0
    pointers = base + (first + wide) * stride + row * stride + cols
    if DIM % BLOCK_C != 0:
        if EDGE:
            tile = tl.load(pointers, mask=(first + row < rows) & (cols < DIM), other=0.0)
        else:
            tile = tl.load(pointers, mask=cols < DIM, other=0.0)
    elif EDGE:
        tile = tl.load(pointers, mask=first + row < rows, other=0.0)
    else:
        tile = tl.load(pointers)
    if tile.dtype == tl.float8e4nv:
        return from_fp8(tile).to(DTYPE)
    else:
        return tile.to(DTYPE)


@triton.jit
def scores(
    x,
    x_base,
    x_first,
    x_rows,
    x_stride,
    y_base,
    y_first,
    y_rows,
    y_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    EDGE_X: tl.constexpr,
    EDGE_Y: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``x y'`` over DIM and the last tile of y; ``x`` holds the tile of x where one is enough."""
    y = load_tile(y_base, y_first, y_rows, y_stride, 0, DIM, BLOCK_Y, BLOCK_D, EDGE_Y, DTYPE)
    found = tl.dot(x, tl.trans(y), input_precision="ieee")
    if DIM > BLOCK_D:
        for column in tl.static_range(BLOCK_D, DIM, BLOCK_D):
            x = load_tile(
                x_base, x_first, x_rows, x_stride, column, DIM, BLOCK_X, BLOCK_D, EDGE_X, DTYPE
            )
            y = load_tile(
                y_base, y_first, y_rows, y_stride, column, DIM, BLOCK_Y, BLOCK_D, EDGE_Y, DTYPE
            )
            found = tl.dot(x, tl.trans(y), found, input_precision="ieee")
    return found, y


@triton.jit
def bias_and_hide(
    logits,
    m,
    n,
    queries,
    keys,
    slope,
    mask_base,
    stride_mask,
    window_left,
    window_right,
    EDGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Logits less ``slope * |m - n|``, -inf where hidden; m and n broadcast to the tile."""
    if ALIBI:
        logits -= slope * tl.abs(m - n).to(tl.float32)
    if EDGE:
        seen = n < keys
        if LEFT:
            seen = seen & (n >= m - window_left)
        if RIGHT:
            seen = seen & (n <= m + window_right)
        if CAUSAL:
            seen = seen & (n <= m)
        logits = tl.where(seen, logits, float("-inf"))
    if MASK:
        inside = (m < queries) & (n < keys)
        keep = tl.load(mask_base + m.to(tl.int64) * stride_mask + n, mask=inside, other=0)
        logits = tl.where(keep != 0, logits, float("-inf"))
    return logits


@triton.jit
def key_range(
    first,
    keys,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Keys that queries [first, first + BLOCK_M) see: begin, those that all see, end."""
    begin = first * 0
    full_begin = begin
    end = begin + keys
    full_end = end
    if LEFT:
        begin = tl.maximum(first - window_left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.maximum(first + BLOCK_M - 1 - window_left, 0)
        full_begin = (full_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if RIGHT:
        end = tl.minimum(end, first + BLOCK_M + window_right)
        full_end = tl.minimum(full_end, first + 1 + window_right)
    if CAUSAL:
        end = tl.minimum(end, first + BLOCK_M)
        full_end = tl.minimum(full_end, first + 1)
    full_end = full_end // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(full_begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_begin = tl.maximum(full_begin, begin)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def query_range(
    first,
    queries,
    keys,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Queries that see keys [first, first + BLOCK_N): begin, those that see all, end."""
    begin = first * 0
    full_begin = begin
    end = begin + queries
    full_end = end
    if CAUSAL:
        begin = first // BLOCK_M * BLOCK_M
        full_begin = first + BLOCK_N - 1
    if RIGHT:
        begin = tl.maximum(begin, tl.maximum(first - window_right, 0) // BLOCK_M * BLOCK_M)
        full_begin = tl.maximum(full_begin, first + BLOCK_N - 1 - window_right)
    if LEFT:
        end = tl.minimum(end, first + BLOCK_N + window_left)
        full_end = tl.minimum(full_end, first + window_left + 1)
    full_begin = (full_begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    full_begin = tl.minimum(full_begin, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_begin = tl.maximum(full_begin, begin)
    # a last block of keys that is not full has an edge everywhere
    full_end = tl.where(first + BLOCK_N <= keys, full_end // BLOCK_M * BLOCK_M, 0)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def kept_tile(seed, row, column, threshold):
    """Where dropout keeps; int64 ``row`` and ``column`` broadcast to the tile."""
    return kept(row_bits(seed, row), column_bits(column), threshold)


@triton.jit
def as_operand(x, ROUND: tl.constexpr, DTYPE: tl.constexpr):
    """float32 -> operand of a product, rounded to ROUND; the interpreter multiplies float32."""
    return round_to(x, ROUND).to(DTYPE)


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps, and tiles of keys in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def head_block(dim: int) -> int:
    """Columns of a tile of heads of ``dim`` values: a power of two of at least 16."""
    return min(max(next_power_of_2(dim), 16), _LARGEST_HEAD)


def head_tiles(dim: int) -> int:
    """How many tiles a head of ``dim`` values takes."""
    return cdiv(dim, head_block(dim))


def dot_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype that products take: the interpreter has no bfloat16 product."""
    if INTERPRETED.value:
        return tl.float32
    return triton_dtype(dtype)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of ``dtype``; FP8 codes are multiplied in bfloat16."""
    names = {torch.float16: tl.float16, torch.float32: tl.float32}
    return names.get(dtype, tl.bfloat16)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may have; what an interpreter takes is no matter."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def unit_stride(t: torch.Tensor) -> torch.Tensor:
    """``t`` with unit stride along the last dimension."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def mask_bytes(mask: torch.Tensor | None, heads: int) -> tuple[torch.Tensor | None, list[int]]:
    """``mask`` as bytes with unit stride, and its strides of batch, head and query."""
    if mask is None:
        return None, [0, 0, 0]
    found = unit_stride(mask.expand(-1, heads, -1, -1)).view(torch.uint8)
    return found, list(found.stride()[:3])
