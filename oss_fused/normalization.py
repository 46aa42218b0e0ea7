# SPDX-License-Identifier: MIT
"""Softmax and LayerNorm as functions, differentiable: PyTorch's backward, the kernels' forward."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

import oss_fused.kernels  # noqa: F401  (registers the operators)
from oss_fused.autograd import needs_grad, once_differentiable
from oss_fused.kernels.op import check_arguments
from oss_fused.kernels.random_mask import keep_mask

_ops = torch.ops.oss_fused


def softmax(x: torch.Tensor, *, method: str = "two_pass") -> torch.Tensor:
    """``e^(x - max) / sum`` over the last dimension, in float32, rounded once.

    Args:
        x: [..., N] bfloat16, float16 or float32; any N.
        method: "two_pass" (maximum, then exponentials and sum) or "online" (running maximum and
            sum, Milakov and Gimelshein 2018), which reads rows beyond 32768 values once less.

    Returns:
        [..., N] in x.dtype. A row that holds NaN or +Inf, or nothing but -Inf, is NaN.

    Raises:
        ShapeMismatchError: ``x`` has no dimension.
        UnsupportedDtypeError: dtype of ``x``.
        SchemeError: unknown ``method``.
    """
    check_arguments("softmax", x, method)
    return Softmax.apply(x, method) if needs_grad(x) else _ops.softmax(x, method)


class Softmax(torch.autograd.Function):
    """``oss_fused::softmax`` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, method: str) -> torch.Tensor:
        """Run the kernel and keep its result."""
        y = _ops.softmax(x, method)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``y * (grad - sum(grad * y))``."""
        (y,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype), None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    method: str = "two_pass",
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per row (Ba, Kiros and Hinton 2016).

    Args:
        x: [..., H] bfloat16, float16 or float32.
        weight: [H], or None for 1.
        bias: [H], or None for 0.
        eps: added to the population variance.
        method: "two_pass" (mean, then variance) or "welford" (both in one pass over tiles).

    Returns:
        [..., H] in x.dtype, computed in float32. A row with NaN or Inf is NaN.
        Gradients are once differentiable: a second derivative raises RuntimeError.

    Raises:
        ShapeMismatchError: the shapes do not fit, or H is 0.
        UnsupportedDtypeError: a dtype.
        UnsupportedDeviceError: tensors on different devices.
        SchemeError: ``eps`` is negative or not finite, or ``method`` unknown.
    """
    check_arguments("layer_norm", x, weight, bias, eps, method)
    if needs_grad(x, weight, bias):
        return LayerNorm.apply(x, weight, bias, eps, method)
    return _ops.layer_norm(x, weight, bias, eps, method)


def layer_norm_stats(
    x: torch.Tensor, *, method: str = "two_pass"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population variance of each row, as LayerNorm takes them; not differentiable.

    Args:
        x: [..., H] bfloat16, float16 or float32.
        method: as in layer_norm.

    Returns:
        mean: float32 [...].
        var: float32 [...].

    Raises:
        ShapeMismatchError: H is 0.
        UnsupportedDtypeError: dtype of ``x``.
        SchemeError: unknown ``method``.
    """
    return _ops.layer_norm_stats(x.detach(), method)


def layer_norm_dropout(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float,
    seed: int,
) -> torch.Tensor:
    """LayerNorm and dropout in one kernel.

    The mask is a function of ``seed`` and position: backward repeats it, and so does another call.
    Gradients are once differentiable, as those of layer_norm.

    Args:
        x: as in layer_norm, as are weight, bias and eps.
        weight: [H], or None.
        bias: [H], or None.
        eps: added to the population variance.
        p: probability that an element becomes 0, in [0, 1); the others are divided by 1 - p.
        seed: any 64-bit integer.

    Raises:
        SchemeError: ``p`` is outside [0, 1). Else as in layer_norm.
    """
    check_arguments("layer_norm_dropout", x, weight, bias, eps, p, seed)
    if needs_grad(x, weight, bias):
        return LayerNorm.apply(x, weight, bias, eps, "two_pass", p, seed)
    return _ops.layer_norm_dropout(x, weight, bias, eps, p, seed)


class LayerNorm(torch.autograd.Function):
    """``oss_fused::layer_norm``, or the one with dropout, with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        method: str,
        p: float = 0.0,
        seed: int = 0,
    ) -> torch.Tensor:
        """Run the kernel and keep its inputs."""
        ctx.save_for_backward(x, weight, bias)
        ctx.options = (eps, p, seed)
        if p:
            return _ops.layer_norm_dropout(x, weight, bias, eps, p, seed)
        return _ops.layer_norm(x, weight, bias, eps, method)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weight and bias, by PyTorch's LayerNorm."""
        eps, p, seed = ctx.options
        x = ctx.saved_tensors[0]
        if p:
            rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
            columns = torch.arange(x.shape[-1], device=x.device)
            grad = grad * keep_mask(seed, rows, columns, p) / (1 - p)
        # PyTorch wants one dtype; the casts have gradients of their own
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            weight, bias = (None if t is None else t.to(x.dtype) for t in leaves[1:])
            y = F.layer_norm(cast(torch.Tensor, leaves[0]), x.shape[-1:], weight, bias, eps)
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(y, wanted, grad))
        return (*(None if t is None else next(found) for t in leaves), None, None, None, None)
