# SPDX-License-Identifier: MIT
"""Ranks in processes of their own that sum tensors in vLLM's way and in this package's, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# sums in a row, and how often each row is timed: fixed, since all ranks must run as many
SUMS, REPEATS = 40, 15
# larger sums are launched one by one, as steps without a CUDA graph do
LARGEST_IN_GRAPH = 2**23


def measure(world: int, tokens: list[int], hidden: int) -> list[dict[str, Any]]:
    """Microseconds per sum of [tokens, hidden] bf16 of rank 0, many in a row.

    Args:
        world: GPUs, and processes.
        tokens: numbers of rows.
        hidden: columns.

    Returns:
        tokens, bytes, "vllm_us" (whatever vLLM takes for the size: its custom all-reduce up to
        8 MiB, then symmetric memory where NVLink has multicast, else NCCL), "oss_fused_us",
        "ratio", "same_bits", for each number of tokens.

    Raises:
        RuntimeError: a process failed.
    """
    import torch.multiprocessing as processes

    from harness.server import free_port

    context = processes.get_context("spawn")
    answers = context.SimpleQueue()
    arguments = (world, free_port(), tokens, hidden, answers)
    running = processes.start_processes(
        _rank, arguments, nprocs=world, join=False, start_method="spawn"
    )
    try:
        while not running.join(timeout=1):
            pass
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        raise RuntimeError(f"a rank of {world} failed: {error}") from error
    return answers.get()


def _rank(rank: int, world: int, port: int, tokens: list[int], hidden: int, answers: Any) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(world, rank, address, rank)
        parallel_state.initialize_model_parallel(world)
        try:
            rows = [_compare(count, hidden) for count in tokens]
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    if rank == 0:
        answers.put(rows)


def _compare(tokens: int, hidden: int) -> dict[str, Any]:
    """Both sums of one size."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.parallel_state import get_tp_group

    from oss_fused.layers.vllm.all_reduce import OssAllReduce, adopt_all_reduce

    group = get_tp_group()
    communicator = group.device_communicator
    found = communicator.ca_comm
    if found is None or found.disabled:
        raise RuntimeError("vLLM has no all-reduce of its own here: expected GPUs with peer access")
    if type(found) is not OssAllReduce:
        parallel = SimpleNamespace(use_ubatching=False)
        model = SimpleNamespace(dtype=torch.bfloat16)
        adopt_all_reduce(SimpleNamespace(parallel_config=parallel, model_config=model))
    if type(found) is not OssAllReduce:
        raise RuntimeError("the kernel does not apply here: expected Hopper GPUs joined by NVLink")
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=found.device)
    kinds = {"vllm": CustomAllreduce, "oss_fused": OssAllReduce}
    sums: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in kinds}

    def one_by_one() -> None:
        for _ in range(SUMS):
            communicator.all_reduce(x)

    rows = dict.fromkeys(kinds, one_by_one)
    for name, kind in kinds.items():
        found.__class__ = kind
        sums[name] = communicator.all_reduce(x).clone()
        if x.nbytes <= LARGEST_IN_GRAPH:
            rows[name] = _captured(group, one_by_one).replay
    for _ in range(REPEATS):
        for name, kind in kinds.items():
            found.__class__ = kind
            times[name].append(_clock(rows[name]))
    found.__class__ = OssAllReduce
    figures = {name: round(statistics.median(spent[3:]), 3) for name, spent in times.items()}
    return {
        "tokens": tokens,
        "bytes": x.nbytes,
        **{f"{name}_us": value for name, value in figures.items()},
        "ratio": round(figures["vllm"] / figures["oss_fused"], 3),
        "same_bits": torch.equal(*(value.view(torch.int16) for value in sums.values())),
    }


def _captured(group: Any, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context:
        run()
        context.stream.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):
            run()
    torch.cuda.synchronize()
    return graph


def _clock(row: Callable[[], Any]) -> float:
    """Microseconds of one sum of a row; ranks wait for one another in every sum."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    row()
    start.record()
    row()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / SUMS * 1e3
