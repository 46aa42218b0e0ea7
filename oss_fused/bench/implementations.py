# SPDX-License-Identifier: MIT
"""What the benchmark suite compares: eager formulas, the library's functions, other backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oss_fused.bench.runner import Implementation, KernelRunner
from oss_fused.errors import BackendUnavailableError
from oss_fused.functional import fp8_gemm, fused_gated_mlp, fused_rmsnorm_rope, quantize_fp8
from oss_fused.kernels.op import get_kernel, operations

_EPS = 1e-6


def implementations(operation: str, backends: tuple[str, ...] = ()) -> dict[str, Implementation]:
    """Name -> function of the keyword arguments that a problem of ``operation`` makes.

    The first is what speed-ups refer to. Each of ``backends`` adds a row named after it where it
    runs the operation here.

    Raises:
        BackendUnavailableError: an unknown backend.
    """
    eager, native = _COMPARED[operation]
    found: dict[str, Implementation] = {"pytorch": eager, "oss_fused": native}
    for backend in backends:
        if operation not in operations(backend):
            continue
        try:
            get_kernel(backend, operation)
        except BackendUnavailableError:
            continue
        found[backend] = _on_backend(operation, KernelRunner(backend))
    return found


def _on_backend(operation: str, runner: KernelRunner) -> Implementation:
    def rmsnorm_rope(
        x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return runner.run("rmsnorm_rope", x, weight, cos, sin, _EPS)

    def gated_mlp(
        x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str
    ) -> torch.Tensor:
        return runner.run("gated_mlp", x, gate_weight, up_weight, None, None, activation, "up")

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        qa, a_scale = quantize_fp8(a, strategy="token")
        qb, b_scale = quantize_fp8(b.t(), strategy="channel")
        return runner.run("fp8_gemm", qa, qb, a_scale, b_scale, None, a.dtype)

    wrappers: dict[str, Implementation] = {
        "rmsnorm_rope": rmsnorm_rope,
        "gated_mlp": gated_mlp,
        "fp8_gemm": product,
    }
    return wrappers[operation]


def _eager_rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + _EPS) * weight.float()
    y = y.view(*x.shape[:2], -1, cos.shape[-1])
    left, right = y.chunk(2, dim=-1)
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    out = y * cos + torch.cat([-right, left], dim=-1) * sin
    return out.view(x.shape).to(x.dtype)


def _eager_gated_mlp(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str
) -> torch.Tensor:
    up = F.linear(x, up_weight)
    if activation == "silu":
        up = F.silu(up)
    else:
        up = F.gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.linear(x, gate_weight) * up


def _eager_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


_COMPARED: dict[str, tuple[Implementation, Implementation]] = {
    "rmsnorm_rope": (_eager_rmsnorm_rope, fused_rmsnorm_rope),
    "gated_mlp": (_eager_gated_mlp, fused_gated_mlp),
    "fp8_gemm": (_eager_product, fp8_gemm),
}
