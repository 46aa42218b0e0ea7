# SPDX-License-Identifier: MIT
"""Gated MLP in one TileLang kernel: both products of a tile meet in the epilogue.

x [T, H], gate and up weights [I, H], bfloat16 or float16; see kernels/mlp for the contract. FP8
weights are left to backend "triton".
"""

import functools
from typing import Any

import tilelang
import tilelang.language as T
import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.checks import HALF_DTYPES, check_dtype, shown

# elements of K that one TMA copy moves at least
_ALIGNMENT = 8


def _activate(x: Any, activation: str) -> Any:
    if activation == "silu":
        return x / (1.0 + T.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + T.tanh(inner))


def program(
    n: int, k: int, dtype: str, activation: str, on_gate: bool, block_m: int, stages: int
) -> Any:
    """x [m, k], gate and up [n, k] -> out [m, n]."""
    m = T.dynamic("m")
    block_n, block_k = 64, 64

    @T.prim_func
    def gated_mlp_kernel(
        x: T.Tensor((m, k), dtype),
        gate_weight: T.Tensor((n, k), dtype),
        up_weight: T.Tensor((n, k), dtype),
        out: T.Tensor((m, n), dtype),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (column, row):
            tile_x = T.alloc_shared((block_m, block_k), dtype)
            tile_gate = T.alloc_shared((block_n, block_k), dtype)
            tile_up = T.alloc_shared((block_n, block_k), dtype)
            gate = T.alloc_fragment((block_m, block_n), "float32")
            up = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(gate)
            T.clear(up)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(x[row * block_m, step * block_k], tile_x)
                T.copy(gate_weight[column * block_n, step * block_k], tile_gate)
                T.copy(up_weight[column * block_n, step * block_k], tile_up)
                T.gemm(tile_x, tile_gate, gate, transpose_B=True)
                T.gemm(tile_x, tile_up, up, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                if on_gate:
                    gate[i, j] = _activate(gate[i, j], activation) * up[i, j]
                else:
                    gate[i, j] = gate[i, j] * _activate(up[i, j], activation)
            T.copy(gate, out[row * block_m, column * block_n])

    return gated_mlp_kernel


@functools.cache
def _compiled(n: int, k: int, dtype: str, activation: str, on_gate: bool, block_m: int) -> Any:
    return tilelang.compile(program(n, k, dtype, activation, on_gate, block_m, 3), out_idx=[-1])


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    activation: str,
    activation_on: str,
) -> torch.Tensor:
    """Both projections, activation and product.

    Raises:
        UnsupportedDtypeError: also for FP8 weights and float32.
        ShapeMismatchError: also where H is no multiple of 8.
    """
    check_dtype("x", x, HALF_DTYPES)
    if gate_scale is not None:
        raise UnsupportedDtypeError("gate_weight.dtype=float8_e4m3fn: use backend 'triton'")
    n, k = gate_weight.shape
    if k % _ALIGNMENT or k == 0:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: backend 'tilelang' expects H a multiple of {_ALIGNMENT}"
        )
    rows = x.reshape(-1, k).contiguous()
    if rows.shape[0] == 0 or n == 0:
        return x.new_empty(*x.shape[:-1], n)
    block_m = 64 if rows.shape[0] <= 64 else 128
    kernel = _compiled(n, k, shown(x.dtype), activation, activation_on == "gate", block_m)
    return kernel(rows, gate_weight.contiguous(), up_weight.contiguous()).view(*x.shape[:-1], n)
