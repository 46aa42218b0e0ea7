# SPDX-License-Identifier: MIT
"""Time a callable: call by call behind a flushed L2, in graph replays, by the clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oss_fused.errors import SchemeError

# larger than the L2 of every GPU described in tuning/devices (B200: 126 MB)
FLUSH_BYTES = 256 * 2**20


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
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                result = call()
                if keep:
                    kept.append(result)
    except Exception:
        # PyTorch's random generator stays in a capture that failed; one that succeeds takes it out
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        raise
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
