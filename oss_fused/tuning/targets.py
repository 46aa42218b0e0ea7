# SPDX-License-Identifier: MIT
"""What scripts/tune.py can tune: kernel functions with their space, default and reference.

A target's default is what its kernel runs with where nothing was tuned, so that the tuner's gain
is over what users get: an empty config leaves the choice to the kernel's table or rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from oss_fused.bench.accuracy import Tolerance
from oss_fused.errors import SchemeError, TritonKernelError
from oss_fused.kernels.op import get_kernel
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput
from oss_fused.tuning.space import (
    FP8_GEMM_CONFIGS,
    GATED_MLP_CONFIGS,
    RMSNORM_ROPE_CONFIGS,
    Config,
    ConfigSpace,
)

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
_EPS = 1e-6
# both sides accumulate in float32 and round once; the order of the sums differs
_REORDERED = Tolerance(4e-3, 2e-2, "one rounding to bfloat16 on each side")


@dataclass(frozen=True)
class MatmulProblem(FP8GEMMInput):
    """A product of bfloat16 operands, whose bytes count double those of FP8."""

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Target:
    """A tunable kernel function: ``function(*arguments(problem, device), **config)``.

    ``problem`` makes a problem of its sizes, whose names are ``sizes``; ``accumulators`` are the
    float32 tiles that a program of the kernel keeps.
    """

    function: Callable[..., Any]
    space: ConfigSpace
    reference: Callable[..., Any]
    arguments: Callable[[Any, torch.device], tuple[Any, ...]]
    problem: Callable[..., Any]
    sizes: str = "MxNxK"
    default: Config = field(default_factory=dict)
    accumulators: int = 1
    tolerance: Tolerance = _REORDERED


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
    from oss_fused.kernels.gemm.large import gemm_large

    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    names = {name: name.lower() for name in config}
    gemm_large(
        a, b, a_scale, b_scale, None, out, **{names[name]: value for name, value in config.items()}
    )
    return out


def _tuned_rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **config: int
) -> torch.Tensor:
    from oss_fused.kernels.rope.rmsnorm_rope import rmsnorm_rope

    names = {"BLOCK_SIZE": "rows", "num_warps": "num_warps", "num_stages": "stages"}
    launch = {names[name]: value for name, value in config.items()}
    return rmsnorm_rope(x, weight, cos, sin, _EPS, launch)


def _rmsnorm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    return get_kernel("torch", "rmsnorm_rope")(x, weight, cos, sin, _EPS)


def _tuned_gated_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, **config: int
) -> torch.Tensor:
    from oss_fused.kernels.mlp.gated import gated_mlp

    return gated_mlp(x, gate, up, None, None, "silu", "up", config)


def _gated_mlp_reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return get_kernel("torch", "gated_mlp")(x, gate, up, None, None, "silu", "up")


def get_target(name: str) -> Target:
    """The target ``name``.

    "matmul" is the tutorial's bfloat16 product (its default is v2's config), "fp8_gemm" the
    product of many rows, "rmsnorm_rope" and "gated_mlp" what the library functions launch.

    Raises:
        TritonKernelError: the kernels cannot be imported here.
        SchemeError: unknown name.
    """
    if name == "rmsnorm_rope":
        return Target(
            _tuned_rmsnorm_rope,
            RMSNORM_ROPE_CONFIGS,
            _rmsnorm_rope_reference,
            lambda problem, device: tuple(problem.make(device).values()),
            RMSNormRoPEInput,
            "BATCHxSEQUENCExHIDDENxHEAD",
        )
    if name == "gated_mlp":
        return Target(
            _tuned_gated_mlp,
            GATED_MLP_CONFIGS,
            _gated_mlp_reference,
            lambda problem, device: tuple(problem.make(device).values())[:3],
            lambda rows, hidden, intermediate: GatedMLPInput(1, rows, hidden, intermediate),
            "ROWSxHIDDENxINTERMEDIATE",
            accumulators=2,
        )
    if name == "fp8_gemm":
        return Target(
            _tuned_fp8_gemm,
            FP8_GEMM_CONFIGS,
            _fp8_reference,
            _fp8_arguments,
            FP8GEMMInput,
        )
    if name != "matmul":
        raise SchemeError(f"target={name!r}: expected one of {', '.join(TARGETS)}")
    try:
        from harness.tutorial_matmul import matmul_v3
    except ImportError as error:
        raise TritonKernelError(f"target={name!r}: needs the package triton ({error})") from error
    v2 = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
    return Target(
        matmul_v3,
        MATMUL_CONFIGS,
        torch.mm,
        _matmul_arguments,
        MatmulProblem,
        default={**v2, "num_warps": 4, "num_stages": 3},
    )


TARGETS = ("matmul", "fp8_gemm", "gated_mlp", "rmsnorm_rope")
