# SPDX-License-Identifier: MIT
"""What the library functions take: shapes and dtypes as data, and the checks of their arguments.

``validate_*`` check tensors and raise the exceptions of errors.py. The data classes describe a
problem without holding tensors: the tuner, the benchmark suite and the roofline use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDeviceError, UnsupportedDtypeError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
FP8 = torch.float8_e4m3fn


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor; -1 in ``shape`` stands for any size.

    Raises:
        ShapeMismatchError: a dimension below -1.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    contiguous: bool = False

    def __post_init__(self) -> None:
        """Reject impossible shapes at construction."""
        if any(size < -1 for size in self.shape):
            raise ShapeMismatchError(f"shape={self.shape}: expected sizes >= 0, or -1 for any size")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of an existing tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.is_contiguous())

    @property
    def num_elements(self) -> int:
        """Product of the sizes.

        Raises:
            ShapeMismatchError: a size is unknown (-1).
        """
        if -1 in self.shape:
            raise ShapeMismatchError(f"shape={self.shape}: a size is unknown (-1)")
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this spec."""
        return self.num_elements * self.dtype.itemsize

    def validate(self, name: str, tensor: torch.Tensor) -> None:
        """Raise the matching error of errors.py unless ``tensor`` fits this spec.

        Raises:
            ShapeMismatchError: rank, a size, or contiguity.
            UnsupportedDtypeError: dtype.
            UnsupportedDeviceError: device type.
        """
        fits = len(self.shape) == tensor.dim() and all(
            want in (-1, have) for want, have in zip(self.shape, tensor.shape, strict=True)
        )
        if not fits:
            raise ShapeMismatchError(f"{name}.shape={tuple(tensor.shape)}: expected {self.shape}")
        if tensor.dtype != self.dtype:
            raise UnsupportedDtypeError(
                f"{name}.dtype={tensor.dtype}: expected {_dtype_name(self.dtype)}"
            )
        if tensor.device.type != torch.device(self.device).type:
            raise UnsupportedDeviceError(f"{name}.device={tensor.device}: expected {self.device}")
        if self.contiguous and not tensor.is_contiguous():
            raise ShapeMismatchError(f"{name}.stride={tensor.stride()}: expected contiguous")

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this spec."""
        if -1 in self.shape:
            raise ShapeMismatchError(f"shape={self.shape}: a size is unknown (-1)")
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _at_least(least: int, owner: object, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise ShapeMismatchError(
                f"{type(owner).__name__}.{name}={size}: expected at least {least}"
            )


@dataclass(frozen=True)
class RMSNormRoPEInput:
    """A problem of ``fused_rmsnorm_rope``: x [batch_size, seq_len, hidden_dim].

    ``flops`` counts 4 per element for the norm and 3 for the rotation; ``num_bytes`` is what an
    ideal kernel moves: x in, the result out, weight, cos and sin once.
    """

    batch_size: int
    seq_len: int
    hidden_dim: int
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check sizes: hidden_dim is a multiple of head_dim, head_dim is even."""
        _at_least(0, self, batch_size=self.batch_size, seq_len=self.seq_len)
        _at_least(1, self, hidden_dim=self.hidden_dim, head_dim=self.head_dim)
        if self.head_dim % 2 or self.hidden_dim % self.head_dim:
            raise ShapeMismatchError(
                f"head_dim={self.head_dim}: expected an even divisor of "
                f"hidden_dim={self.hidden_dim}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that key a tuning result."""
        return (self.batch_size, self.seq_len, self.hidden_dim, self.head_dim)

    @property
    def flops(self) -> int:
        """Floating point operations."""
        return 7 * self.batch_size * self.seq_len * self.hidden_dim

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        rows = self.batch_size * self.seq_len
        elements = 2 * rows * self.hidden_dim + self.hidden_dim + 2 * self.seq_len * self.head_dim
        return elements * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded arguments of ``fused_rmsnorm_rope`` for this problem."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.batch_size, self.seq_len, self.hidden_dim, generator=generator)
        weight = 1 + 0.1 * torch.randn(self.hidden_dim, generator=generator)
        half = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.outer(torch.arange(self.seq_len).float(), 10000.0**-half)
        angles = torch.cat((angles, angles), dim=-1)
        tensors = {"x": x, "weight": weight, "cos": angles.cos(), "sin": angles.sin()}
        return {name: t.to(self.dtype).to(device) for name, t in tensors.items()}


@dataclass(frozen=True)
class GatedMLPInput:
    """A problem of ``fused_gated_mlp``: x [batch_size, seq_len, hidden_dim], weights [I, H]."""

    batch_size: int
    seq_len: int
    hidden_dim: int
    intermediate_dim: int
    activation: str = "silu"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Check sizes and activation."""
        _at_least(0, self, batch_size=self.batch_size, seq_len=self.seq_len)
        _at_least(1, self, hidden_dim=self.hidden_dim, intermediate_dim=self.intermediate_dim)
        _check_activation(self.activation)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that key a tuning result."""
        return (self.batch_size * self.seq_len, self.hidden_dim, self.intermediate_dim)

    @property
    def flops(self) -> int:
        """Floating point operations of the two products."""
        return 4 * self.batch_size * self.seq_len * self.hidden_dim * self.intermediate_dim

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves."""
        rows = self.batch_size * self.seq_len
        elements = (
            rows * self.hidden_dim
            + 2 * self.hidden_dim * self.intermediate_dim
            + rows * self.intermediate_dim
        )
        return elements * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded arguments of ``fused_gated_mlp`` for this problem."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.intermediate_dim, self.hidden_dim)
        spread = self.hidden_dim**-0.5
        x = torch.randn(self.batch_size, self.seq_len, self.hidden_dim, generator=generator)
        gate = spread * torch.randn(shape, generator=generator)
        up = spread * torch.randn(shape, generator=generator)
        tensors = {"x": x, "gate_weight": gate, "up_weight": up}
        arguments: dict[str, Any] = {
            name: t.to(self.dtype).to(device) for name, t in tensors.items()
        }
        return {**arguments, "activation": self.activation}


@dataclass(frozen=True)
class FP8GEMMInput:
    """A problem of ``fp8_gemm``: a [m, k] times b [k, n]; scales per tensor or per channel."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Check sizes and output dtype."""
        _at_least(0, self, m=self.m)
        _at_least(1, self, n=self.n, k=self.k)
        if self.out_dtype not in GEMM_DTYPES:
            raise UnsupportedDtypeError(
                f"out_dtype={self.out_dtype}: expected bfloat16, float16 or float32"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that key a tuning result."""
        return (self.m, self.n, self.k)

    @property
    def flops(self) -> int:
        """Floating point operations."""
        return 2 * self.m * self.n * self.k

    @property
    def num_bytes(self) -> int:
        """Bytes an ideal kernel moves: FP8 operands, scales, the result."""
        operands = self.m * self.k + self.k * self.n
        return operands + 4 * (self.m + self.n) + self.m * self.n * self.out_dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded ``a`` [m, k] and ``b`` [k, n] (the view of a row-major weight) in out_dtype."""
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(self.m, self.k, generator=generator)
        b = self.k**-0.5 * torch.randn(self.n, self.k, generator=generator)
        return {
            "a": a.to(self.out_dtype).to(device),
            "b": b.to(self.out_dtype).to(device).t(),
        }


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")


def _check_float(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        expected = ", ".join(_dtype_name(dtype) for dtype in allowed)
        raise UnsupportedDtypeError(f"{name}.dtype={tensor.dtype}: expected one of {expected}")


def _check_devices(first: torch.Tensor, **others: torch.Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise UnsupportedDeviceError(
                f"{name}.device={tensor.device}: expected {first.device}, as the first argument"
            )


def validate_rmsnorm_rope_inputs(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> RMSNormRoPEInput:
    """Check x [B, S, H], weight [H], cos and sin [S, head_dim]; return the problem they make.

    Raises:
        ShapeMismatchError: a shape, or H not a multiple of an even head_dim.
        UnsupportedDtypeError: not a floating dtype.
        UnsupportedDeviceError: tensors on different devices.
    """
    if x.dim() != 3:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected [B, S, H]")
    batch_size, seq_len, hidden_dim = x.shape
    if tuple(weight.shape) != (hidden_dim,):
        raise ShapeMismatchError(f"weight.shape={tuple(weight.shape)}: expected ({hidden_dim},)")
    if cos.dim() != 2 or cos.shape[0] != seq_len:
        raise ShapeMismatchError(f"cos.shape={tuple(cos.shape)}: expected [S={seq_len}, head_dim]")
    if sin.shape != cos.shape:
        raise ShapeMismatchError(
            f"sin.shape={tuple(sin.shape)}: expected {tuple(cos.shape)}, as cos"
        )
    for name, tensor in {"x": x, "weight": weight, "cos": cos, "sin": sin}.items():
        _check_float(name, tensor, FLOAT_DTYPES)
    _check_devices(x, weight=weight, cos=cos, sin=sin)
    return RMSNormRoPEInput(batch_size, seq_len, hidden_dim, cos.shape[1], x.dtype)


def validate_gated_mlp_inputs(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str = "silu",
) -> GatedMLPInput:
    """Check x [..., H] and the weights [I, H] of one dtype; return the problem they make.

    Raises:
        ShapeMismatchError: a shape.
        UnsupportedDtypeError: not floating, or the dtypes differ.
        UnsupportedDeviceError: tensors on different devices.
        ValueError: unknown ``activation``.
    """
    if x.dim() < 2:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected [..., rows, H]")
    hidden_dim = x.shape[-1]
    if gate_weight.dim() != 2 or gate_weight.shape[1] != hidden_dim:
        raise ShapeMismatchError(
            f"gate_weight.shape={tuple(gate_weight.shape)}: expected [I, H={hidden_dim}]"
        )
    if up_weight.shape != gate_weight.shape:
        raise ShapeMismatchError(
            f"up_weight.shape={tuple(up_weight.shape)}: expected {tuple(gate_weight.shape)}, "
            "as gate_weight"
        )
    _check_float("x", x, FLOAT_DTYPES)
    _check_float("gate_weight", gate_weight, (x.dtype,))
    _check_float("up_weight", up_weight, (x.dtype,))
    _check_devices(x, gate_weight=gate_weight, up_weight=up_weight)
    _check_activation(activation)
    return GatedMLPInput(
        x.shape[:-2].numel(), x.shape[-2], hidden_dim, gate_weight.shape[0], activation, x.dtype
    )


def validate_fp8_gemm_inputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
) -> FP8GEMMInput:
    """Check a [M, K], b [K, N] (FP8 or floating) and their scales; return the problem.

    Raises:
        ShapeMismatchError: a shape, or a scale that fits neither tensor nor channel.
        UnsupportedDtypeError: an operand's dtype, or a scale that is not float32.
        UnsupportedDeviceError: tensors on different devices.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ShapeMismatchError(
            f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: expected [M, K] and [K, N]"
        )
    for name, tensor in {"a": a, "b": b}.items():
        _check_float(name, tensor, (FP8, *GEMM_DTYPES))
    for name, scale, size in (("a_scale", a_scale, a.shape[0]), ("b_scale", b_scale, b.shape[1])):
        if scale is None:
            continue
        _check_float(name, scale, (torch.float32,))
        if scale.numel() not in (1, size):
            raise ShapeMismatchError(
                f"{name}.shape={tuple(scale.shape)}: expected one element or {size}"
            )
        _check_devices(a, **{name: scale})
    _check_devices(a, b=b)
    floating = [t.dtype for t in (a, b) if t.dtype != FP8]
    out_dtype = floating[0] if floating else torch.bfloat16
    return FP8GEMMInput(a.shape[0], b.shape[1], a.shape[1], out_dtype=out_dtype)
