# SPDX-License-Identifier: MIT
"""Problems of the operators beyond the first three: sizes, bytes, inputs and their own oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from oss_fused.kernels.checks import check_sizes

_CHECK_ROWS = 5


class OperatorProblem(ABC):
    """What the suite, the verifier and the roofline ask of a problem."""

    dtype: torch.dtype
    # argument that the verifier changes: small, large, zeros, ones, NaN
    varied = "x"
    # factor of the "small" case
    small_factor = 2.0**-4
    # whether one Inf gives a pattern that the formula fixes
    takes_inf = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The sizes."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating point operations."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that an ideal kernel moves."""

    @abstractmethod
    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded keyword arguments of the function."""

    @abstractmethod
    def oracle(self, wide: Mapping[str, Any]) -> torch.Tensor:
        """The formula of float64 arguments; shares no code with the kernels."""

    @abstractmethod
    def small(self) -> Self:
        """The same kind of problem at a size whose oracle takes milliseconds."""

    def label(self) -> str:
        """Short text of the sizes and options."""
        return "x".join(str(size) for size in self.shape)


@dataclass(frozen=True)
class _Rows(OperatorProblem):
    """A problem over x [rows, columns]."""

    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16

    takes_inf = True
    # operations an element
    _cost = 5

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_sizes(1, rows=self.rows, columns=self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return (self.rows, self.columns)

    @property
    def flops(self) -> int:
        """Floating point operations, an exponential counted as one."""
        return self._cost * self.rows * self.columns

    @property
    def num_bytes(self) -> int:
        """x read once, the result written once."""
        return 2 * self.rows * self.columns * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded x."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.columns, generator=generator)
        return {"x": x.to(self.dtype).to(device)}

    def small(self) -> Self:
        """The row's length decides the kernel: keep it."""
        return replace(self, rows=min(self.rows, _CHECK_ROWS))


@dataclass(frozen=True)
class SoftmaxInput(_Rows):
    """A problem of ``softmax``: x [rows, columns]."""

    def oracle(self, wide: Mapping[str, Any]) -> torch.Tensor:
        """e^(x - max) / sum."""
        weights = torch.exp(wide["x"] - wide["x"].amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class LayerNormInput(_Rows):
    """A problem of ``layer_norm``: x [rows, columns], weight and bias [columns]."""

    _cost = 8
    # small enough for eps to matter
    small_factor = 2.0**-10

    @property
    def num_bytes(self) -> int:
        """x, weight and bias read once, the result written once."""
        return super().num_bytes + 2 * self.columns * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded x, weight and bias."""
        generator = torch.Generator().manual_seed(seed + 1)
        weight = 1 + 0.1 * torch.randn(self.columns, generator=generator)
        bias = torch.randn(self.columns, generator=generator)
        pair = {"weight": weight, "bias": bias}
        rest = {name: t.to(self.dtype).to(device) for name, t in pair.items()}
        return super().make(device, seed) | rest

    def oracle(self, wide: Mapping[str, Any]) -> torch.Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias."""
        rest = wide["x"] - wide["x"].mean(-1, keepdim=True)
        spread = torch.sqrt((rest * rest).mean(-1, keepdim=True) + 1e-5)
        return rest / spread * wide["weight"] + wide["bias"]
