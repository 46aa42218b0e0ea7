# SPDX-License-Identifier: MIT
"""Checks shared by launchers and references: the errors name the argument and its value."""

from __future__ import annotations

import torch

from oss_fused.errors import (
    SchemeError,
    ShapeMismatchError,
    UnsupportedDeviceError,
    UnsupportedDtypeError,
)

FP8 = torch.float8_e4m3fn
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STRATEGIES = ("tensor", "token", "channel")


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedDtypeError unless ``tensor`` has one of the ``allowed`` dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise UnsupportedDtypeError(f"{name}.dtype={tensor.dtype}: expected one of {names}")


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise UnsupportedDtypeError unless ``dtype`` is a floating output dtype."""
    if dtype not in FLOAT_DTYPES:
        raise UnsupportedDtypeError(f"out_dtype={dtype}: expected bfloat16, float16 or float32")


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ShapeMismatchError unless ``tensor.shape == expected``."""
    if tuple(tensor.shape) != expected:
        raise ShapeMismatchError(f"{name}.shape={tuple(tensor.shape)}: expected {expected}")


def check_same_device(reference: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedDeviceError unless every tensor lies on ``reference``'s device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            raise UnsupportedDeviceError(
                f"{name}.device={tensor.device}: expected {reference.device}, as the first argument"
            )


def check_scale(name: str, scale: torch.Tensor, rows: int) -> None:
    """Raise unless ``scale`` is float32 with one element or shape ``[rows, 1]``."""
    check_dtype(name, scale, (torch.float32,))
    if scale.numel() != 1 and tuple(scale.shape) != (rows, 1):
        raise ShapeMismatchError(
            f"{name}.shape={tuple(scale.shape)}: expected one element or ({rows}, 1)"
        )


def check_strategy(strategy: str) -> None:
    """Raise SchemeError for an unknown quantisation strategy."""
    if strategy not in STRATEGIES:
        raise SchemeError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}")


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Check the operands of ``fp8_gemm``: a [M, K], b [N, K], scales, bias [N]."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [N, K]"
        )
    check_dtype("a", a, (FP8,))
    check_dtype("b", b, (FP8,) if b.is_cuda else (FP8, torch.float32))
    check_scale("a_scale", a_scale, a.shape[0])
    check_scale("b_scale", b_scale, b.shape[0])
    if bias is not None:
        check_dtype("bias", bias, FLOAT_DTYPES)
        check_shape("bias", bias, (b.shape[0],))
    check_same_device(a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)


def check_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    """Check the arguments of ``add_rms_norm_quant``."""
    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("weight", weight, FLOAT_DTYPES)
    check_shape("weight", weight, (x.shape[-1],))
    if residual is not None:
        check_dtype("residual", residual, (x.dtype,))
        check_shape("residual", residual, tuple(x.shape))
    if scale is not None:
        check_scale("scale", scale, 1)
    check_same_device(x, residual=residual, weight=weight, scale=scale)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as [rows, last dim] with unit stride along the last; copies only if it must."""
    if x.dim() == 0:
        x = x.reshape(1)
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
