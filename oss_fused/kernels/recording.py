# SPDX-License-Identifier: MIT
"""Recording of CUDA graphs that may fail without harm to what follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record in ``graph`` what the block launches on the current device.

    ``pool``: of graphs that never run at the same time, a handle of the memory that they share.

    PyTorch 2.11 leaves a capture that failed half open. Its random generator and its allocator then
    take a capture to be under way: ``empty_cache`` gives no memory back, and the destructor of a
    ``MemPool`` ends the process. Both are put right here.

    Raises:
        RuntimeError: something in the block cannot be recorded.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except Exception:
        end_failed_capture(pool)
        raise


def end_failed_capture(pool: Any) -> None:
    """Have PyTorch's allocator and random generator leave a capture into ``pool`` that failed."""
    with suppress(RuntimeError):  # a later PyTorch has ended it, or it had not begun
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    # a capture that succeeds takes the random generator out of the one that failed
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
