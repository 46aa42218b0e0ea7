# SPDX-License-Identifier: MIT
"""What vLLM's CPU build lacks for data and pipeline parallelism.

Its communicator cannot gather the tokens of data-parallel ranks, which hold different numbers of
them, for their experts, nor hand the sums back (`NotImplementedError`); its model runner never
makes the buffer for what an earlier stage of a pipeline sends (`AssertionError`). `offer` makes
vLLM load `install` as a plugin in each of its processes, so that the rest of the path, ours among
it, runs without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist


def offer(folder: Path) -> str:
    """Describe an installed plugin in ``folder``; returns the entry for PYTHONPATH."""
    info = folder / "cpu_parallel-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-parallel\nVersion: 0\n")
    entry = f"cpu_parallel = {__name__}:install"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return str(folder)


def install() -> None:
    """Give vLLM's communicator the two operations, and its model runner the buffer."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def load_and_make_buffer(self, *args, **options):
        load_model(self, *args, **options)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                self.max_num_tokens, self.model_config.dtype, self.device
            )

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUModelRunner.load_model = load_and_make_buffer


def all_gatherv(self, input_, dim=0, sizes=None):
    """The ranks' tensors [T_r, ...], one behind the other; of a list each."""
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, tensor) for tensor in input_]
    parts = [None] * self.world_size
    dist.all_gather_object(parts, input_, group=self.cpu_group)
    return torch.cat(parts)


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """This rank's ``sizes[rank]`` rows of the ranks' sum."""
    assert dim == 0
    total = input_.clone()
    dist.all_reduce(total, group=self.cpu_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group]
