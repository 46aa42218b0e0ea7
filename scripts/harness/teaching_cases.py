# SPDX-License-Identifier: MIT
"""The tutorial's kernels for bench_operators: vector addition, levels of attention, an epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from harness.tutorial_add import add
from harness.tutorial_attention import attention_a, attention_b
from harness.tutorial_matmul import matmul_v3, matmul_v4
from oss_fused.attention import flash_attention
from oss_fused.bench.accuracy import Tolerance, check_accuracy
from oss_fused.bench.timing import copies_for, time_graphs

_REPLAYS = 10
_ADDED = (1_000_000, 4_000_000, 16_000_000)
_LENGTHS = (512, 1024, 2048, 4096)
_PRODUCT = 4096
_LOOSE = Tolerance(1e-2, 1e-1, "logits and weights rounded to bfloat16 on their way")


def teaching_rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    """All of them; ``bandwidth`` is a copy's, in bytes per second."""
    yield from _additions(bandwidth)
    for length in _LENGTHS:
        yield from _levels(length)
    yield from _epilogue()


def _row(
    operation: str, name: str, problem: str, us: float, value: str, error: str
) -> dict[str, Any]:
    return {
        "operation": operation,
        "implementation": name,
        "problem": problem,
        "us": us,
        "value": value,
        "error": error,
    }


def _additions(bandwidth: float) -> Iterator[dict[str, Any]]:
    for n in _ADDED:
        nbytes = 3 * 4 * n
        sets = [
            (torch.randn(n, device="cuda"), torch.randn(n, device="cuda"))
            for _ in range(copies_for(nbytes))
        ]
        verdict = check_accuracy(add(*sets[0]), sets[0][0].double() + sets[0][1].double())
        us = time_graphs({"add": [functools.partial(add, *one) for one in sets]}, _REPLAYS)["add"]
        share = nbytes / (us.median * 1e-6) / bandwidth
        value = f"{nbytes / us.median * 1e-3:7.0f} GB/s {share:6.1%} of copy"
        row = _row("vector add", "tutorial", f"{n}", us.median, value, verdict.reason)
        yield row | {"gbps": nbytes / us.median * 1e-3, "share": share}


def _levels(length: int) -> Iterator[dict[str, Any]]:
    shape = (4, 16, length, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    part = [t[:1, :2].float() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(part[0], part[1], part[2])
    levels: dict[str, Callable[..., Any]] = {
        "level a": attention_a,
        "level b": attention_b,
        "level c": flash_attention,
    }
    for name, level in levels.items():
        verdict = check_accuracy(level(q, k, v)[:1, :2].float(), wanted.double(), _LOOSE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        level(q, k, v)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        call = functools.partial(level, q, k, v)
        us = time_graphs({name: [call]}, _REPLAYS)[name].median
        value = f"{peak / 2**20:9.1f} MiB peak"
        row = _row("attention level", name, f"N{length} D64", us, value, verdict.reason)
        yield row | {"peak_bytes": peak}


def _epilogue() -> Iterator[dict[str, Any]]:
    size = _PRODUCT
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    bias = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    product = a.float() @ b.float()
    calls = {
        "plain": (functools.partial(matmul_v3, a, b), product),
        "bias and silu": (functools.partial(matmul_v4, a, b, bias), F.silu(product + bias.float())),
    }
    times = time_graphs({name: [call] for name, (call, _) in calls.items()}, _REPLAYS)
    for name, (call, wanted) in calls.items():
        us = times[name].median
        fraction = times["plain"].median / us
        verdict = check_accuracy(call(), wanted)
        value = f"{2 * size**3 / us * 1e-6:7.1f} TFLOPS {fraction:6.1%} of plain"
        row = _row("gemm epilogue", name, f"{size}^3", us, value, verdict.reason)
        yield row | {"fraction": fraction}


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Named figures of summary.json."""
    fused = [row for row in rows if row["implementation"] == "bias and silu" and not row["error"]]
    return {"operators.gemm_epilogue.fraction": fused[-1]["fraction"]} if fused else {}
