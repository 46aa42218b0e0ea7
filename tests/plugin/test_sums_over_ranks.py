# SPDX-License-Identifier: MIT
"""Where tensor-parallel ranks take this package's sum: vLLM's communicator with CPU memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from oss_fused.kernels.all_reduce import BLOCK_BYTES, inbox_bytes, reference
from oss_fused.layers.vllm import all_reduce
from oss_fused.layers.vllm.all_reduce import OssAllReduce, adopt_all_reduce

MIB = 2**20


class Library:
    def cudaMemset(self, pointer, value, size):
        ctypes.memset(pointer, value, size)


@pytest.fixture
def server(monkeypatch):
    """A group of two ranks, this one the second, as ``adopt_all_reduce`` finds it on a GPU."""
    found = CustomAllreduce.__new__(CustomAllreduce)
    vars(found).update(
        disabled=False, fully_connected=True, world_size=2, rank=1, group="group", _ptr=0,
        device=torch.device("cpu"), max_size=8 * MIB, batch_invariant=False, _IS_CAPTURING=False,
    )  # fmt: skip
    boxes: list[torch.Tensor] = []

    def create(size, group=None):
        assert group == "group"
        boxes.extend(torch.full((size,), 7, dtype=torch.uint8) for _ in range(found.world_size))
        return [box.data_ptr() for box in boxes]

    said: list[object] = []
    monkeypatch.setattr(CustomAllreduce, "create_shared_buffer", staticmethod(create))
    monkeypatch.setattr(all_reduce, "CudaRTLibrary", Library)
    monkeypatch.setattr(all_reduce, "tensor_at", lambda *of: reference.tensor_at(*of[:3]))
    monkeypatch.setattr(all_reduce.dist, "barrier", lambda group: said.append(group))
    monkeypatch.setattr(all_reduce.torch.cuda, "synchronize", lambda device: said.append(device))
    monkeypatch.setattr(all_reduce.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(
        all_reduce.current_platform, "is_device_capability", lambda value: value == 90
    )
    group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=found))
    monkeypatch.setattr(all_reduce, "get_tp_group", lambda: group)
    monkeypatch.setattr(all_reduce, "backend_for", lambda *_: "triton")
    # the peer's first sum, which warms the kernel up: zeros
    monkeypatch.setattr(OssAllReduce, "make_inboxes", _with_zeros(OssAllReduce.make_inboxes, boxes))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=False),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return SimpleNamespace(found=found, boxes=boxes, said=said, config=config, group=group)


def _with_zeros(make, boxes):
    def run(self):
        make(self)
        own, size = boxes[self.rank], inbox_bytes(2, 8 * MIB // BLOCK_BYTES)
        assert (own[:size] == 0xFF).all()
        # what the kernel reads is no memory of PyTorch's
        assert self.oss_rounds.data_ptr() == own.data_ptr() + size
        assert self.oss_rounds.tolist() == [0] * (8 * MIB // BLOCK_BYTES)
        assert self.oss_inboxes.data_ptr() + 16 == own.data_ptr() + len(own)
        assert self.oss_inboxes.tolist() == [box.data_ptr() for box in boxes]
        own[:size].view(torch.int16).view(2, 2, -1)[0, 0, :8] = 0

    return run


def test_two_ranks_sum_any_size(server):
    found = server.found
    adopt_all_reduce(server.config)
    assert type(found) is OssAllReduce
    assert server.said == [torch.device("cpu"), "group"]
    # the first sum has used the first block once
    assert found.oss_rounds[:2].tolist() == [1, 0]
    x = torch.arange(24, dtype=torch.bfloat16)
    inbox = server.boxes[1][: inbox_bytes(2, 8 * MIB // BLOCK_BYTES)]
    inbox.view(torch.bfloat16).view(2, 2, -1)[1, 0, :24] = 2.0
    assert torch.equal(found.custom_all_reduce(x), x + 2)
    large = torch.empty(20 * MIB, dtype=torch.bfloat16, device="meta")
    assert found.should_custom_ar(large)
    # what is no whole number of vectors, or no number of 16 or 32 bits, goes vLLM's way
    for other in (torch.empty(7), torch.empty(64, dtype=torch.int32), large.double()):
        assert not found.should_custom_ar(other)
    adopt_all_reduce(server.config)
    assert len(server.boxes) == 2


def test_more_ranks_sum_what_an_inbox_holds(server, monkeypatch):
    found = server.found
    adopt_all_reduce(server.config)
    taken = []
    monkeypatch.setattr(CustomAllreduce, "custom_all_reduce", lambda self, x: taken.append(x))
    found.world_size, found.oss_rounds = 4, torch.zeros(1024, dtype=torch.int32)
    fits = torch.empty(512 * 1024, dtype=torch.uint8).view(torch.bfloat16)
    assert found._takes(fits)
    above = torch.empty(512 * 1024 + 16, dtype=torch.uint8).view(torch.bfloat16)
    assert not found._takes(above) and found.should_custom_ar(above)
    assert found.custom_all_reduce(above) is None and taken == [above]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, _: setattr(s.found, "disabled", True),
        lambda s, _: setattr(s.found, "fully_connected", False),
        lambda s, _: setattr(s.found, "world_size", 3),
        lambda s, _: setattr(s.config.parallel_config, "use_ubatching", True),
        lambda s, _: setattr(s.group.device_communicator, "ca_comm", None),
        lambda s, _: setattr(s.group, "device_communicator", None),
        lambda s, patch: patch.setattr(all_reduce, "backend_for", lambda *_: "torch"),
        lambda s, patch: patch.setattr(all_reduce.current_platform, "is_cuda", lambda: False),
        lambda s, patch: patch.setattr(
            all_reduce.current_platform, "is_device_capability", lambda value: value == 80
        ),
    ],
)
def test_where_vllm_sums(change, server, monkeypatch):
    change(server, monkeypatch)
    adopt_all_reduce(server.config)
    assert type(server.found) is CustomAllreduce and not server.boxes


def test_the_inbox_is_freed_once(server, monkeypatch):
    freed = []
    monkeypatch.setattr(
        CustomAllreduce, "free_shared_buffer",
        staticmethod(lambda pointers, rank: freed.append(pointers[rank])),
    )  # fmt: skip
    monkeypatch.setattr(
        "vllm.distributed.device_communicators.custom_all_reduce.ops",
        SimpleNamespace(dispose=lambda pointer: None),
    )
    found = server.found
    adopt_all_reduce(server.config)
    found._ptr, found.meta_ptrs, found.buffer_ptrs = 1, [2, 3], [4, 5]
    found.close()
    found.close()
    assert freed == [server.boxes[1].data_ptr(), 3, 5]
