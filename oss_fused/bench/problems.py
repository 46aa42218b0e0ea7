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


@dataclass(frozen=True)
class ConvolutionInput(OperatorProblem):
    """A problem of ``conv2d_bias_relu``: images [n, ic, size, size], a square window, padded."""

    n: int
    ic: int
    oc: int
    size: int
    window: int = 3
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_sizes(1, n=self.n, ic=self.ic, oc=self.oc, size=self.size, window=self.window)

    @property
    def shape(self) -> tuple[int, ...]:
        """Images, channels in and out, size, window."""
        return (self.n, self.ic, self.oc, self.size, self.window)

    @property
    def out_size(self) -> int:
        """Height and width of the result, of padding window // 2."""
        return self.size + 2 * (self.window // 2) - self.window + 1

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self._result * self.ic * self.window**2

    @property
    def num_bytes(self) -> int:
        """One kernel: x, w and bias read, the result written."""
        return self._operands + (self.oc + self._result) * self.dtype.itemsize

    @property
    def unfused_bytes(self) -> int:
        """Three kernels: x + w + y, then y + bias + y, then y + y."""
        return self._operands + (self.oc + 5 * self._result) * self.dtype.itemsize

    @property
    def expanded_bytes(self) -> int:
        """The buffer of im2col: N * OH * OW * IC * KH * KW values."""
        rows = self.n * self.out_size**2
        return rows * self.ic * self.window**2 * self.dtype.itemsize

    @property
    def saved(self) -> float:
        """Share of the bytes that fusing saves."""
        return 1 - self.num_bytes / self.unfused_bytes

    @property
    def _result(self) -> int:
        return self.n * self.oc * self.out_size**2

    @property
    def _operands(self) -> int:
        weights = self.oc * self.ic * self.window**2
        return (self.n * self.ic * self.size**2 + weights) * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded x, w and bias; x and w in the problem's layout."""
        generator = torch.Generator().manual_seed(seed)
        spread = (self.ic * self.window**2) ** -0.5
        x = torch.randn(self.n, self.ic, self.size, self.size, generator=generator)
        w = torch.randn(self.oc, self.ic, self.window, self.window, generator=generator) * spread
        bias = torch.randn(self.oc, generator=generator)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        made = {name: t.to(self.dtype).to(device) for name, t in (("x", x), ("w", w))}
        made = {name: t.contiguous(memory_format=layout) for name, t in made.items()}
        return {**made, "bias": bias.to(self.dtype).to(device)}

    def oracle(self, wide: Mapping[str, Any]) -> torch.Tensor:
        """A sum of products, one for each tap of the window."""
        pad, size = self.window // 2, self.out_size
        x = torch.nn.functional.pad(wide["x"], (pad,) * 4)
        taps = [
            torch.einsum("nchw,oc->nohw", x[..., i : i + size, j : j + size], wide["w"][..., i, j])
            for i in range(self.window)
            for j in range(self.window)
        ]
        return (sum(taps) + wide["bias"][:, None, None]).clamp(min=0)

    def small(self) -> Self:
        """The channels decide the kernel: keep them, up to a limit."""
        return replace(self, n=1, size=min(self.size, 7), ic=min(self.ic, 64), oc=min(self.oc, 64))

    def label(self) -> str:
        """The sizes and the layout."""
        return f"{super().label()} {'nhwc' if self.channels_last else 'nchw'}"


@dataclass(frozen=True)
class AttentionInput(OperatorProblem):
    """A problem of ``flash_attention``: q, k, v [batch, heads, length, dim]."""

    batch: int
    heads: int
    length: int
    dim: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    varied = "q"

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = {"batch": self.batch, "heads": self.heads, "length": self.length, "dim": self.dim}
        check_sizes(1, **sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, heads, length, head size."""
        return (self.batch, self.heads, self.length, self.dim)

    @property
    def flops(self) -> int:
        """Two products, half of them where causal."""
        return 4 * self.batch * self.heads * self.length**2 * self.dim // (1 + self.causal)

    @property
    def num_bytes(self) -> int:
        """q, k and v read, the result written."""
        return 4 * self.batch * self.heads * self.length * self.dim * self.dtype.itemsize

    def make(self, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
        """Seeded q, k and v."""
        generator = torch.Generator().manual_seed(seed)
        made = {name: torch.randn(self.shape, generator=generator) for name in "qkv"}
        tensors: dict[str, Any] = {n: t.to(self.dtype).to(device) for n, t in made.items()}
        return tensors | {"causal": self.causal}

    def oracle(self, wide: Mapping[str, Any]) -> torch.Tensor:
        """softmax(q k' / sqrt(D)) v."""
        logits = wide["q"] @ wide["k"].mT / self.dim**0.5
        if self.causal:
            hidden = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, float("-inf"))
        return torch.softmax(logits, -1) @ wide["v"]

    def small(self) -> Self:
        """Two blocks of keys at most."""
        return replace(self, batch=1, heads=min(self.heads, 2), length=min(self.length, 160))

    def label(self) -> str:
        """The sizes, and whether causal."""
        return super().label() + (" causal" if self.causal else "")
