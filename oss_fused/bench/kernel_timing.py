# SPDX-License-Identifier: MIT
"""Times of GPU kernels: CUDA-graph replays over rotated inputs, and the device's ceilings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# inputs are rotated until together they are several times an H200's L2 (60 MB)
ROTATED_BYTES = 400e6
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
    """Capture ``calls`` in one CUDA graph and time its replays; per call.

    Args:
        calls: the same kernel on different inputs, already compiled.
        replays: timed replays, after one warm-up replay.
    """
    # inputs made on the default stream must exist before the capture stream reads them
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(
        start.elapsed_time(end) * 1e3 / len(calls) for start, end in itertools.pairwise(events)
    )
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
