# SPDX-License-Identifier: MIT
"""Library functions against yardsticks of like work, timed in turn in one process.

What slows a machine slows both, so that their ratio is the same on an idle and a busy one, and
nearly the same on another. The smallest time of each is the least disturbed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from oss_fused.bench.runner import verify
from oss_fused.bench.suite import describe
from oss_fused.functional import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput

TURNS = 15
# a slower function is slower in every round, a disturbance passes
ROUNDS = 3
# which operation each is, the problem that is timed, and a small one that is checked
PROBLEMS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "rmsnorm_rope": (
        fused_rmsnorm_rope,
        RMSNormRoPEInput(1, 64, 2048, dtype=torch.float32),
        RMSNormRoPEInput(1, 5, 256, dtype=torch.float32),
    ),
    "gated_mlp": (
        fused_gated_mlp,
        GatedMLPInput(4, 1, 576, 1536, dtype=torch.float32),
        GatedMLPInput(2, 3, 64, 96, dtype=torch.float32),
    ),
    "fp8_gemm": (fp8_gemm, FP8GEMMInput(16, 576, 576), FP8GEMMInput(15, 96, 128)),
}


def yardstick(operation: str) -> Callable[..., Any]:
    """The operation in plain PyTorch, step by step, with the same keyword arguments."""
    known: dict[str, Callable[..., Any]] = {
        "rmsnorm_rope": _norm_rope,
        "gated_mlp": _gated,
        "fp8_gemm": _quantised,
    }
    return known[operation]


def _norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    y = y.view(*x.shape[:2], -1, cos.shape[-1])
    left, right = y.chunk(2, -1)
    return (y * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]).view(x.shape)


def _gated(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str
) -> torch.Tensor:
    up = torch.nn.functional.linear(x, up_weight)
    return torch.nn.functional.linear(x, gate_weight) * torch.nn.functional.silu(up)


def _quantised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def codes(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = t.float().abs().amax(-1, keepdim=True) / 448
        return (t.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    (qa, sa), (qb, sb) = codes(a), codes(b.t())
    return ((qa.float() @ qb.float().t()) * sa * sb.t()).to(torch.bfloat16)


def ratio(first: Callable[[], Any], second: Callable[[], Any], turns: int = TURNS) -> float:
    """Smallest time of ``first`` over the smallest of ``second``, called in turn."""
    best = [float("inf")] * 2
    for _ in range(turns):
        for place, call in enumerate((first, second)):
            start = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - start)
    return best[0] / best[1]


def measure() -> list[dict[str, Any]]:
    """A row per operation: verdict, ratio to the yardstick, and of FP8 the relative error.

    On one thread: threads that wait for each other would dominate on a busy machine.
    """
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (function, problem, small) in PROBLEMS.items():
            arguments = problem.make()
            verdict = verify(function, small)
            row: dict[str, Any] = {
                "operation": name,
                "problem": describe(problem),
                "implementation": "oss_fused",
                "status": "ok" if verdict.passed else "wrong",
                "message": "" if verdict.passed else f"{verdict.case}: {verdict.result.reason}",
            }
            if name == "fp8_gemm":
                # what the format loses; of the others the tolerance is the bar
                row["error"] = verdict.relative_error
            plain = yardstick(name)
            with torch.inference_mode():
                # first calls allocate and choose
                function(**arguments), plain(**arguments)
                ours = functools.partial(function, **arguments)
                theirs = functools.partial(plain, **arguments)
                row["ratio"] = min(ratio(ours, theirs) for _ in range(ROUNDS))
            rows.append(row)
    finally:
        torch.set_num_threads(threads)
    return rows
