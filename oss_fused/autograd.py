# SPDX-License-Identifier: MIT
"""Analytic backward of the library's functions, used only where an input requires grad.

What is fused forward is fused backward (kernels/mlp): in Triton on a GPU, in the reference
elsewhere. Plain products are cuBLAS's, in the inputs' dtype with float32 accumulation. FP8
quantisation counts as the identity (straight-through): ``fp8_gemm`` differentiates the product of
its unquantised operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  (registers the operators)

_ops = torch.ops.oss_fused


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has to see this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def gated_mlp_gradients(
    d_gate: torch.Tensor,
    d_up: torch.Tensor,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    needs: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x [..., H] and the weights [I, H] from those of the projections [rows, I].

    Args:
        d_gate: gradient of ``x @ gate_weight.T``.
        d_up: gradient of ``x @ up_weight.T``.
        x: input of the forward pass.
        gate_weight: likewise.
        up_weight: likewise.
        needs: which of the three to compute; None stands for the others.
    """
    rows = x.reshape(-1, x.shape[-1])
    dx = torch.addmm(d_gate @ gate_weight, d_up, up_weight) if needs[0] else None
    return (
        None if dx is None else dx.reshape(x.shape),
        d_gate.t() @ rows if needs[1] else None,
        d_up.t() @ rows if needs[2] else None,
    )


class _Constant(torch.autograd.Function):
    """A gradient as it is, which refuses to be differentiated by the tensors it was made of."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        """Connect ``gradient`` to its ``sources``."""
        return gradient

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raise RuntimeError."""
        raise RuntimeError("a gradient of oss_fused was differentiated: expected one derivative")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` of a Function that is no differentiable code: a second derivative raises.

    PyTorch's decorator of this name raises only where the incoming gradient has a gradient and
    ``Tensor.backward`` runs. What else a penalty on gradients depends on would count as constant.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if t is None else _Constant.apply(t, *sources) for t in found)

    return call


class RMSNormRoPE(torch.autograd.Function):
    """``oss_fused::rmsnorm_rope`` with gradients for x and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Run the fused kernel and keep its inputs."""
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return _ops.rmsnorm_rope(x, weight, cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and weight; cos and sin are constants of the position."""
        x, weight, cos, sin = ctx.saved_tensors
        dx, dw = _ops.rmsnorm_rope_backward(grad, x, weight, cos, sin, ctx.eps)
        return dx, dw, None, None, None


class GatedMLP(torch.autograd.Function):
    """``oss_fused::gated_mlp`` with gradients for x and both weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        activation: str,
        activation_on: str,
        product: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the fused kernel, unless its ``product`` is there, and keep its inputs."""
        ctx.save_for_backward(x, gate_weight, up_weight)
        ctx.options = (activation, activation_on)
        if product is not None:
            return product
        return _ops.gated_mlp(x, gate_weight, up_weight, None, None, activation, activation_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the weights."""
        x, gate_weight, up_weight = ctx.saved_tensors
        d_gate, d_up = _ops.gated_mlp_backward(grad, x, gate_weight, up_weight, *ctx.options)
        needs = ctx.needs_input_grad[:3]
        found = gated_mlp_gradients(d_gate, d_up, x, gate_weight, up_weight, needs)
        return (*found, None, None, None)


class FP8Product(torch.autograd.Function):
    """A quantised product whose backward is that of ``a @ b + bias`` in the operands' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        product: torch.Tensor,
    ) -> torch.Tensor:
        """Give the precomputed ``product`` [M, N] its place in the graph of a [M, K], b [K, N]."""
        ctx.save_for_backward(a, b)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """``grad @ b.T``, ``a.T @ grad`` and the column sums."""
        a, b = ctx.saved_tensors
        da = (grad.to(b.dtype) @ b.t()).to(a.dtype) if ctx.needs_input_grad[0] else None
        db = (a.t() @ grad.to(a.dtype)).to(b.dtype) if ctx.needs_input_grad[1] else None
        d_bias = grad.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return da, db, d_bias, None
