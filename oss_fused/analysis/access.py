# SPDX-License-Identifier: MIT
"""How a sequence of element accesses uses cache lines, and what would make it use them better.

Accesses are element offsets: given as such, as coordinates, or read from a tensor's real strides.
Lines and pages are counted in windows of accesses, because a line that is left comes back only
while a cache still holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import check_sizes

# accesses that belong together: as many as would fill this many lines if they were sequential
WINDOW_LINES = 16
PAGE_BYTES = 4096
# a page's first touch costs a row of DRAM and an entry of the TLB: several lines' worth
LINES_PER_PAGE = 4.0
# share of equal steps from which on a pattern is regular
_REGULAR = 0.5
_POOR_UTILIZATION, _POOR_EFFICIENCY = 0.5, 0.3
_RANDOM, _BROADCAST, _LEAST = 0.1, 0.95, 0.1


class AccessPattern(TypedDict):
    """What ``analyze_pattern`` finds.

    ``pattern_type`` is "sequential", "strided", "random" or "broadcast"; ``average_stride`` the
    mean distance of successive accesses in elements; ``cache_utilization`` the share of the bytes
    of touched lines that accesses use; ``bandwidth_efficiency`` the share of peak bandwidth to
    expect: 1.0 sequential, max(0.1, 1 / stride) strided, 0.1 random, 0.95 broadcast.
    """

    pattern_type: str
    average_stride: float
    cache_utilization: float
    bandwidth_efficiency: float


class MemoryAccessAnalyzer:
    """Classifies accesses to a tensor and says what they cost.

    Args:
        element_bytes: size of an element, where only indices are given.
        line_bytes: of a cache line: 128 on NVIDIA GPUs, 64 on most CPUs.

    Raises:
        ShapeMismatchError: a size below 1.
    """

    def __init__(self, element_bytes: int = 4, line_bytes: int = 128) -> None:
        """Keep the sizes."""
        check_sizes(1, element_bytes=element_bytes, line_bytes=line_bytes)
        self.element_bytes, self.line_bytes = element_bytes, line_bytes

    def analyze_pattern(
        self, shape: Sequence[int], access_indices: torch.Tensor | Sequence[int]
    ) -> AccessPattern:
        """Classify accesses to a dense row-major tensor of ``shape``.

        Args:
            shape: sizes.
            access_indices: element offsets [n] in the order of the accesses, or coordinates
                [n, len(shape)].

        Raises:
            ShapeMismatchError: no accesses, or another shape of indices.
            SchemeError: an access outside the tensor.
        """
        return self._analyze(element_offsets(shape, access_indices), self.element_bytes)

    def analyze_tensor(self, tensor: torch.Tensor, limit: int = 2**16) -> AccessPattern:
        """Classify reading ``tensor`` in the order of its indices, by its own strides.

        Args:
            tensor: any strided tensor: a view, a transpose, channels_last, expanded.
            limit: accesses to look at, from the first on.

        Raises:
            ShapeMismatchError: an empty tensor.
        """
        return self._analyze(tensor_offsets(tensor, limit), tensor.element_size())

    def _analyze(self, offsets: torch.Tensor, element_bytes: int) -> AccessPattern:
        steps = offsets.diff()
        kind, stride = _classify(offsets, steps)
        efficiency = {"sequential": 1.0, "random": _RANDOM, "broadcast": _BROADCAST}
        lines, _ = self._touched(offsets, element_bytes)
        used = len(offsets) * element_bytes / (lines * self.line_bytes)
        return AccessPattern(
            pattern_type=kind,
            average_stride=float(steps.abs().double().mean()) if len(steps) else 0.0,
            cache_utilization=min(1.0, used),
            bandwidth_efficiency=efficiency.get(kind, max(_LEAST, 1 / max(stride, 1))),
        )

    def traffic(self, offsets: torch.Tensor, element_bytes: int | None = None) -> float:
        """Bytes that the memory moves per byte that the accesses ask for, pages weighed in.

        Below 1 where accesses share elements. This is what orders are predicted by:
        ``bandwidth_efficiency`` is a class, and the same for many patterns.

        Args:
            offsets: element offsets [n], at least one.
            element_bytes: default: the analyzer's.
        """
        size = element_bytes or self.element_bytes
        lines, pages = self._touched(offsets, size)
        return (lines + LINES_PER_PAGE * pages) * self.line_bytes / (len(offsets) * size)

    def tensor_traffic(self, tensor: torch.Tensor, limit: int = 2**16) -> float:
        """``traffic`` of reading ``tensor`` in the order of its indices."""
        return self.traffic(tensor_offsets(tensor, limit), tensor.element_size())

    def _touched(self, offsets: torch.Tensor, element_bytes: int) -> tuple[int, int]:
        """Lines and pages, each counted once per window and once where windows meet in it."""
        window = max(1, WINDOW_LINES * self.line_bytes // element_bytes)
        places = offsets * element_bytes
        return (
            _distinct_per_window(places // self.line_bytes, window),
            _distinct_per_window(places // PAGE_BYTES, window),
        )

    def suggest_optimization(self, pattern: AccessPattern) -> list[str]:
        """What to change, most effective first; empty where the accesses are good.

        Args:
            pattern: as ``analyze_pattern`` returns it.
        """
        found = []
        if pattern["cache_utilization"] < _POOR_UTILIZATION:
            found.append(
                "transpose or reorder: store what is read together side by side "
                f"({pattern['cache_utilization']:.0%} of each cache line is used)"
            )
        if pattern["pattern_type"] == "strided":
            found.append(
                "vector loads: read whole lines and select in registers "
                f"(average stride {pattern['average_stride']:.4g})"
            )
        if pattern["bandwidth_efficiency"] < _POOR_EFFICIENCY:
            found.append(
                "prefetch or tiling: load blocks ahead of their use "
                f"({pattern['bandwidth_efficiency']:.0%} of bandwidth to expect)"
            )
        return found


def element_offsets(
    shape: Sequence[int], access_indices: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Offsets [n] in a dense row-major tensor; see ``analyze_pattern``."""
    indices = torch.as_tensor(access_indices).cpu()
    total = torch.Size(shape).numel()
    if not indices.numel() or indices.is_floating_point() or indices.dim() > 2:
        raise ShapeMismatchError(
            f"access_indices: shape {tuple(indices.shape)} of {indices.dtype}, expected whole "
            f"numbers [n], or [n, {len(shape)}], n at least 1"
        )
    if indices.dim() == 2:
        if indices.shape[1] != len(shape):
            raise ShapeMismatchError(
                f"access_indices.shape={tuple(indices.shape)}: expected [n, {len(shape)}]"
            )
        sizes = torch.tensor(tuple(shape))
        if bool(((indices < 0) | (indices >= sizes)).any()):
            raise SchemeError(f"access_indices: expected coordinates inside shape={tuple(shape)}")
        strides = torch.empty(tuple(shape), device="meta").stride()
        return (indices * torch.tensor(strides)).sum(1)
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= total:
        raise SchemeError(
            f"access_indices: {low} to {high}, expected 0 to {total - 1} for shape={tuple(shape)}"
        )
    return indices.long()


