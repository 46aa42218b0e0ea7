# SPDX-License-Identifier: MIT
"""Times of GPU kernels: CUDA-graph replays over rotated inputs, and the device's ceilings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.bench.measure import time_in_turn

# inputs are rotated until together they are twenty times an H200's L2 (60 MB): what a replay finds
# there of the one before is then below what separates two runs
ROTATED_BYTES = 1.2e9
MAX_COPIES = 24
REPLAYS = 20


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and 95th percentile over graph replays."""

    median: float
    p95: float


def copies_for(nbytes: int) -> int:
    """How many sets of inputs of ``nbytes`` keep a replay out of L2."""
    return max(1, min(MAX_COPIES, int(ROTATED_BYTES // max(nbytes, 1)) + 1))


def time_graph(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> Timing:
    """Time graph replays of ``calls``: the same kernel on different inputs, already compiled."""
    return time_graphs({"only": calls}, replays)["only"]


def time_graphs(
    contestants: Mapping[str, Sequence[Callable[[], Any]]], replays: int = REPLAYS
) -> dict[str, Timing]:
    """Time several implementations in turn, each as `time_graph` does; see `time_in_turn`."""
    measured = time_in_turn(list(contestants.values()), replays, "cuda")
    return {name: _timing(times) for name, times in zip(contestants, measured, strict=True)}


def _timing(milliseconds: Sequence[float]) -> Timing:
    times = sorted(1e3 * value for value in milliseconds)
    return Timing(statistics.median(times), times[min(len(times) - 1, int(0.95 * len(times)))])


def copy_bandwidth(nbytes: int = 2**31) -> float:
    """Device-to-device copy in bytes per second, read and written bytes counted."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return 2 * nbytes / (statistics.median(times) * 1e-3)
