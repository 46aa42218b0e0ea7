# SPDX-License-Identifier: MIT
"""What the library functions take: shapes and dtypes as data, and the checks of their arguments.

``validate_*`` make the checks that the functions make, and raise what these raise. The data classes
describe a problem without holding tensors: the tuner, the benchmark suite and the roofline use
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDeviceError, UnsupportedDtypeError
from oss_fused.kernels.checks import (
    ACTIVATIONS,
    FP8,
    check_choice,
    check_out_dtype,
    check_product,
    check_sizes,
    shown,
)
from oss_fused.kernels.op import check_arguments
from oss_fused.kernels.scale_values import check_scale_values


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
                f"{name}.dtype={tensor.dtype}: expected {shown(self.dtype)}"
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
        check_sizes(0, batch_size=self.batch_size, seq_len=self.seq_len)
        check_sizes(1, hidden_dim=self.hidden_dim, head_dim=self.head_dim)
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
        check_sizes(0, batch_size=self.batch_size, seq_len=self.seq_len)
        check_sizes(1, hidden_dim=self.hidden_dim, intermediate_dim=self.intermediate_dim)
        check_choice("activation", self.activation, ACTIVATIONS)

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
        check_sizes(0, m=self.m)
        check_sizes(1, n=self.n, k=self.k)
        check_out_dtype(self.out_dtype)

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


def validate_rmsnorm_rope_inputs(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> RMSNormRoPEInput:
    """Check x [B, S, H], weight [H], cos and sin [S, head_dim]; return the problem they make.

    Raises:
        OssFusedError: what ``fused_rmsnorm_rope`` raises for these arguments.
    """
    check_arguments("rmsnorm_rope", x, weight, cos, sin)
    batch_size, seq_len, hidden_dim = x.shape
    return RMSNormRoPEInput(batch_size, seq_len, hidden_dim, cos.shape[1], x.dtype)


def validate_gated_mlp_inputs(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str = "silu",
    *,
    activation_on: str = "up",
    gate_scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> GatedMLPInput:
    """Check x [..., H] and the weights [I, H]; return the problem they make.

    Raises:
        OssFusedError: what ``fused_gated_mlp`` raises for these arguments.
    """
    options = (activation, activation_on)
    check_arguments("gated_mlp", x, gate_weight, up_weight, gate_scale, up_scale, *options)
    check_scale_values("gate_scale", gate_scale)
    check_scale_values("up_scale", up_scale)
    rows, intermediate_dim = x.shape[:-1], gate_weight.shape[0]
    sequence = rows[-1] if rows else 1
    return GatedMLPInput(
        rows[:-1].numel(), sequence, x.shape[-1], intermediate_dim, activation, x.dtype
    )


def validate_fp8_gemm_inputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
) -> FP8GEMMInput:
    """Check a [M, K], b [K, N] (FP8 or floating) and their scales; return the problem.

    Raises:
        OssFusedError: what ``fp8_gemm`` raises for these arguments.
    """
    check_product(a, b, a_scale, b_scale)
    check_scale_values("a_scale", a_scale)
    check_scale_values("b_scale", b_scale)
    floating = [t.dtype for t in (a, b) if t.dtype != FP8]
    out_dtype = floating[0] if floating else torch.bfloat16
    return FP8GEMMInput(a.shape[0], b.shape[1], a.shape[1], out_dtype=out_dtype)