def tensor_offsets(tensor: torch.Tensor, limit: int = 2**16) -> torch.Tensor:
    """Storage offsets in elements of the first ``limit`` elements, in the order of the indices.

    Raises:
        ShapeMismatchError: an empty tensor.
    """
    if not tensor.numel():
        raise ShapeMismatchError(f"tensor.shape={tuple(tensor.shape)}: expected elements")
    rest = torch.arange(min(tensor.numel(), limit))
    offsets = torch.full_like(rest, int(tensor.storage_offset()))
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        offsets += rest % size * stride
        rest = rest // size
    return offsets


def _classify(offsets: torch.Tensor, steps: torch.Tensor) -> tuple[str, int]:
    """The pattern's type and the size of its most common step."""
    if not len(steps):
        return "sequential", 1
    values, counts = steps.unique(return_counts=True)
    common, share = int(values[counts.argmax()]), float(counts.max() / len(steps))
    if share < _REGULAR:
        return "random", abs(common)
    # a regular walk that sees each element twice or more repeats a row or an element
    if common == 0 or 2 * len(offsets.unique()) <= len(offsets):
        return "broadcast", abs(common)
    return ("sequential" if abs(common) == 1 else "strided"), abs(common)


def _distinct_per_window(places: torch.Tensor, window: int) -> int:
    """Sum over windows of distinct places; a window's first place may be its predecessor's last."""
    window_of = torch.arange(len(places)) // window
    # one number for a window and a place in it: rows of pairs take a hundred times as long to sort
    span = int(places.max() - places.min()) + 1
    distinct = len((window_of * span + places - places.min()).unique())
    return distinct - int((places[window::window] == places[window - 1 : -1 : window]).sum())
