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
from oss_fused.bench.problems import ConvolutionInput
from oss_fused.errors import SchemeError
from oss_fused.kernels.op import get_kernel
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput
from oss_fused.tuning.space import (
    CONVOLUTION_CONFIGS,
    FP8_GEMM_CONFIGS,
    GATED_MLP_CONFIGS,
    RMSNORM_ROPE_CONFIGS,
    Config,
    ConfigSpace,
)

_EPS = 1e-6
# both sides accumulate in float32 and round once; the order of the sums differs
_REORDERED = Tolerance(4e-3, 2e-2, "one rounding to bfloat16 on each side")


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
    from oss_fused.kernels.gemm.portable import gemm_large

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


def _tuned_convolution(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, **config: int
) -> torch.Tensor:
    from oss_fused.kernels.convolution.triton import conv2d

    pad = [w.shape[-1] // 2] * 2
    return conv2d(x, w, bias, [1, 1], pad, [1, 1], True, "implicit", config or None)


def _convolution_reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    pad = [w.shape[-1] // 2] * 2
    return get_kernel("torch", "conv2d")(x, w, bias, [1, 1], pad, [1, 1], True, "implicit")


def _convolution_target() -> Target:
    return Target(
        _tuned_convolution,
        CONVOLUTION_CONFIGS,
        _convolution_reference,
        lambda problem, device: tuple(problem.make(device).values()),
        ConvolutionInput,
        "IMAGESxINxOUTxSIZExWINDOW",
    )


def _rmsnorm_rope_target() -> Target:
    return Target(
        _tuned_rmsnorm_rope,
        RMSNORM_ROPE_CONFIGS,
        _rmsnorm_rope_reference,
        lambda problem, device: tuple(problem.make(device).values()),
        RMSNormRoPEInput,
        "BATCHxSEQUENCExHIDDENxHEAD",
    )


def _gated_mlp_target() -> Target:
    return Target(
        _tuned_gated_mlp,
        GATED_MLP_CONFIGS,
        _gated_mlp_reference,
        lambda problem, device: tuple(problem.make(device).values())[:3],
        lambda rows, hidden, intermediate: GatedMLPInput(1, rows, hidden, intermediate),
        "ROWSxHIDDENxINTERMEDIATE",
        accumulators=2,
    )


def _fp8_gemm_target() -> Target:
    return Target(_tuned_fp8_gemm, FP8_GEMM_CONFIGS, _fp8_reference, _fp8_arguments, FP8GEMMInput)


# name -> makes the target; scripts add their own
TARGETS: dict[str, Callable[[], Target]] = {
    "convolution": _convolution_target,
    "fp8_gemm": _fp8_gemm_target,
    "gated_mlp": _gated_mlp_target,
    "rmsnorm_rope": _rmsnorm_rope_target,
}


def get_target(name: str) -> Target:
    """The target ``name``: "fp8_gemm" is the product of many rows, "convolution" the portable
    kernel with bias and ReLU in NHWC; "rmsnorm_rope" and "gated_mlp" are what the library functions
    launch.

    Raises:
        SchemeError: unknown name.
    """
    if name not in TARGETS:
        raise SchemeError(f"target={name!r}: expected one of {', '.join(TARGETS)}")
    return TARGETS[name]()
