# SPDX-License-Identifier: MIT
"""Chains of decoder layers with random weights, made of the operators that a served model runs.

Kernels of a chain overlap at their ends as they do in a model, which launches of one kernel over
and over do not show. Attention reads a paged cache; a layer's weights are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.levels import BF16_ROWS
from oss_fused.kernels.moe.config import SHARED_ROWS

ops = torch.ops.oss_fused
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
PAGE = 16
EPS = 1e-5
TOP_K = 4
# steps of so many tokens have FP8 activations in the experts
FP8_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's layer; without experts its MLP is dense."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    # positions that every second layer sees; 0: all
    window: int = 0

    @property
    def qkv_rows(self) -> int:
        """Outputs of the QKV projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


SHAPES = {
    "gpt-oss-20b": Shape(2880, 2880, 64, 8, 64, experts=32, window=128),
    "gpt-oss-120b": Shape(2880, 2880, 64, 8, 64, experts=128, window=128),
    "llama-3-8b": Shape(4096, 14336, 32, 8, 128),
}


class Chain:
    """``layers`` layers of ``shape`` and a step of one token for each of ``tokens`` sequences."""

    def __init__(self, shape: Shape, layers: int, device: torch.device, seed: int = 0) -> None:
        """Make the weights."""
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.layers = [self._layer() for _ in range(layers)]
        self.arrivals = torch.zeros(SHARED_ROWS + shape.experts, dtype=torch.int32, device=device)

    def _uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, device=self.device, generator=self.generator)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, generator=self.generator).to(BF16)

    def _bytes(self, least: int, most: int, *size: int) -> torch.Tensor:
        """Integers from ``least`` to ``most`` - 1."""
        drawn = torch.randint(least, most, size, device=self.device, generator=self.generator)
        return drawn.to(torch.uint8)

    def _linear(self, rows: int, columns: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes below 2 in magnitude, none NaN, and scales up to ``scale`` / sqrt(columns)."""
        codes = (self._bytes(0, 256, rows, columns) & 0xBF).view(FP8)
        return codes, self._uniform(rows, 1) * (scale / columns**0.5)

    def _packed(self, rows: int, columns: int, gate_up: bool) -> list[torch.Tensor]:
        """MXFP4 weights of all experts, and their scales; one expert at a time."""
        parts = []
        for _ in range(self.shape.experts):
            codes = self._bytes(0, 256, 1, rows, columns // 2)
            exponents = self._bytes(117, 121, 1, rows, columns // 32)
            parts.append(ops.moe_repack_mxfp4(codes, exponents, gate_up))
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def _layer(self) -> dict[str, Any]:
        shape = self.shape
        width = shape.heads * shape.head_dim
        layer: dict[str, Any] = {
            "gain": self._normal(shape.hidden),
            "second_gain": self._normal(shape.hidden),
            "qkv": self._linear(shape.qkv_rows, shape.hidden, 1.0),
            # 0 beside experts: what they are routed by then depends on no kernel's rounding
            "output": self._linear(shape.hidden, width, 0.0 if shape.experts else 1.0),
        }
        if not shape.experts:
            layer["gate_up"] = self._linear(2 * shape.inner, shape.hidden, 1.0)
            layer["down"] = self._linear(shape.hidden, shape.inner, 1.0)
            return layer
        layer["qkv_bias"] = self._normal(shape.qkv_rows)
        # attention adds a tenth of the residual: most experts are then those expected (moe.md)
        layer["output_bias"] = self._normal(shape.hidden) / 10
        layer["sinks"] = self._normal(shape.heads)
        layer["router"] = (self._normal(shape.experts, shape.hidden), self._normal(shape.experts))
        layer["w13"] = (
            *self._packed(2 * shape.inner, shape.hidden, True),
            self._normal(shape.experts, 2 * shape.inner),
        )
        layer["w2"] = (
            *self._packed(shape.hidden, shape.inner, False),
            self._normal(shape.experts, shape.hidden),
        )
        return layer

    def prepare(self, tokens: int, context: int) -> Step:
        """A step of ``tokens`` sequences with ``context`` cached positions each."""
        return Step(self, tokens, context)


class Step:
    """One decode step through a chain, again and again on the same input."""

    def __init__(self, chain: Chain, tokens: int, context: int) -> None:
        """Make the input, the cache and what vLLM prepares for attention."""
        shape, device = chain.shape, chain.device
        self.chain, self.tokens = chain, tokens
        pages = context // PAGE + 1
        first = torch.arange(tokens, device=device) * pages
        self.table = (first[:, None] + torch.arange(pages, device=device)).int()
        self.lengths = torch.full((tokens,), context + 1, dtype=torch.int32, device=device)
        self.positions = torch.full((tokens,), context, dtype=torch.int64, device=device)
        self.slots = (first + context // PAGE) * PAGE + context % PAGE
        self.angles = chain._normal(context + 1, shape.head_dim)
        size = (tokens * pages, PAGE, shape.kv_heads, shape.head_dim)
        self.caches = [(chain._normal(*size), chain._normal(*size)) for _ in chain.layers]
        self.x, self.residual = (chain._normal(tokens, shape.hidden) for _ in range(2))
        self.arrivals = torch.zeros(tokens * shape.kv_heads, dtype=torch.int32, device=device)

    def __call__(self) -> torch.Tensor:
        """The residual behind the last layer [tokens, hidden]."""
        x, residual = self.x, self.residual
        ready: list[torch.Tensor] | None = None
        for index in range(len(self.chain.layers)):
            layer = self.chain.layers[index]
            if ready is None:
                norm = (layer["gain"], EPS, None, False, True, BF16_ROWS)
                codes, scale, residual, _, levels = ops.add_rms_norm_quant(x, residual, *norm)
            else:
                codes, scale, levels = ready
            x = self._attention(index, codes, scale, levels)
            mlp = self._experts if self.chain.shape.experts else self._dense
            *ready, residual = mlp(index, x, residual)
        return residual

    def _attention(
        self, index: int, codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor
    ) -> torch.Tensor:
        shape, layer = self.chain.shape, self.chain.layers[index]
        keys, values = self.caches[index]
        weight, weight_scale = layer["qkv"]
        query = ops.qkv_rope_kv(
            codes, weight, scale, weight_scale, layer.get("qkv_bias"), BF16, self.positions,
            self.angles, shape.heads, True, keys, values, self.slots, None, None, None, None, EPS,
            None, True, levels,
        ).view(self.tokens, shape.heads, shape.head_dim)  # fmt: skip
        out = torch.empty_like(query)
        ops.decode_attention(
            query, keys, values, self.table, self.lengths, out, self.arrivals,
            shape.head_dim**-0.5, shape.window if index % 2 else 0, layer.get("sinks"), None, None,
            None, True,
        )  # fmt: skip
        weight, weight_scale = layer["output"]
        rows = out.view(self.tokens, -1)
        bias = layer.get("output_bias")
        return ops.fp8_linear(rows, weight, weight_scale, None, bias, True, BF16_ROWS)

    def _dense(
        self, index: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and levels of the next layer's input, and the residual."""
        layer = self.chain.layers[index]
        following = self.chain.layers[(index + 1) % len(self.chain.layers)]
        norm = (layer["second_gain"], EPS, None, False, True)
        codes, scale, residual, _, _ = ops.add_rms_norm_quant(x, residual, *norm)
        weight, weight_scale = layer["gate_up"]
        codes, scale, residual, levels = ops.mlp_norm(
            codes, weight, scale, weight_scale, *layer["down"], None, residual, following["gain"],
            EPS, None, "silu", True, BF16_ROWS,
        )  # fmt: skip
        return codes, scale, levels, residual

    def _experts(
        self, index: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and levels of the next layer's input, and the residual."""
        layer = self.chain.layers[index]
        following = self.chain.layers[(index + 1) % len(self.chain.layers)]
        codes, scale, residual, levels = ops.norm_moe_norm(
            x, residual, layer["second_gain"], EPS, *layer["router"], *layer["w13"], *layer["w2"],
            TOP_K, True, FP8_TOKENS, following["gain"], EPS, None, self.chain.arrivals, True,
            BF16_ROWS,
        )  # fmt: skip
        return codes, scale, levels, residual
