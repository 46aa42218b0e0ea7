# SPDX-License-Identifier: MIT
"""Decode projections measured by bench_kernels: as served, one launch per part, vLLM's bf16.

Weights are prefetched, as the served layers ask for it: nothing writes them while a case is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from harness import vllm_kernels
from harness.kernel_cases import EPS, MODELS, Case, Prepared, bf16, ops, relative_error
from oss_fused.bench.timing import copies_for
from oss_fused.kernels.levels import BF16_ROWS
from oss_fused.kernels.op import get_kernel

HIDDEN = {"gpt-oss-20b": 2880, "llama-3-8b": 4096}
# as for the bfloat16 results and FP8 codes of the parts, some of which round the other way
_TOLERANCE = 2e-2


def _weights(n: int, k: int) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """[N, K] in bfloat16 and in FP8 with scales, enough copies to rotate them out of L2."""
    dense = [bf16(n, k) / k**0.5 for _ in range(copies_for(n * k))]
    return dense, [ops.quantize_fp8(weight, None, "channel") for weight in dense]


def _fused_qkv(rows: int, model: str) -> Prepared:
    """add + RMSNorm + quantise, QKV projection + bias, RoPE + cache write.

    Served in two launches; "three_launches" does the same with one level. "one_level": as the
    option linear_activations "fp8" serves few rows.
    """
    heads, hidden = MODELS[model], HIDDEN[model]
    dense, codes = _weights(heads.width, hidden)
    x, residual, gain = bf16(rows, hidden), bf16(rows, hidden), bf16(hidden)
    bias = bf16(heads.width)
    positions = torch.randint(0, 4096, (rows,), device="cuda")
    table = torch.randn(4096, heads.dim, device="cuda").bfloat16()
    slots = torch.arange(rows, device="cuda")
    cache = heads.cache(rows)

    def rope(caches: Any) -> tuple[Any, ...]:
        none = (None, None, None, None, EPS)
        return (positions, table, heads.q, True, *caches, slots, *none)

    def native(
        weight: tuple[torch.Tensor, torch.Tensor], bf16_rows: int = BF16_ROWS
    ) -> torch.Tensor:
        norm = (gain, EPS, None, False, True, bf16_rows)
        q, scale, _, _, levels = ops.add_rms_norm_quant(x, residual, *norm)
        args = (q, weight[0], scale, weight[1], bias, torch.bfloat16, *rope(cache))
        return ops.qkv_rope_kv(*args, prefetch_weights=True, levels=levels)

    def three(weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        norm = (gain, EPS, None, False, True)
        q, scale, *_ = ops.add_rms_norm_quant(x, residual, *norm)
        qkv = ops.fp8_gemm(q, weight[0], scale, weight[1], bias, torch.bfloat16, True)
        return ops.rope_kv(qkv, *rope(cache))

    def vllm(weight: torch.Tensor, hidden_states: torch.Tensor, rest: torch.Tensor) -> None:
        # in place, as vLLM runs it
        torch.ops._C.fused_add_rms_norm(hidden_states, rest, gain, EPS)
        qkv = torch.nn.functional.linear(hidden_states, weight, bias)
        vllm_kernels.rope_kv(qkv, positions, table, heads.q, *cache, slots)

    def error() -> float:
        norm, project = (get_kernel("torch", n) for n in ("add_rms_norm_quant", "qkv_rope_kv"))
        q, scale, *_ = norm(x, residual, gain, EPS, None, False)
        weight, weight_scale = codes[0]
        args = (q, weight, scale, weight_scale, bias, torch.bfloat16, *rope(heads.cache(rows)))
        return relative_error(native(codes[0]), project(*args))

    return Prepared(
        [functools.partial(native, weight) for weight in codes],
        {
            "vllm_bf16": [functools.partial(vllm, w, x.clone(), residual.clone()) for w in dense],
            "three_launches": [functools.partial(three, weight) for weight in codes],
            "one_level": [functools.partial(native, weight, 0) for weight in codes],
        },
        error,
        _TOLERANCE,
    )


def _fused_o_proj(rows: int, model: str) -> Prepared:
    """Output projection + bias, and the norm behind it, which adds the residual.

    "one_level": as the option linear_activations "fp8" serves few rows.
    """
    heads, hidden = MODELS[model], HIDDEN[model]
    k = heads.q * heads.dim
    dense, codes = _weights(hidden, k)
    x, residual, gain, bias = bf16(rows, k), bf16(rows, hidden), bf16(hidden), bf16(hidden)

    def native(
        weight: tuple[torch.Tensor, torch.Tensor], bf16_rows: int = BF16_ROWS
    ) -> torch.Tensor:
        out = ops.fp8_linear(x, *weight, None, bias, True, bf16_rows)
        return ops.add_rms_norm_quant(out, residual, gain, EPS, None, False, True)[2]

    def vllm(weight: torch.Tensor, rest: torch.Tensor) -> None:
        out = torch.nn.functional.linear(x, weight, bias)
        torch.ops._C.fused_add_rms_norm(out, rest, gain, EPS)

    def error() -> float:
        linear = get_kernel("torch", "fp8_linear")
        want = linear(x, *codes[0], None, bias, False) + residual
        return relative_error(native(codes[0]), want)

    return Prepared(
        [functools.partial(native, weight) for weight in codes],
        {
            "vllm_bf16": [functools.partial(vllm, weight, residual.clone()) for weight in dense],
            "one_level": [functools.partial(native, weight, 0) for weight in codes],
        },
        error,
        _TOLERANCE,
    )


def projection_cases() -> Iterator[Case]:
    """Fused QKV and output projections of gpt-oss and Llama."""
    for model, hidden in HIDDEN.items():
        heads = MODELS[model]
        for rows in (1, 2, 4, 8, 16):
            width = heads.width
            yield Case(
                # the target is for gpt-oss only
                "fused_qkv" if model == "gpt-oss-20b" else "fused_qkv_llama",
                {"rows": rows, "hidden": hidden},
                width * hidden + rows * (width * 4 + hidden * 6),
                2 * rows * width * hidden,
                functools.partial(_fused_qkv, rows, model),
                {"model": model},
            )
            width = heads.q * heads.dim
            yield Case(
                "fused_o_proj",
                {"rows": rows, "hidden": hidden},
                width * hidden + rows * (width * 2 + hidden * 6),
                2 * rows * width * hidden,
                functools.partial(_fused_o_proj, rows, model),
                {"model": model},
            )
