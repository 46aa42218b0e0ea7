# SPDX-License-Identifier: MIT
"""What forward and backward share: tiles of a head, scores of two tiles, what a query sees."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import HALF_DTYPES
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.numerics import (
    INTERPRETED,
    column_bits,
    from_fp8,
    kept,
    round_to,
    row_bits,
    widened,
)
from oss_fused.kernels.random_mask import drop_threshold, fold_seed

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# head sizes above it are cut into tiles of it
_LARGEST_HEAD = 128


class Rows(NamedTuple):
    """A tensor [B, heads, rows, columns] with unit stride along columns; the others' strides."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Window(NamedTuple):
    """Query m sees keys m - left to m + right; -1 for no limit."""

    left: Any
    right: Any


class Dropout(NamedTuple):
    """Seed and threshold of kernels/random_mask.py, and the factor of what is kept."""

    seed: Any
    threshold: Any
    factor: Any


class Program(NamedTuple):
    """What a kernel is compiled for.

    Query heads, and those that share a KV head; head sizes of q and of v, and columns of either in
    a tile; the options that are on; a tile's queries and keys; tiles in flight; whether tiles
    divide the rows. A kernel's argument has a constexpr of each, and is none itself: what Triton
    3.6 reads from a constexpr tuple are Python numbers, which it cannot pass on.
    """

    heads: int
    group: int
    dim: int
    dim_v: int
    block_d: int
    block_dv: int
    causal: bool
    left: bool
    right: bool
    masked: bool
    alibi: bool
    dropout: bool
    block_m: int = 0
    block_n: int = 0
    stages: int = 1
    even: bool = False


@triton.jit
def _wide(tile, DTYPE: tl.constexpr):
    """Values in DTYPE, which holds FP8 codes exactly."""
    if tile.dtype.primitive_bitwidth > 8:
        return tile.to(DTYPE)
    elif INTERPRETED and tile.dtype == tl.float8e4nv:
        return from_fp8(tile).to(DTYPE)
    elif INTERPRETED:
        # e5m2 is the upper byte of a float16; the interpreter loses its Inf and NaN
        half = tile.to(tl.uint8, bitcast=True).to(tl.int16) << 8
        return half.to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return widened(tile, DTYPE).to(DTYPE)


