# SPDX-License-Identifier: MIT
"""Conversions between layouts, what they cost, and when they pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from oss_fused.analysis.access import MemoryAccessAnalyzer
from oss_fused.analysis.layout import LAYOUTS, WALKS, from_blocks, to_blocks, walk
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import check_choice

Conversion = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 8
# how much dearer than a copy a conversion is; any conversion to blocks costs 2.0
_FACTORS = {("row_major", "column_major"): 1.5, ("sparse", "dense"): 3.0}
_TO_BLOCKED = 2.0
# name of the converter -> name among the layouts of a matrix product
_PRICED = {"row_major": "row_major", "column_major": "column_major", "blocked": "blocked_8x8"}


@dataclass(frozen=True)
class LaidOutTensor:
    """A matrix as stored: ``data`` in ``layout``, ``shape`` [M, N] of the matrix itself.

    "row_major" and "column_major" data has that shape, "column_major" by its strides; "blocked"
    data is [ceil(M/8), ceil(N/8), 8, 8]; "sparse" data is a COO tensor, "dense" means "row_major".
    """

    data: torch.Tensor
    layout: str
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: torch.Tensor) -> LaidOutTensor:
        """A matrix [M, N] with the layout that its strides show.

        Raises:
            ShapeMismatchError: no matrix, or one whose rows and columns both have gaps.
        """
        if matrix.dim() != 2:
            raise ShapeMismatchError(f"matrix.shape={tuple(matrix.shape)}: expected [M, N]")
        shape = (matrix.shape[0], matrix.shape[1])
        if matrix.is_sparse:
            return cls(matrix, "sparse", shape)
        if matrix.is_contiguous():
            return cls(matrix, "row_major", shape)
        if matrix.t().is_contiguous():
            return cls(matrix, "column_major", shape)
        raise ShapeMismatchError(f"matrix.stride={matrix.stride()}: expected rows or columns dense")


@dataclass(frozen=True)
class LayoutUse:
    """An operation that reads ``tensor`` ``reads`` times along ``walk`` and prefers ``layout``.

    ``walk`` is one of the orders of a matrix product: "row", "column", "tile", "panel".
    """

    tensor: str
    layout: str
    walk: str
    reads: int = 1


class DynamicLayoutConverter:
    """Converts matrices between layouts by registered functions.

    Row-major, column-major and blocked convert into each other, sparse and dense (row-major) too.

    Args:
        line_bytes: of a cache line, for what a layout costs to read.
    """

    def __init__(self, line_bytes: int = 128) -> None:
        """Register the conversions that come with the class."""
        self.line_bytes = line_bytes
        self._traffic: dict[tuple[object, ...], float] = {}
        self._kernels: dict[tuple[str, str], Callable[..., torch.Tensor]] = {}
        register = self.register_conversion_kernel
        register("row_major", "column_major", lambda x: x.t().contiguous().t())
        register("column_major", "row_major", torch.Tensor.contiguous)
        register("row_major", "blocked", lambda x: to_blocks(x, BLOCK))
        register("column_major", "blocked", lambda x: to_blocks(x, BLOCK))
        register("dense", "sparse", torch.Tensor.to_sparse)
        register("sparse", "dense", torch.Tensor.to_dense)

    def register_conversion_kernel(
        self, from_layout: str, to_layout: str, kernel: Conversion
    ) -> None:
        """Use ``kernel`` for this pair from now on; it takes the data and returns the new data."""
        self._kernels[from_layout, to_layout] = kernel

    def convert_layout(
        self,
        tensor: torch.Tensor,
        from_layout: str,
        to_layout: str,
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """``tensor`` in another layout; the values are the same bit for bit.

        Args:
            tensor: the data.
            from_layout: its layout.
            to_layout: the layout wanted.
            shape: [M, N] of a blocked matrix whose last blocks are padded.

        Raises:
            SchemeError: no function is registered for the pair.
        """
        if from_layout == to_layout:
            return tensor
        pair = (from_layout, to_layout)
        if pair in self._kernels:
            return self._kernels[pair](tensor)
        if from_layout == "blocked" and to_layout in ("row_major", "column_major"):
            whole = (tensor.shape[0] * tensor.shape[2], tensor.shape[1] * tensor.shape[3])
            matrix = from_blocks(tensor, shape or whole)
            return self.convert_layout(matrix, "row_major", to_layout)
        known = ", ".join(f"{a} -> {b}" for a, b in self._kernels)
        raise SchemeError(
            f"conversion {from_layout!r} -> {to_layout!r}: is not registered; expected one of "
            f"{known}, blocked -> row_major, blocked -> column_major"
        )

    def conversion_cost(self, tensor: torch.Tensor, from_layout: str, to_layout: str) -> float:
        """Bytes that a conversion is worth: read and written, times the factor of the pair."""
        if from_layout == to_layout:
            return 0.0
        usual = _TO_BLOCKED if to_layout == "blocked" else 1.0
        factor = _FACTORS.get((from_layout, to_layout), usual)
        return 2 * tensor.numel() * tensor.element_size() * factor

    def read_cost(self, tensor: LaidOutTensor, layout: str, order: str) -> float:
        """Bytes that the memory moves when the matrix, stored in ``layout``, is read in ``order``.

        Raises:
            SchemeError: a layout or order that has no price.
        """
        check_choice("layout", layout, tuple(_PRICED))
        check_choice("walk", order, tuple(WALKS["matmul"]))
        size = tensor.data.element_size()
        key = (tensor.shape, size, layout, order)
        if key not in self._traffic:
            at = walk(WALKS["matmul"][order], tensor.shape)
            offsets = LAYOUTS["matmul"][_PRICED[layout]](tensor.shape, at)
            self._traffic[key] = MemoryAccessAnalyzer(size, self.line_bytes).traffic(offsets)
        return self._traffic[key] * tensor.shape[0] * tensor.shape[1] * size

    def auto_convert_pipeline(
        self, tensors: Mapping[str, torch.Tensor], operations: Sequence[LayoutUse]
    ) -> tuple[dict[str, LaidOutTensor], float]:
        """Convert where the rest of the pipeline gains more than the conversion costs.

        Before an operation whose tensor is stored otherwise than it prefers, the bytes that this
        and all later reads of the tensor would save are compared with ``conversion_cost``.

        Args:
            tensors: name -> matrix; its strides say how it is stored.
            operations: in order.

        Returns:
            The matrices as stored after the last operation, and the cost of all conversions.

        Raises:
            SchemeError: an operation on an unknown tensor, or a layout or walk without a price.
            ShapeMismatchError: a tensor that is no matrix.
        """
        stored = {name: LaidOutTensor.of(tensor) for name, tensor in tensors.items()}
        total = 0.0
        for number, use in enumerate(operations):
            check_choice("tensor", use.tensor, tuple(stored))
            now = stored[use.tensor]
            if now.layout == use.layout:
                continue
            gain = sum(
                later.reads * (self.read_cost(now, now.layout, later.walk) - after)
                for later in operations[number:]
                if later.tensor == use.tensor
                for after in (self.read_cost(now, use.layout, later.walk),)
            )
            cost = self.conversion_cost(now.data, now.layout, use.layout)
            if gain > cost:
                data = self.convert_layout(now.data, now.layout, use.layout, now.shape)
                stored[use.tensor] = LaidOutTensor(data, use.layout, now.shape)
                total += cost
        return stored, total
