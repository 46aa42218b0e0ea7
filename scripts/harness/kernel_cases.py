# SPDX-License-Identifier: MIT
"""What bench_kernels measures: native kernel, baselines and bytes per operation and shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  (registers the operators)
from harness import vllm_kernels
from oss_fused.bench.timing import copies_for
from oss_fused.kernels.op import get_kernel

ops = torch.ops.oss_fused
EPS = 1e-5
SMALL_ROWS = (1, 16, 64)
DECODE_HIDDEN = (2048, 2880, 4096, 8192)


@dataclass
class Prepared:
    """Inputs on the device, bound to calls: one call per rotated set of inputs."""

    native: list[Callable[[], Any]]
    baselines: dict[str, list[Callable[[], Any]]]
    error: Callable[[], float]
    tolerance: float


@dataclass(frozen=True)
class Case:
    """One row of the report; ``prepare`` makes its inputs."""

    group: str
    shape: Mapping[str, int]
    nbytes: int
    flops: int
    prepare: Callable[[], Prepared]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Group, labels and shape in one string."""
        labels = " ".join(self.labels.values())
        sizes = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return " ".join(part for part in (self.group, labels, sizes) if part)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``want``; NaN counts as infinite."""
    value = float((got.double() - want.double()).norm() / want.double().norm())
    return value if value == value else float("inf")


def bf16(*shape: int) -> torch.Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _norm_quant(rows: int, hidden: int) -> Prepared:
    copies = range(copies_for(rows * hidden * 7))
    sets = [(bf16(rows, hidden), bf16(rows, hidden)) for _ in copies]
    weight = bf16(hidden)

    def error() -> float:
        x, residual = sets[0]
        args = (x, residual, weight, EPS, None, False)
        q, scale, *_ = ops.add_rms_norm_quant(*args)
        want, want_scale, *_ = get_kernel("torch", "add_rms_norm_quant")(*args)
        return relative_error(q.float() * scale, want.float() * want_scale)

    return Prepared(
        [
            functools.partial(ops.add_rms_norm_quant, x, r, weight, EPS, None, False, True)
            for x, r in sets
        ],
        {
            "vllm": [
                functools.partial(vllm_kernels.add_rms_norm_quant, x, r.clone(), weight, EPS)
                for x, r in sets
            ]
        },
        error,
        # a last-place difference of a bfloat16 may move a code by a step
        1e-2,
    )


def _rmsnorm_rope(rows: int, hidden: int, head_dim: int) -> Prepared:
    sets = [bf16(1, rows, hidden) for _ in range(copies_for(rows * hidden * 4))]
    weight = bf16(hidden)
    table = torch.rand(rows, head_dim, device="cuda")
    cos, sin = table.cos(), table.sin()
    half_table = torch.cat([cos[:, : head_dim // 2], sin[:, : head_dim // 2]], -1).bfloat16()
    positions = torch.arange(rows, device="cuda")

    def vllm(x: torch.Tensor) -> torch.Tensor:
        y = vllm_kernels.rms_norm(x[0], weight, EPS)
        torch.ops._C.rotary_embedding(positions, y, None, head_dim, half_table, True)
        return y

    def error() -> float:
        args = (sets[0], weight, cos, sin, EPS)
        return relative_error(ops.rmsnorm_rope(*args), get_kernel("torch", "rmsnorm_rope")(*args))

    return Prepared(
        [functools.partial(ops.rmsnorm_rope, x, weight, cos, sin, EPS) for x in sets],
        {"vllm": [functools.partial(vllm, x) for x in sets]},
        error,
        4e-3,
    )


@dataclass(frozen=True)
class Heads:
    """Attention shape of a model."""

    q: int
    kv: int
    dim: int

    @property
    def width(self) -> int:
        """Columns of the fused projection."""
        return (self.q + 2 * self.kv) * self.dim

    def cache(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value views of a paged cache with room for ``tokens``."""
        raw = torch.zeros(tokens // 16 + 1, 16, self.kv, 2 * self.dim, device="cuda")
        key, value = raw.bfloat16().split(self.dim, -1)
        return key, value


MODELS = {"gpt-oss-20b": Heads(64, 8, 64), "llama-3-8b": Heads(32, 8, 128)}


def _rope_kv(rows: int, heads: Heads) -> Prepared:
    sets = [bf16(rows, heads.width) for _ in range(copies_for(rows * heads.width * 4))]
    positions = torch.randint(0, 4096, (rows,), device="cuda")
    table = torch.randn(4096, heads.dim, device="cuda").bfloat16()
    slots = torch.randperm(rows, device="cuda")
    caches = [heads.cache(rows) for _ in sets]

    def native(qkv: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return ops.rope_kv(
            qkv, positions, table, heads.q, True, *cache, slots, None, None, None, None, EPS
        )

    def error() -> float:
        qkv = sets[0].clone()
        pairs = []
        for run in (ops.rope_kv, get_kernel("torch", "rope_kv")):
            cache = heads.cache(rows)
            none = (None, None, None, None, EPS)
            q = run(qkv, positions, table, heads.q, True, *cache, slots, *none)
            pairs.append((q, *cache))
        return max(relative_error(got, want) for got, want in zip(*pairs))

    return Prepared(
        [functools.partial(native, x, c) for x, c in zip(sets, caches)],
        {
            "vllm": [
                functools.partial(
                    vllm_kernels.rope_kv, x.clone(), positions, table, heads.q, *c, slots
                )
                for x, c in zip(sets, caches)
            ]
        },
        error,
        4e-3,
    )


def _act_mul_quant(rows: int, intermediate: int) -> Prepared:
    sets = [bf16(rows, 2 * intermediate) for _ in range(copies_for(rows * intermediate * 5))]

    def vllm(x: torch.Tensor) -> None:
        vllm_kernels.quantize_token(vllm_kernels.silu_and_mul(x))

    def error() -> float:
        q, scale = ops.act_mul_quant(sets[0], "silu", None)
        want, want_scale = get_kernel("torch", "act_mul_quant")(sets[0], "silu", None)
        return relative_error(q.float() * scale, want.float() * want_scale)

    return Prepared(
        [functools.partial(ops.act_mul_quant, x, "silu", None) for x in sets],
        {"vllm": [functools.partial(vllm, x) for x in sets]},
        error,
        1e-2,
    )


def memory_cases() -> Iterator[Case]:
    """Operations whose limit is memory bandwidth."""
    for hidden in DECODE_HIDDEN:
        for rows in (*SMALL_ROWS, 2048, 8192):
            yield Case(
                "norm_quant",
                {"rows": rows, "hidden": hidden},
                rows * hidden * 7,
                0,
                functools.partial(_norm_quant, rows, hidden),
            )
        for rows in (*SMALL_ROWS, 4096, 8192):
            dim = 64 if hidden in (2048, 2880) else 128
            yield Case(
                "rmsnorm_rope",
                {"rows": rows, "hidden": hidden},
                rows * (hidden * 4 + dim * 8),
                0,
                functools.partial(_rmsnorm_rope, rows, hidden, dim),
            )
    for model, heads in MODELS.items():
        for rows in (*SMALL_ROWS, 8192):
            yield Case(
                "rope_kv",
                {"rows": rows},
                rows * heads.width * 4,
                0,
                functools.partial(_rope_kv, rows, heads),
                {"model": model},
            )
    for intermediate in (5632, 14336):
        for rows in (*SMALL_ROWS, 8192):
            yield Case(
                "act_mul_quant",
                {"rows": rows, "intermediate": intermediate},
                rows * intermediate * 5,
                0,
                functools.partial(_act_mul_quant, rows, intermediate),
            )
