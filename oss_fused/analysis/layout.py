# SPDX-License-Identifier: MIT
"""Layouts of matrices and attention tensors: padding for vectors, and the choice by cost.

A layout is a function of coordinates to element offsets. A walk is the order of coordinates in
which an operation reads. Together they give the offsets that ``MemoryAccessAnalyzer`` prices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from oss_fused.analysis.access import MemoryAccessAnalyzer
from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import check_choice, check_sizes

Coordinates = Sequence[torch.Tensor]
MEMORY_WEIGHT, COMPUTE_WEIGHT = 0.7, 0.3
_LARGEST_BLOCK = 64
# accesses of a walk that are priced
_SAMPLE = 2**14
# keys of a block of attention, and of a tile of a walk
_KEYS, _TILE = 16, 8


class SIMDLayout(TypedDict):
    """What ``optimize_for_simd`` proposes; ``expected_speedup`` is in vector loads."""

    original_shape: tuple[int, ...]
    optimized_shape: tuple[int, ...]
    transformation: str
    expected_speedup: float


class SIMDOptimizedLayout:
    """Pads, transposes or blocks a tensor so that whole vectors can be loaded.

    Args:
        vector_width: elements of a vector.

    Raises:
        ShapeMismatchError: a width below 1.
    """

    def __init__(self, vector_width: int = 8) -> None:
        """Keep the width."""
        check_sizes(1, vector_width=vector_width)
        self.vector_width = vector_width

    def optimize_for_simd(self, shape: Sequence[int], pattern: str) -> SIMDLayout:
        """The shape to store for reads along ``pattern``.

        The expected speed-up is loads before over loads after. A row's remainder is loaded element
        by element; elements apart from each other are loaded one by one.

        Args:
            shape: "row_major" takes any rank, the others [M, N].
            pattern: "row_major" pads rows to whole vectors; "column_major" transposes first;
                "blocked" stores blocks [ceil(M/b), ceil(N/b), b, b], b = min(64, min(shape)), for
                reads along both dimensions.

        Raises:
            SchemeError: another pattern.
            ShapeMismatchError: another rank, or a size below 1.
        """
        check_choice("pattern", pattern, ("row_major", "column_major", "blocked"))
        shape, width = tuple(shape), self.vector_width
        if not shape or min(shape) < 1 or (pattern != "row_major" and len(shape) != 2):
            raise ShapeMismatchError(f"shape={shape}: expected sizes above 0, two for {pattern!r}")
        if pattern == "row_major":
            row = shape[-1]
            stored, name = (*shape[:-1], _padded(row, width)), "row_padding"
            speedup = (row // width + row % width) / math.ceil(row / width)
        elif pattern == "column_major":
            stored, name = (shape[1], _padded(shape[0], width)), "transpose_and_pad"
            speedup = shape[0] / math.ceil(shape[0] / width)
        else:
            block = min(_LARGEST_BLOCK, min(shape))
            stored = (math.ceil(shape[0] / block), math.ceil(shape[1] / block), block, block)
            name = "blocked"
            speedup = block / math.ceil(block / width) * math.prod(shape) / math.prod(stored)
        return SIMDLayout(
            original_shape=shape,
            optimized_shape=stored,
            transformation=name,
            expected_speedup=speedup,
        )

    def apply(self, tensor: torch.Tensor, layout: SIMDLayout) -> torch.Tensor:
        """``tensor`` stored as ``layout`` says; padding is zero.

        Raises:
            ShapeMismatchError: the tensor has another shape than the layout's original one.
        """
        if tuple(tensor.shape) != layout["original_shape"]:
            raise ShapeMismatchError(
                f"tensor.shape={tuple(tensor.shape)}: expected {layout['original_shape']}"
            )
        if layout["transformation"] == "blocked":
            return to_blocks(tensor, layout["optimized_shape"][-1])
        source = tensor.t() if layout["transformation"] == "transpose_and_pad" else tensor
        stored = tensor.new_zeros(layout["optimized_shape"])
        stored[..., : source.shape[-1]] = source
        return stored

    def restore(self, stored: torch.Tensor, layout: SIMDLayout) -> torch.Tensor:
        """The tensor that ``apply`` was given, bit for bit.

        Raises:
            ShapeMismatchError: the tensor has another shape than the layout's optimised one.
        """
        if tuple(stored.shape) != layout["optimized_shape"]:
            raise ShapeMismatchError(
                f"stored.shape={tuple(stored.shape)}: expected {layout['optimized_shape']}"
            )
        shape = layout["original_shape"]
        if layout["transformation"] == "blocked":
            return from_blocks(stored, shape)
        if layout["transformation"] == "transpose_and_pad":
            return stored[:, : shape[0]].t().contiguous()
        return stored[..., : shape[-1]].contiguous()


def to_blocks(matrix: torch.Tensor, block: int) -> torch.Tensor:
    """[M, N] as contiguous [ceil(M/b), ceil(N/b), b, b]; padding is zero."""
    rows, columns = (math.ceil(size / block) for size in matrix.shape)
    padded = matrix.new_zeros(rows * block, columns * block)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.view(rows, block, columns, block).transpose(1, 2).contiguous()


def from_blocks(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The matrix of ``shape`` [M, N] that ``to_blocks`` was given."""
    rows, columns, block, _ = blocks.shape
    padded = blocks.transpose(1, 2).reshape(rows * block, columns * block)
    return padded[: shape[0], : shape[1]].contiguous()


