# SPDX-License-Identifier: MIT
"""A recording that fails leaves PyTorch as it was, in the order that its allocator needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oss_fused.kernels.recording import recording


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of a PyTorch with a GPU."""
    events: list[Any] = []

    @contextlib.contextmanager
    def graph(_: Any, pool: Any = None) -> Iterator[None]:
        events.append(("graph", pool))
        yield

    def end(*arguments: Any) -> None:
        events.append(("end", *arguments))
        if len(events) > 9:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: events.append(options["device"]))
    return events


def test_nothing_is_done_after_a_recording(events: list[Any]) -> None:
    with recording(torch.cuda.CUDAGraph()):
        pass
    assert events == [("graph", (0, 7))]


@pytest.mark.parametrize("ended", [False, True])
def test_a_failed_recording_is_ended(events: list[Any], ended: bool) -> None:
    # a PyTorch that has ended it says so
    events.extend([None] * (9 if ended else 0))
    with pytest.raises(ValueError, match="waits"), recording(torch.cuda.CUDAGraph()):
        raise ValueError("waits")
    assert events[-4:] == [("graph", (0, 7)), ("end", 3, (0, 7)), ("graph", None), "cuda"]
