# SPDX-License-Identifier: MIT
"""A random MXFP4 expert layer with its values, for the tests of the expert kernels."""

from __future__ import annotations

import functools

import torch

import oss_fused.kernels.moe  # noqa: F401 - registers the operators
from oss_fused.kernels.op import get_kernel
from oss_fused.quant.mxfp4 import unpack_mxfp4

ops = torch.ops.oss_fused


def random_mxfp4(rows: int, columns: int, experts: int, spread: int = 6) -> tuple:
    """Codes, scales and the values [E, N, K] they stand for."""
    weight = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(121 - spread, 122, (experts, rows, columns // 32), dtype=torch.uint8)
    values = unpack_mxfp4(weight.unflatten(-1, (-1, 16)), scale, torch.float32)
    return weight, scale, values


class Layer:
    """A small layer with its repacked weights."""

    def __init__(self, hidden: int, inter: int, experts: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        weight, scale, self.w13 = random_mxfp4(2 * inter, hidden, experts)
        self.packed13 = ops.moe_repack_mxfp4(weight, scale, True)
        weight, scale, self.w2 = random_mxfp4(hidden, inter, experts)
        self.packed2 = ops.moe_repack_mxfp4(weight, scale, False)
        self.b13 = torch.randn(experts, 2 * inter).bfloat16()
        self.b2 = torch.randn(experts, hidden).bfloat16()
        self.experts = experts

    def to(self, device: torch.device) -> Layer:
        for name in ("b13", "b2"):
            setattr(self, name, getattr(self, name).to(device))
        for name in ("packed13", "packed2"):
            setattr(self, name, tuple(t.to(device) for t in getattr(self, name)))
        return self

    def run(self, x, logits, top_k=4, renormalize=True, bias=True, **options) -> torch.Tensor:
        return ops.moe_mxfp4(
            x, logits, *self.packed13, self.b13 if bias else None,
            *self.packed2, self.b2 if bias else None, top_k, renormalize, **options,
        )  # fmt: skip

    def expected(self, x, logits, top_k=4, renormalize=True, activation="swigluoai"):
        """The layer in float64, token by token."""
        x, logits = x.cpu().double(), logits.cpu().double()
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            values, ids = logits[t].topk(top_k)
            weights = values.softmax(-1) if renormalize else logits[t].softmax(-1)[ids]
            for weight, e in zip(weights, ids.tolist()):
                h = self.w13[e].double() @ x[t] + self.b13[e].cpu().double()
                gate, up = h[0::2], h[1::2]
                if activation == "silu":
                    act = gate * gate.sigmoid() * up
                else:
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    act = gate * (1.702 * gate).sigmoid() * (up + 1)
                out[t] += weight * (self.w2[e].double() @ act + self.b2[e].cpu().double())
        return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.cpu().double()
    return float((actual.cpu().double() - expected).norm() / expected.norm())


reference = get_kernel("torch", "moe_mxfp4")
# bfloat16 outputs round at 2^-9; a sum in another order moves some of them by one step
SAME_ARITHMETIC = 2e-3
# FP8: codes of the intermediate may move by a step too, and partial results are bfloat16
FP8_STEP = 1e-2


# repacked on a CPU: seconds for the largest
layer_of = functools.cache(Layer)


def run_kernels(layer: Layer, x, logits, top_k=2, expert_map=None, activation="swigluoai", fp8=-1,
                config=None):  # fmt: skip
    args = (x, logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, top_k, True)
    options = (expert_map, activation, fp8)
    if config is None:
        return get_kernel("triton", "moe_mxfp4")(*args, *options)
    # the operator has no such argument
    from oss_fused.kernels.moe.triton import moe_mxfp4

    return moe_mxfp4(*args, *options, config=config)


def run(layer: Layer, x, logits, top_k=2, expert_map=None, activation="swigluoai", fp8=-1,
        config=None):  # fmt: skip
    args = (x, logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, top_k, True)
    options = (expert_map, activation, fp8)
    return run_kernels(layer, x, logits, top_k, *options, config), reference(*args, *options)


def inputs(device, tokens: int, hidden: int, experts: int):
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    return x, torch.randn(tokens, experts, device=device).bfloat16()
