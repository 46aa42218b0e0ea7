# SPDX-License-Identifier: MIT
"""Matrix products measured by bench_kernels: FP8 GEMM with prefetched weights, gated MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness import vllm_kernels
from harness.kernel_cases import Case, Prepared, bf16, ops, relative_error
from oss_fused.bench.timing import copies_for
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
# (K, N) of the projections of gpt-oss-20b, Llama-3-8B and gpt-oss's lm_head
SHAPES = (
    (2880, 5120),
    (4096, 2880),
    (2880, 201088),
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
)
LM_HEAD = (2880, 201088)
SQUARE = ((4096, 4096), (8192, 8192))
# one bfloat16 rounding, and the tensor cores' own accumulator over up to 14336 products
GEMM_TOLERANCE = 5e-3
# calls in one graph of a compute-bound case, whose inputs need no rotation
_REPEATS = 4


def _operands(m: int, n: int, k: int, copies: int) -> tuple[Any, ...]:
    a, a_scale = ops.quantize_fp8(bf16(m, k), None, "token")
    weights = [ops.quantize_fp8(bf16(n, k), None, "channel") for _ in range(copies)]
    return a, a_scale, weights


def _gemm(m: int, n: int, k: int, small: bool) -> Prepared:
    a, a_scale, weights = _operands(m, n, k, copies_for(n * k) if small else 1)
    if not small:
        weights *= _REPEATS

    def lt(b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), a_scale, b_scale.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def error() -> float:
        b, b_scale = weights[0]
        got = ops.fp8_gemm(a, b, a_scale, b_scale, None, torch.bfloat16)[:256]
        want = get_kernel("torch", "fp8_gemm")(
            a[:256], b, a_scale[:256], b_scale, None, torch.float32
        )
        return relative_error(got, want)

    baselines: dict[str, list[Callable[[], Any]]] = {
        "cutlass": [functools.partial(vllm_kernels.scaled_mm, a, b, a_scale, s) for b, s in weights]
    }
    if not small:
        baselines["cublaslt"] = [functools.partial(lt, b, s) for b, s in weights]
    return Prepared(
        [
            functools.partial(ops.fp8_gemm, a, b, a_scale, s, None, torch.bfloat16, True)
            for b, s in weights
        ],
        baselines,
        error,
        GEMM_TOLERANCE,
    )


def _linear(m: int, n: int, k: int) -> Prepared:
    """Quantisation and product together, as a layer runs them."""
    x = bf16(m, k)
    _, _, weights = _operands(m, n, k, copies_for(n * k))

    def vllm(b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        q, scale = vllm_kernels.quantize_token(x)
        return vllm_kernels.scaled_mm(q, b, scale, b_scale)

    def error() -> float:
        b, b_scale = weights[0]
        return relative_error(
            ops.fp8_linear(x, b, b_scale, None, None),
            get_kernel("torch", "fp8_linear")(x, b, b_scale, None, None),
        )

    return Prepared(
        [functools.partial(ops.fp8_linear, x, b, s, None, None, True) for b, s in weights],
        {"vllm": [functools.partial(vllm, b, s) for b, s in weights]},
        error,
        GEMM_TOLERANCE,
    )


@torch.compile(dynamic=True)
def _compiled_mlp(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _gated_mlp(rows: int, intermediate: int, hidden: int, fp8: bool = True) -> Prepared:
    """Quantisation, both projections and activation; few rows with weights rotated beyond L2."""
    x = bf16(rows, hidden)
    copies = copies_for(2 * intermediate * hidden) if rows <= 64 else 1
    dense = [bf16(2 * intermediate, hidden) / hidden**0.5 for _ in range(copies)]
    none = torch.empty(0, device="cuda")
    codes = [ops.quantize_fp8(w, None, "channel") if fp8 else (w, none) for w in dense]
    if rows > 64:
        dense, codes = dense * _REPEATS, codes * _REPEATS

    def native(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scales = scale.chunk(2) if fp8 else (None, None)
        return ops.gated_mlp(x, *gate_up.chunk(2), *scales, "silu", "gate")

    def vllm(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, token = vllm_kernels.quantize_token(x)
        return vllm_kernels.silu_and_mul(vllm_kernels.scaled_mm(q, gate_up, token, scale))

    def error() -> float:
        gate_up, scale = codes[0]
        scales = scale.chunk(2) if fp8 else (None, None)
        want = get_kernel("torch", "gated_mlp")(x[:256], *gate_up.chunk(2), *scales, "silu", "gate")
        return relative_error(native(gate_up, scale)[:256], want)

    baselines: dict[str, list[Callable[[], Any]]] = {
        "compiled_bf16": [functools.partial(_compiled_mlp, x, w) for w in dense]
    }
    if fp8:
        baselines["vllm_fp8"] = [functools.partial(vllm, b, s) for b, s in codes]
    return Prepared(
        [functools.partial(native, b, s) for b, s in codes], baselines, error, GEMM_TOLERANCE
    )


def gemm_cases() -> Iterator[Case]:
    """FP8 products of few and of many rows, lm_head, and the gated MLP."""
    for k, n in SHAPES:
        rows = (1, 4, 8, 16, 32, 64, *((128, 256) if (k, n) == LM_HEAD else ()))
        for m in rows:
            group = "gemm_small" if m <= 64 else "lm_head"
            yield _gemm_case(group, m, n, k, small=True)
    for k, n in (*(shape for shape in SHAPES if shape != LM_HEAD), *SQUARE[1:]):
        for m in (1024, 4096, 8192):
            yield _gemm_case("gemm_large", m, n, k, small=False)
    for k, n in ((2880, 5120), (4096, 2880), (4096, 4096)):
        for m in (1, 16, 64):
            yield Case(
                "linear",
                {"M": m, "K": k, "N": n},
                n * k + m * (2 * k + 2 * n),
                2 * m * n * k,
                functools.partial(_linear, m, n, k),
            )
    for hidden, intermediate in ((2048, 5632), (4096, 11264), (4096, 14336), (8192, 22528)):
        yield _mlp_case("gated_mlp", 8192, intermediate, hidden)
    for hidden, intermediate in ((2048, 5632), (4096, 14336)):
        for m in (1, 16, 64):
            yield _mlp_case("gated_mlp_rows", m, intermediate, hidden)
        yield _mlp_case("gated_mlp_bf16", 8192, intermediate, hidden, fp8=False)


def _gemm_case(group: str, m: int, n: int, k: int, small: bool) -> Case:
    return Case(
        group,
        {"M": m, "K": k, "N": n},
        n * k + m * (k + 2 * n),
        2 * m * n * k,
        functools.partial(_gemm, m, n, k, small),
    )


def _mlp_case(group: str, rows: int, intermediate: int, hidden: int, fp8: bool = True) -> Case:
    weight_bytes = 2 * intermediate * hidden * (1 if fp8 else 2)
    return Case(
        group,
        {"rows": rows, "hidden": hidden, "intermediate": intermediate},
        weight_bytes + rows * 2 * (hidden + intermediate),
        4 * rows * hidden * intermediate,
        functools.partial(_gated_mlp, rows, intermediate, hidden, fp8),
    )
