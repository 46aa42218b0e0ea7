# SPDX-License-Identifier: MIT
"""The sum over tensor-parallel ranks by ``oss_fused::all_reduce``, in place of vLLM's kernel.

vLLM's own waits for all ranks at its start and at its end, takes 8 MiB at most, and no kernel
starts early before or behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.all_reduce import BLOCK_BYTES, inbox_bytes
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.op import backend_for

# ranks -> the most bytes that are summed in one round
_INBOX = {2: 8 * 2**20, 4: 512 * 2**10, 6: 256 * 2**10, 8: 256 * 2**10}


class OssAllReduce(CustomAllreduce):
    """vLLM's all-reduce of one node's GPUs; ``adopt_all_reduce`` gives an object this class."""

    oss_pointers: Sequence[int] = ()
    oss_inboxes: torch.Tensor
    oss_rounds: torch.Tensor

    def make_inboxes(self) -> None:
        """Allocate this rank's inbox and learn where the others' are; all ranks call it.

        What the kernel reads lies behind the inbox. PyTorch's memory would be lost where a server
        sleeps at level 2, since the model is built in the pool of the weights.
        """
        blocks = _INBOX[self.world_size] // BLOCK_BYTES
        size = inbox_bytes(self.world_size, blocks)
        behind = 4 * blocks + 8 * self.world_size
        self.oss_pointers = self.create_shared_buffer(size + behind, group=self.group)
        own = self.oss_pointers[self.rank]
        library = CudaRTLibrary()
        library.cudaMemset(ctypes.c_void_p(own), 0xFF, size)
        library.cudaMemset(ctypes.c_void_p(own + size), 0, behind)
        self.oss_rounds = tensor_at(own + size, blocks, torch.int32, self.device)
        places = own + size + 4 * blocks
        self.oss_inboxes = tensor_at(places, self.world_size, torch.int64, self.device)
        self.oss_inboxes.copy_(torch.tensor(self.oss_pointers))
        torch.cuda.synchronize(self.device)
        # nobody writes before every inbox is empty
        dist.barrier(group=self.group)

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether the kernel sums ``x``: any size of two ranks, else as much as an inbox holds.

        Each rank sends all of ``x`` to every other. Of two ranks nothing can send less; among more,
        vLLM has a kernel that sends every rank its share.
        """
        if self.disabled or x.dtype not in FLOAT_DTYPES or not x.is_contiguous():
            return False
        fits = self.world_size == 2 or x.nbytes <= self.oss_rounds.numel() * BLOCK_BYTES
        return fits and x.nbytes % 16 == 0

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether vLLM asks ``custom_all_reduce`` for the sum."""
        return self._takes(inp) or super().should_custom_ar(inp)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum of ``input`` over ranks."""
        if not self._takes(input):
            return super().custom_all_reduce(input)
        return torch.ops.oss_fused.all_reduce(input, self.oss_inboxes, self.oss_rounds, self.rank)

    def close(self) -> None:
        """Free the inbox, and what vLLM's class holds."""
        if self._ptr and self.oss_pointers:
            self.free_shared_buffer(self.oss_pointers, rank=self.rank)
        super().close()


def tensor_at(
    address: int, elements: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor [elements] of int32 or int64 over memory of a GPU, which it does not own.

    Raises:
        RuntimeError: PyTorch copied the memory, which is then not of this device.
    """
    layout = {
        "shape": (elements,),
        "typestr": f"<i{dtype.itemsize}",
        "data": (address, False),
        "version": 3,
    }
    found = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=layout), device=device)
    if found.data_ptr() != address:
        raise RuntimeError(f"address={address:#x}: expected memory of {device}")
    return found


def adopt_all_reduce(vllm_config: VllmConfig) -> None:
    """Let the sums of tensor-parallel ranks take this package's kernel, where it applies.

    On Hopper GPUs of one node that reach one another by NVLink, unless vLLM's own such kernel is
    off (``--disable-custom-all-reduce``) or a step runs as two that overlap: their sums would mix.
    """
    if not current_platform.is_cuda() or not current_platform.is_device_capability(90):
        return
    found: Any = getattr(get_tp_group().device_communicator, "ca_comm", None)
    if type(found) is not CustomAllreduce or found.disabled or not found.fully_connected:
        return
    if found.world_size not in _INBOX or vllm_config.parallel_config.use_ubatching:
        return
    if backend_for("all_reduce", found.device) != "triton":
        return
    # one that is built changes its class, as the decoder layers do
    found.__class__ = OssAllReduce
    found.make_inboxes()
    # compiles the kernel; all ranks run it
    dtype = vllm_config.model_config.dtype
    found.custom_all_reduce(torch.zeros(8, dtype=dtype, device=found.device))
