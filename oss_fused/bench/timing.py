# SPDX-License-Identifier: MIT
"""Times of a callable: single calls with a flushed L2, CUDA-graph replays, a CPU's clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.errors import SchemeError
from oss_fused.kernels.recording import recording

# larger than the L2 of every GPU described in tuning/devices (B200: 126 MB)
FLUSH_BYTES = 256 * 2**20
# inputs are rotated until together they are twenty times an H200's L2 (60 MB): what a replay finds
# there of the one before is then below what separates two runs
ROTATED_BYTES = 1.2e9
MAX_COPIES = 24
REPLAYS = 20


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and percentiles over graph replays."""

    median: float
    p90: float
    p95: float
    p99: float


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
    return {name: of_replays(times) for name, times in zip(contestants, measured, strict=True)}


def of_replays(milliseconds: Sequence[float]) -> Timing:
    """Milliseconds of one call in each replay, as a Timing."""
    times = sorted(1e3 * value for value in milliseconds)
    shares = (times[min(len(times) - 1, int(share * len(times)))] for share in (0.9, 0.95, 0.99))
    return Timing(statistics.median(times), *shares)


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


def time_calls(fn: Callable[[], Any], repeats: int, device: torch.device | str) -> list[float]:
    """Milliseconds of each of ``repeats`` calls of ``fn``.

    On a GPU the L2 cache is overwritten before every call, which also gives the host time to
    queue ahead: an event pair then holds the kernels alone. What ``fn`` raises passes through.

    Raises:
        SchemeError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise SchemeError(f"repeats={repeats}: expected at least 1")
    device = torch.device(device)
    if device.type != "cuda":
        return [_clock_one(fn) for _ in range(repeats)]
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            flush.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def time_replays(
    calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device | str
) -> list[float]:
    """Milliseconds of one call, over ``repeats`` replays of a CUDA graph of all ``calls``.

    Their results are kept, so that each call writes memory of its own; else as `time_in_turn`.
    """
    return time_in_turn([calls], repeats, device, keep=True)[0]


def time_in_turn(
    contestants: Sequence[Sequence[Callable[[], Any]]],
    repeats: int,
    device: torch.device | str,
    keep: bool = False,
) -> list[list[float]]:
    """Milliseconds of one call of each contestant; their graphs are replayed one after the other.

    The way for kernels of a few microseconds, which an event pair of their own would inflate. In
    turn, because a clock that drifts must hit all alike. Each turn is two replays of which the
    second is timed: the first writes back what the contestant before left in the L2, up to 12 us.
    A contestant's calls are the same function on inputs that together exceed the L2. Results are
    dropped, so that later calls write where earlier ones did, as layers of a model do, unless
    ``keep``.

    Raises:
        SchemeError: ``repeats`` is below 1.
        RuntimeError: a call cannot be captured.
    """
    if repeats < 1:
        raise SchemeError(f"repeats={repeats}: expected at least 1")
    with torch.cuda.device(device):
        # inputs made on the default stream must exist before the capture stream reads them
        torch.cuda.synchronize()
        captured = [capture(calls, keep) for calls in contestants]
        events = [
            [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in captured]
            for _ in range(repeats)
        ]
        for turn in events:
            for (graph, _), (start, end) in zip(captured, turn, strict=True):
                graph.replay()
                start.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        return [
            [turn[place][0].elapsed_time(turn[place][1]) / len(calls) for turn in events]
            for place, calls in enumerate(contestants)
        ]


def capture(
    calls: Sequence[Callable[[], Any]], keep: bool = False
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A CUDA graph of ``calls`` in order, and their results if ``keep``.

    Raises:
        RuntimeError: a call cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = []
    with recording(graph):
        for call in calls:
            result = call()
            if keep:
                kept.append(result)
    return graph, kept


def _clock_one(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return 1e3 * (time.perf_counter() - start)


def warm_up(fn: Callable[[], Any], runs: int, device: torch.device | str) -> None:
    """Call ``fn`` that many times and wait for it: compilation, clocks and caches settle."""
    for _ in range(runs):
        fn()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def host_overhead_us(fn: Callable[[], Any], calls: int = 200) -> float:
    """Median host time of one call in microseconds, not waiting for the device."""
    samples = [1e3 * _clock_one(fn) for _ in range(calls)]
    return sorted(samples)[calls // 2]
