# SPDX-License-Identifier: MIT
"""Checks of one property each; the errors name the argument, its value and what was expected."""

from __future__ import annotations

from typing import Any

import torch

from oss_fused.errors import (
    BackendUnavailableError,
    SchemeError,
    ShapeMismatchError,
    UnsupportedDeviceError,
    UnsupportedDtypeError,
)

FP8 = torch.float8_e4m3fn
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_DTYPES = (torch.int32, torch.int64)

STRATEGIES = ("tensor", "token", "channel")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SIDES = ("up", "gate")
ON_OVERFLOW = ("adjust", "saturate", "raise")


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedDtypeError unless ``tensor`` has one of the ``allowed`` dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(shown(dtype) for dtype in allowed)
        raise UnsupportedDtypeError(f"{name}.dtype={tensor.dtype}: expected one of {names}")


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ShapeMismatchError unless ``tensor.shape == expected``."""
    if tuple(tensor.shape) != expected:
        raise ShapeMismatchError(f"{name}.shape={tuple(tensor.shape)}: expected {expected}")


def check_on_device(device: torch.device, name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedDeviceError unless ``tensor`` lies on ``device``."""
    if tensor.device != device:
        raise UnsupportedDeviceError(
            f"{name}.device={tensor.device}: expected {device}, as the first argument"
        )


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [rows, last dim]; either may be 0, and no graph is tied to the number of rows."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as [rows, last dim] with unit stride along the last; copies only if it must."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    if x.dim() == 0:
        x = x.reshape(1)
    rows = flat_rows(x)
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def has_aligned_rows(rows: torch.Tensor) -> bool:
    """Whether 16-byte loads and tensor descriptors can address ``rows`` [M, K].

    An expanded row has a stride of 0, which no descriptor takes.
    """
    step = rows.stride(0) * rows.element_size()
    return rows.stride(1) == 1 and step > 0 and step % 16 == 0 and rows.data_ptr() % 16 == 0


def shown(value: Any) -> str:
    """``value`` as text, dtypes as TileLang names them too: "bfloat16" for torch.bfloat16."""
    return str(value).removeprefix("torch.")


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise UnsupportedDtypeError unless ``dtype`` is a floating output dtype."""
    if dtype not in FLOAT_DTYPES:
        raise UnsupportedDtypeError(f"out_dtype={dtype}: expected bfloat16, float16 or float32")


def check_same_device(reference: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedDeviceError unless every tensor lies on ``reference``'s device."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_on_device(reference.device, name, tensor)


def check_scale(name: str, scale: torch.Tensor, rows: int) -> None:
    """Raise unless ``scale`` is float32 with one element or shape ``[rows, 1]``."""
    check_dtype(name, scale, (torch.float32,))
    if scale.numel() != 1 and tuple(scale.shape) != (rows, 1):
        raise ShapeMismatchError(
            f"{name}.shape={tuple(scale.shape)}: expected one element or ({rows}, 1)"
        )


def check_sizes(least: int, **sizes: int) -> None:
    """Raise ShapeMismatchError unless every size is an integer of at least ``least``."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < least:
            raise ShapeMismatchError(f"{name}={size!r}: expected an integer of at least {least}")


def check_device(device: str | torch.device) -> torch.device:
    """The device to run on: a CPU, or a GPU that this machine has.

    Raises:
        UnsupportedDeviceError: no such device.
        BackendUnavailableError: a GPU is asked for, and none is usable here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UnsupportedDeviceError(f"device={str(device)!r}: expected 'cpu', 'cuda' or 'cuda:N'")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"device={str(device)!r}: no NVIDIA GPU is usable here; expected 'cpu'"
            )
        if (found.index or 0) >= torch.cuda.device_count():
            raise UnsupportedDeviceError(
                f"device={str(device)!r}: expected an index below {torch.cuda.device_count()}"
            )
    return found


def check_eps(eps: float, name: str = "eps") -> None:
    """Raise SchemeError unless ``eps`` is a number that may be added to a mean square."""
    if not isinstance(eps, int | float) or not 0 <= eps < float("inf"):
        raise SchemeError(f"{name}={eps!r}: expected a finite number of at least 0")


def check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Check the operands of the library's fp8_gemm: a [M, K], b [K, N], FP8 or floating."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [K, N]"
        )
    if not b.numel():
        raise ShapeMismatchError(f"b.shape={tuple(b.shape)}: expected [K, N] of at least (1, 1)")
    check_dtype("a", a, (FP8, *FLOAT_DTYPES))
    check_dtype("b", b, (FP8, *FLOAT_DTYPES))
    for name, scale, size in (("a_scale", a_scale, a.shape[0]), ("b_scale", b_scale, b.shape[1])):
        if scale is None:
            continue
        check_dtype(name, scale, (torch.float32,))
        if scale.numel() != 1 and tuple(scale.shape) not in ((size,), (size, 1), (1, size)):
            raise ShapeMismatchError(
                f"{name}.shape={tuple(scale.shape)}: expected one element or ({size}, 1)"
            )
    if bias is not None:
        check_dtype("bias", bias, FLOAT_DTYPES)
        check_shape("bias", bias, (b.shape[1],))
    check_same_device(a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise SchemeError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise SchemeError(f"{name}={value!r}: expected one of {', '.join(choices)}")
