# SPDX-License-Identifier: MIT
"""Checks shared by launchers and references: the errors name the argument and its value."""

from __future__ import annotations

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
STRATEGIES = ("tensor", "token", "channel")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SIDES = ("up", "gate")
ON_OVERFLOW = ("adjust", "saturate", "raise")


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
    check_choice("strategy", strategy, STRATEGIES)


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


def check_eps(eps: float) -> None:
    """Raise SchemeError unless ``eps`` is a number that may be added to a mean square."""
    if not isinstance(eps, int | float) or not 0 <= eps < float("inf"):
        raise SchemeError(f"eps={eps!r}: expected a finite number of at least 0")


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


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Check the operands of ``fp8_linear``: x [..., K], weight [N, K], scales, bias [N]."""
    check_dtype("x", x, FLOAT_DTYPES)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected [..., K] of weight [N, K] {tuple(weight.shape)}"
        )
    check_scale("weight_scale", weight_scale, weight.shape[0])
    if input_scale is not None:
        check_scale("input_scale", input_scale, x.shape[:-1].numel())
    if bias is not None:
        check_dtype("bias", bias, FLOAT_DTYPES)
        check_shape("bias", bias, (weight.shape[0],))
    check_same_device(
        x, weight=weight, weight_scale=weight_scale, input_scale=input_scale, bias=bias
    )


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
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    if x.dim() == 0:
        x = x.reshape(1)
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise SchemeError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise SchemeError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def check_act_quant(x: torch.Tensor, activation: str, scale: torch.Tensor | None) -> None:
    """Check the arguments of ``act_mul_quant``."""
    check_dtype("x", x, FLOAT_DTYPES)
    check_choice("activation", activation, ACTIVATIONS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected [..., 2 * intermediate]")
    if scale is not None:
        check_scale("scale", scale, 1)
    check_same_device(x, scale=scale)


def check_gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
) -> None:
    """Check the arguments of ``gated_mlp``: weights [I, H] in x.dtype, or FP8 with scales."""
    check_dtype("x", x, FLOAT_DTYPES)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("activation_on", activation_on, SIDES)
    fits = gate_weight.dim() == 2 and x.dim() > 0 and gate_weight.shape[1] == x.shape[-1]
    if not fits or not gate_weight.numel():
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}, gate_weight.shape={tuple(gate_weight.shape)}: "
            "expected [..., H] and [I, H], I and H at least 1"
        )
    check_shape("up_weight", up_weight, tuple(gate_weight.shape))
    if (gate_scale is None) != (up_scale is None):
        raise SchemeError("gate_scale and up_scale: expected both, or neither")
    allowed = (x.dtype,) if gate_scale is None else (FP8,)
    check_dtype("gate_weight", gate_weight, allowed)
    check_dtype("up_weight", up_weight, allowed)
    for name, scale in (("gate_scale", gate_scale), ("up_scale", up_scale)):
        if scale is not None:
            check_scale(name, scale, gate_weight.shape[0])
    check_same_device(
        x, gate_weight=gate_weight, up_weight=up_weight, gate_scale=gate_scale, up_scale=up_scale
    )


def check_rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Check the arguments of ``rmsnorm_rope``: x [B, S, H], weight [H], cos and sin [S, D]."""
    for name, tensor in (("x", x), ("weight", weight), ("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, FLOAT_DTYPES)
    if x.dim() != 3 or not x.shape[-1]:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected [batch, sequence, hidden], hidden at least 1"
        )
    check_shape("weight", weight, (x.shape[-1],))
    if cos.dim() != 2 or cos.shape[0] != x.shape[1]:
        raise ShapeMismatchError(f"cos.shape={tuple(cos.shape)}: expected ({x.shape[1]}, head_dim)")
    head_dim = cos.shape[1]
    if head_dim % 2 or head_dim == 0 or x.shape[-1] % head_dim:
        raise ShapeMismatchError(
            f"cos.shape={tuple(cos.shape)}: expected an even head_dim that divides {x.shape[-1]}"
        )
    check_shape("sin", sin, tuple(cos.shape))
    check_same_device(x, weight=weight, cos=cos, sin=sin)


def check_rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Check the arguments of ``rope_kv``: qkv [T, (Hq + 2 Hkv) * D], caches [B, N, Hkv, D]."""
    check_dtype("qkv", qkv, FLOAT_DTYPES)
    if key_cache.dim() != 4 or key_cache.stride(-1) != 1 or value_cache.stride(-1) != 1:
        raise ShapeMismatchError(
            f"key_cache.shape={tuple(key_cache.shape)}: expected [blocks, block_size, kv_heads, "
            "head_dim], contiguous along head_dim"
        )
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_dtype(name, cache, (qkv.dtype, FP8))
    kv_heads, head_dim = key_cache.shape[2:]
    width = (num_heads + 2 * kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width or (qkv.shape[0] and qkv.stride(1) != 1):
        raise ShapeMismatchError(f"qkv.shape={tuple(qkv.shape)}: expected [tokens, {width}]")
    check_shape("positions", positions, (qkv.shape[0],))
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > qkv.shape[0]:
        raise ShapeMismatchError(
            f"slot_mapping.shape={tuple(slot_mapping.shape)}: expected at most {qkv.shape[0]} slots"
        )
    rotary = cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rotary % 2 or rotary > head_dim:
        raise ShapeMismatchError(
            f"cos_sin_cache.shape={tuple(cos_sin_cache.shape)}: expected [positions, rotary_dim], "
            f"rotary_dim even and at most {head_dim}"
        )
    check_same_device(
        qkv,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
