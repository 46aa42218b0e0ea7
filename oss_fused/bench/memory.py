# SPDX-License-Identifier: MIT
"""Memory of a function: what it keeps after many calls, the peak within one, and too little."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Problem = TypeVar("Problem")
Result = TypeVar("Result")
# how often a problem without memory is made smaller
_TRIES = 3


def live_tensor_bytes(device: torch.device) -> int:
    """Bytes of the distinct storages that live tensors on ``device`` hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # exact types: subclasses may have no storage (FakeTensor), lazy proxies import when asked
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device == device:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def leaked_bytes(
    fn: Callable[[], Any], device: torch.device | str = "cpu", calls: int = 1000
) -> int:
    """Growth of live tensor memory over ``calls`` calls of ``fn``, results dropped.

    A few calls go first, so that caches and constants that a function keeps for good do not count.

    Raises:
        ValueError: ``calls`` is below 1.
    """
    if calls < 1:
        raise ValueError(f"calls={calls}: expected at least 1")
    device = torch.device(device)
    for _ in range(3):
        fn()
    before = live_tensor_bytes(device)
    for _ in range(calls):
        fn()
    return live_tensor_bytes(device) - before


def peak_memory_bytes(fn: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that one call of ``fn`` holds at its peak beyond what was allocated before.

    None on a CPU, whose allocator does not count.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def with_memory(
    measure: Callable[[Problem], Result],
    problem: Problem,
    smaller: Callable[[Problem], Problem | None],
) -> Result:
    """``measure(problem)``, or that of the first smaller problem that memory suffices for.

    Args:
        measure: may run out of memory.
        problem: tried first; up to three smaller ones follow.
        smaller: the next problem, None where there is none.

    Raises:
        torch.OutOfMemoryError: of the last problem that was tried.
    """
    for _ in range(_TRIES):
        try:
            return measure(problem)
        except torch.OutOfMemoryError:
            following = smaller(problem)
        # here, where nothing refers to the failed call's tensors any more
        torch.cuda.empty_cache()
        if following is None:
            break
        problem = following
    return measure(problem)
