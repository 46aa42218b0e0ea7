# SPDX-License-Identifier: MIT
"""What scripts/tune.py can tune: kernel functions with their space, default and reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.bench.accuracy import Tolerance
from oss_fused.errors import TritonKernelError
from oss_fused.kernels.registry import get_kernel
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.space import FP8_GEMM_CONFIGS, Config, ConfigSpace

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
# both sides accumulate in float32 and round once; the order of the sums differs
_REORDERED = Tolerance(4e-3, 2e-2, "one rounding to bfloat16 on each side")


@dataclass(frozen=True)
class Target:
    """A tunable kernel function: ``function(*arguments(problem, device), **config)``."""

    function: Callable[..., Any]
    space: ConfigSpace
    default: Config
    reference: Callable[..., Any]
    arguments: Callable[[FP8GEMMInput, torch.device], tuple[Any, ...]]
    tolerance: Tolerance = _REORDERED


@dataclass(frozen=True)
class MatmulProblem(FP8GEMMInput):
    """A product of bfloat16 operands, whose bytes count double those of FP8."""

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n)


def _matmul_arguments(problem: FP8GEMMInput, device: torch.device) -> tuple[Any, ...]:
    made = problem.make(device)
    return made["a"], made["b"].contiguous()


def _fp8_arguments(problem: FP8GEMMInput, device: torch.device) -> tuple[Any, ...]:
    made = problem.make(device)
    quantize = get_kernel("triton", "quantize_fp8")
    a, a_scale = quantize(made["a"], None, "token")
    b, b_scale = quantize(made["b"].t(), None, "channel")
    return a, b, a_scale, b_scale


def _fp8_reference(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(torch.bfloat16)


def _tuned_fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    **config: int,
) -> torch.Tensor:
    from oss_fused.kernels.triton.gemm_large import gemm_large

    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    names = {name: name.lower() for name in config}
    gemm_large(
        a, b, a_scale, b_scale, None, out, **{names[name]: value for name, value in config.items()}
    )
    return out


def get_target(name: str) -> Target:
    """The target ``name``: "matmul" (bfloat16, the tutorial's v3) or "fp8_gemm" (large products).

    Raises:
        TritonKernelError: the kernels cannot be imported here.
        ValueError: unknown name.
    """
    if name not in TARGETS:
        raise ValueError(f"target={name!r}: expected one of {', '.join(TARGETS)}")
    if name == "fp8_gemm":
        default = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP_M": 8}
        default |= {"num_warps": 8, "num_stages": 3}
        return Target(_tuned_fp8_gemm, FP8_GEMM_CONFIGS, default, _fp8_reference, _fp8_arguments)
    try:
        from oss_fused.kernels.triton.tutorial_matmul import matmul_v3
    except ImportError as error:
        raise TritonKernelError(f"target={name!r}: needs the package triton ({error})") from error
    default = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
    default |= {"num_warps": 4, "num_stages": 3}
    return Target(matmul_v3, MATMUL_CONFIGS, default, torch.mm, _matmul_arguments)


TARGETS = ("matmul", "fp8_gemm")
