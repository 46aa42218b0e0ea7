# SPDX-License-Identifier: MIT
"""vLLM's own CUDA kernels as baselines, called through torch.ops without importing vLLM."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from oss_fused.errors import BackendUnavailableError

_LIBRARY = "_C_stable_libtorch.abi3.so"
FP8 = torch.float8_e4m3fn


def load(library: Path | None = None) -> None:
    """Load vLLM's compiled operators.

    Args:
        library: path of ``_C_stable_libtorch.abi3.so``; None finds the installed vLLM's.

    Raises:
        BackendUnavailableError: there is no such file.
    """
    if library is None:
        spec = importlib.util.find_spec("vllm")
        folders = list(spec.submodule_search_locations or []) if spec else []
        found = [Path(folder) / _LIBRARY for folder in folders]
        library = next((path for path in found if path.is_file()), None)
    if library is None or not library.is_file():
        raise BackendUnavailableError(
            f"library={library}: vLLM's {_LIBRARY} not found; install vLLM for CUDA or name it"
        )
    torch.ops.load_library(str(library))


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """CUTLASS FP8 GEMM, a [M, K], b [N, K], bfloat16 out."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    torch.ops._C.cutlass_scaled_mm(out, a, b.t(), a_scale, b_scale, bias)
    return out


def quantize_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token dynamic FP8 quantisation."""
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
    return q, scale


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's fused add + RMSNorm + per-token quantisation; updates ``residual``."""
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    torch.ops._C.rms_norm_dynamic_per_token_quant(q, x, weight, scale, eps, None, residual)
    return q, scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the rows of ``x``."""
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(x[:, :I]) * x[:, I:]``."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x)
    return out


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotary embedding in place, then the cache write: two launches."""
    kv_heads, dim = key_cache.shape[2:]
    q, k, v = qkv.split([num_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    torch.ops._C.rotary_embedding(positions, q, k, dim, cos_sin_cache, True)
    one = _one(qkv.device)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        k.view(-1, kv_heads, dim),
        v.view(-1, kv_heads, dim),
        key_cache,
        value_cache,
        slot_mapping,
        "auto",
        one,
        one,
    )


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)
