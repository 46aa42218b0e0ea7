# SPDX-License-Identifier: MIT
"""The product of docs/matmul-in-steps.md as a tuning target: importing this adds "matmul"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.errors import TritonKernelError
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.space import ConfigSpace
from oss_fused.tuning.targets import TARGETS, Target

MATMUL_CONFIGS = ConfigSpace(
    {
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (32, 64, 128),
        "GROUP_M": (4, 8, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
    }
)
# the config of v2, over which tuning gains
_UNTUNED = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,
    "BLOCK_K": 64,
    "GROUP_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}


@dataclass(frozen=True)
class MatmulProblem(FP8GEMMInput):
    """A product of bfloat16 operands, whose bytes count double those of FP8."""

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n)


def _arguments(problem: FP8GEMMInput, device: torch.device) -> tuple[Any, ...]:
    made = problem.make(device)
    return made["a"], made["b"].contiguous()


def matmul_target() -> Target:
    """The tutorial's v3.

    Raises:
        TritonKernelError: Triton is not installed.
    """
    try:
        from harness.tutorial_matmul import matmul_v3
    except ImportError as error:
        raise TritonKernelError(f"target='matmul': needs the package triton ({error})") from error
    return Target(matmul_v3, MATMUL_CONFIGS, torch.mm, _arguments, MatmulProblem, default=_UNTUNED)


TARGETS["matmul"] = matmul_target