def _padded(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _row_major(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    offset = torch.zeros_like(at[0])
    for size, index in zip(shape, at):
        offset = offset * size + index
    return offset


def _blocked(block: int) -> Callable[[Sequence[int], Coordinates], torch.Tensor]:
    def offsets(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
        i, j = at
        tile = i // block * math.ceil(shape[1] / block) + j // block
        return tile * block**2 + i % block * block + j % block

    return offsets


# pairs of rows interleaved, for dot products of two elements a lane
def _interleaved(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    i, j = at
    return i // 2 * 2 * shape[1] + 2 * j + i % 2


# panels of eight columns, each contiguous, as matrix products pack their operands
def _packed(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    i, j = at
    return (j // 8 * shape[0] + i) * 8 + j % 8


def _sequence_first(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    b, h, n, d = at
    return _row_major((shape[0], shape[2], shape[1], shape[3]), (b, n, h, d))


# a block of keys of one head together, its elements transposed for a product with queries
def _attention_blocks(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    b, h, n, d = at
    sizes = (shape[0], shape[1], math.ceil(shape[2] / _KEYS), shape[3], _KEYS)
    return _row_major(sizes, (b, h, n // _KEYS, d, n % _KEYS))


# blocks of all heads of a sequence side by side, so that a list of kept blocks is one list
def _sparse_blocks(shape: Sequence[int], at: Coordinates) -> torch.Tensor:
    b, h, n, d = at
    sizes = (shape[0], math.ceil(shape[2] / _KEYS), shape[1], _KEYS, shape[3])
    return _row_major(sizes, (b, n // _KEYS, h, n % _KEYS, d))


Layout = Callable[[Sequence[int], Coordinates], torch.Tensor]
LAYOUTS: dict[str, dict[str, Layout]] = {
    "matmul": {
        "row_major": _row_major,
        "column_major": lambda shape, at: at[1] * shape[0] + at[0],
        "blocked_4x4": _blocked(4),
        "blocked_8x8": _blocked(8),
        "nt_interleaved": _interleaved,
        "vector_packed": _packed,
    },
    "attention": {
        "head_first": _row_major,
        "sequence_first": _sequence_first,
        "blocked_attention": _attention_blocks,
        "sparse_optimized": _sparse_blocks,
    },
}
# walk -> order of the dimensions, slowest first; a tuple (dimension, size) walks tiles of it
WALKS: dict[str, dict[str, tuple[int | tuple[int, int], ...]]] = {
    "matmul": {
        "row": (0, 1),
        "column": (1, 0),
        "tile": ((0, _TILE), (1, _TILE), 0, 1),
        "panel": ((1, _TILE), 0, 1),
    },
    "attention": {
        "head": (0, 1, 2, 3),
        "token": (0, 2, 1, 3),
        "block": (0, 1, (2, _KEYS), 3, 2),
        "sparse": (0, (2, _KEYS), 1, 2, 3),
    },
}


def walk(order: Sequence[int | tuple[int, int]], shape: Sequence[int]) -> list[torch.Tensor]:
    """Coordinates of the first accesses of a walk, one tensor a dimension."""
    tiles = {entry[0]: entry[1] for entry in order if isinstance(entry, tuple)}
    sizes = [
        math.ceil(shape[entry[0]] / entry[1])
        if isinstance(entry, tuple)
        else tiles.get(entry, shape[entry])
        for entry in order
    ]
    rest = torch.arange(min(math.prod(sizes), _SAMPLE))
    at = [torch.zeros_like(rest) for _ in shape]
    for entry, size in zip(reversed(order), reversed(sizes)):
        if isinstance(entry, tuple):
            at[entry[0]] += rest % size * entry[1]
        else:
            at[entry] += rest % size
        rest = rest // size
    inside = torch.ones_like(rest, dtype=torch.bool)
    for index, size in zip(at, shape):
        inside &= index < size
    return [index[inside] for index in at]


@dataclass(frozen=True)
class LayoutChoice:
    """The best layout and the score, from 0 to 1, of every candidate."""

    layout: str
    scores: dict[str, float]


class AdaptiveDataReorganizer:
    """Chooses how to store the operands of an operation.

    Args:
        vector_width: elements of a vector.
        element_bytes: size of an element.
        line_bytes: of a cache line.

    Raises:
        ShapeMismatchError: a size below 1.
    """

    def __init__(
        self, vector_width: int = 8, element_bytes: int = 2, line_bytes: int = 128
    ) -> None:
        """Nothing is chosen yet."""
        check_sizes(1, vector_width=vector_width)
        self.vector_width = vector_width
        self.analyzer = MemoryAccessAnalyzer(element_bytes, line_bytes)
        self._chosen: dict[tuple[object, ...], LayoutChoice] = {}

    def determine_optimal_layout(
        self, op: str, shapes: Sequence[Sequence[int]], patterns: Sequence[str]
    ) -> LayoutChoice:
        """The layout with the highest 0.7 memory + 0.3 compute; cached by the arguments.

        Memory is bytes asked for over bytes moved; compute is the share of vectors that one load
        fills. Both are means over the operands. Of equal scores the first candidate wins.

        Args:
            op: "matmul" or "attention".
            shapes: of the operands: [M, N], or [B, H, N, D].
            patterns: for each operand the order in which it is read. Matmul: "row", "column",
                "tile" (8 x 8), "panel" (8 columns). Attention: "head" (head by head), "token" (all
                heads of a token), "block" (16 keys by element), "sparse" (16 keys, head by head).

        Raises:
            SchemeError: another operation or pattern.
            ShapeMismatchError: another rank or number of shapes.
        """
        check_choice("op", op, tuple(LAYOUTS))
        key = (op, tuple(map(tuple, shapes)), tuple(patterns))
        if key in self._chosen:
            return self._chosen[key]
        rank = {"matmul": 2, "attention": 4}[op]
        if not shapes or len(shapes) != len(patterns):
            raise ShapeMismatchError(f"shapes={shapes}: expected as many as patterns={patterns}")
        for shape, pattern in zip(shapes, patterns):
            check_choice("patterns", pattern, tuple(WALKS[op]))
            if len(shape) != rank or min(shape) < 1:
                raise ShapeMismatchError(f"shape={tuple(shape)}: expected {rank} sizes above 0")
        scores = {name: 0.0 for name in LAYOUTS[op]}
        for shape, pattern in zip(shapes, patterns):
            at = walk(WALKS[op][pattern], shape)
            for name, layout in LAYOUTS[op].items():
                scores[name] += self._score(layout(shape, at)) / len(shapes)
        choice = LayoutChoice(max(scores, key=lambda name: round(scores[name], 6)), scores)
        self._chosen[key] = choice
        return choice

    def _score(self, offsets: torch.Tensor) -> float:
        memory = min(1.0, 1 / self.analyzer.traffic(offsets))
        width = self.vector_width
        whole = offsets[: len(offsets) // width * width].view(-1, width)
        full = float((whole.diff(dim=1) == 1).all(1).double().mean()) if len(whole) else 0.0
        return MEMORY_WEIGHT * memory + COMPUTE_WEIGHT * (full + (1 - full) / width)