@triton.jit
def load_tile(
    strip,
    first,
    column,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EDGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Tile [BLOCK_R, BLOCK_C] at row ``first`` and ``column``, 0 outside; EDGE: rows may end.

    ``strip``: a head's pointer, number of rows and stride of a row.
    """
    base, rows, stride = strip
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
    return _wide(tile, DTYPE)


@triton.jit
def scores(
    x,
    x_strip,
    x_first,
    y_strip,
    y_first,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    EDGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``x y'`` over DIM and the last tile of y; ``x`` holds the tile of x where one is enough.

    EDGE: y's rows may end in the tile. Those of x always may.
    """
    y = load_tile(y_strip, y_first, 0, DIM, BLOCK_Y, BLOCK_D, EDGE, DTYPE)
    found = tl.dot(x, tl.trans(y), input_precision="ieee")
    if DIM > BLOCK_D:
        for column in tl.static_range(BLOCK_D, DIM, BLOCK_D):
            x = load_tile(x_strip, x_first, column, DIM, BLOCK_X, BLOCK_D, True, DTYPE)
            y = load_tile(y_strip, y_first, column, DIM, BLOCK_Y, BLOCK_D, EDGE, DTYPE)
            found = tl.dot(x, tl.trans(y), found, input_precision="ieee")
    return found, y


@triton.jit
def head_strips(q, k, v, head, queries, keys, P):
    """A query head's entry of the batch and number, and its strips of q, k and v."""
    b = (head // P.heads).to(tl.int64)
    h = (head % P.heads).to(tl.int64)
    strips = (
        (q.data + b * q.batch + h * q.head, queries, q.row),
        (k.data + b * k.batch + h // P.group * k.head, keys, k.row),
        (v.data + b * v.batch + h // P.group * v.head, keys, v.row),
    )
    return b, h, strips


@triton.jit
def bias_and_hide(logits, m, n, sizes, slope, hidden, EDGE: tl.constexpr, P):
    """Logits less ``slope * |m - n|``, -inf where hidden; m and n broadcast to the tile.

    ``hidden``: the mask, where this head's begins, and the window.
    """
    queries, keys = sizes
    mask, mask_head, window = hidden
    if P.alibi:
        logits -= slope * tl.abs(m - n).to(tl.float32)
    if EDGE:
        seen = n < keys
        if P.left:
            seen = seen & (n >= m - window.left)
        if P.right:
            seen = seen & (n <= m + window.right)
        if P.causal:
            seen = seen & (n <= m)
        logits = tl.where(seen, logits, float("-inf"))
    if P.masked:
        inside = (m < queries) & (n < keys)
        place = mask.data + mask_head + m.to(tl.int64) * mask.row + n
        logits = tl.where(tl.load(place, mask=inside, other=0) != 0, logits, float("-inf"))
    return logits


@triton.jit
def key_range(first, keys, window, P):
    """Keys that queries [first, first + block_m) see: begin, those that all see, end."""
    begin = first * 0
    full_begin = begin
    end = begin + keys
    full_end = end
    if P.left:
        begin = tl.maximum(first - window.left, 0) // P.block_n * P.block_n
        full_begin = tl.maximum(first + P.block_m - 1 - window.left, 0)
        full_begin = (full_begin + P.block_n - 1) // P.block_n * P.block_n
    if P.right:
        end = tl.minimum(end, first + P.block_m + window.right)
        full_end = tl.minimum(full_end, first + 1 + window.right)
    if P.causal:
        end = tl.minimum(end, first + P.block_m)
        full_end = tl.minimum(full_end, first + 1)
    full_end = full_end // P.block_n * P.block_n
    full_begin = tl.minimum(full_begin, (end + P.block_n - 1) // P.block_n * P.block_n)
    full_begin = tl.maximum(full_begin, begin)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def query_range(first, sizes, window, P):
    """Queries that see keys [first, first + block_n): begin, those that see all, end."""
    queries, keys = sizes
    begin = first * 0
    full_begin = begin
    end = begin + queries
    full_end = end
    if P.causal:
        begin = first // P.block_m * P.block_m
        full_begin = first + P.block_n - 1
    if P.right:
        begin = tl.maximum(begin, tl.maximum(first - window.right, 0) // P.block_m * P.block_m)
        full_begin = tl.maximum(full_begin, first + P.block_n - 1 - window.right)
    if P.left:
        end = tl.minimum(end, first + P.block_n + window.left)
        full_end = tl.minimum(full_end, first + window.left + 1)
    full_begin = (full_begin + P.block_m - 1) // P.block_m * P.block_m
    full_begin = tl.minimum(full_begin, (end + P.block_m - 1) // P.block_m * P.block_m)
    full_begin = tl.maximum(full_begin, begin)
    # a last block of keys that is not full has an edge everywhere
    full_end = tl.where(first + P.block_n <= keys, full_end // P.block_m * P.block_m, 0)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def kept_tile(drop, row, column):
    """Where dropout keeps; int64 ``row`` and ``column`` broadcast to the tile."""
    return kept(row_bits(drop.seed, row), column_bits(column), drop.threshold)


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


def for_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> bool:
    """Whether the Gluon kernels take these operands where no option but causality is on.

    Halves, heads of 33 to 128 values, rows that tensor descriptors can address (``more`` too).
    """
    return (
        q.dtype in HALF_DTYPES
        and q.dtype == k.dtype == v.dtype
        and min(q.shape[3], v.shape[3]) > 32
        and max(q.shape[3], v.shape[3]) <= 128
        and k.shape[2] > 0
        and all(_addressable(t) for t in (q, k, v, *more))
        and runs_gluon(q.device)
    )


def _addressable(t: torch.Tensor) -> bool:
    steps = (t.data_ptr(), *(stride * t.element_size() for stride in t.stride()[:-1]))
    return t.stride(-1) == 1 and all(step > 0 and step % 16 == 0 for step in steps)


def rows_of(t: torch.Tensor) -> Rows:
    """``t`` [B, heads, rows, columns] as an argument; copied where columns have a stride."""
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        t = t.contiguous()
    return Rows(t, *t.stride()[:3])


def mask_rows(mask: torch.Tensor | None, heads: int) -> Rows:
    """The bytes of ``mask`` as an argument."""
    if mask is None:
        return Rows(None, 0, 0, 0)
    return rows_of(mask.expand(-1, heads, -1, -1).view(torch.uint8))


def window_of(left: int, right: int, rows: int) -> Window:
    """The window as an argument. One over all ``rows`` is none: the kernels add in 32 bits."""
    return Window(*(-1 if side >= rows else side for side in (left, right)))


def dropout(p: float, seed: int) -> Dropout:
    """What the kernels take of ``dropout_p`` and ``seed``."""
    return Dropout(fold_seed(seed), drop_threshold(p), 1.0 / (1.0 - p))


def program(
    q: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    slopes: torch.Tensor | None,
    causal: bool,
    window: Window,
    dropout_p: float,
    columns: tuple[int, int],
) -> Program:
    """What these arguments compile a kernel for; ``with_tiles`` adds the tiles."""
    return Program(
        heads=q.shape[1],
        group=q.shape[1] // v.shape[1],
        dim=q.shape[3],
        dim_v=v.shape[3],
        block_d=columns[0],
        block_dv=columns[1],
        causal=causal,
        left=window.left >= 0,
        right=window.right >= 0,
        masked=mask is not None,
        alibi=slopes is not None,
        dropout=dropout_p > 0,
    )


@functools.cache
def with_tiles(program: Program, tiles: Tiles, even: bool) -> Program:
    """The argument: ``program`` for ``tiles``; ``even``: they divide the rows of a loop."""
    values = program._replace(
        block_m=tiles.block_m, block_n=tiles.block_n, stages=tiles.stages, even=even
    )
    return Program(*map(tl.constexpr, values))
