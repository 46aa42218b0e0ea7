# SPDX-License-Identifier: MIT
"""FP8 matrix product in TileLang: a [M, K] @ b [N, K].T, scales and bias in the epilogue.

TileLang feeds Hopper's tensor cores by TMA from a producer warp group; see kernels/gemm for the
contract. The tensor cores sum in their own accumulator over all of K.
"""

import functools
from typing import Any

import tilelang
import tilelang.language as T
import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FP8, check_dtype, shown
from oss_fused.kernels.levels import levels_of, sum_of_levels

# rows of K that one TMA copy moves: 16 bytes is the least it can address
_ALIGNMENT = 16


def program(
    n: int, k: int, out_dtype: str, with_bias: bool, block_m: int, block_n: int, stages: int
) -> Any:
    """a [m, k], b [n, k] e4m3, a_scale [m], b_scale [n], bias [n] float32 -> out [m, n]."""
    m = T.dynamic("m")
    block_k = 128

    @T.prim_func
    def fp8_gemm_kernel(
        a: T.Tensor((m, k), "float8_e4m3fn"),
        b: T.Tensor((n, k), "float8_e4m3fn"),
        a_scale: T.Tensor((m,), "float32"),
        b_scale: T.Tensor((n,), "float32"),
        bias: T.Tensor((n,), "float32"),
        out: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=256) as (column, row):
            tile_a = T.alloc_shared((block_m, block_k), "float8_e4m3fn")
            tile_b = T.alloc_shared((block_n, block_k), "float8_e4m3fn")
            acc = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(a[row * block_m, step * block_k], tile_a)
                T.copy(b[column * block_n, step * block_k], tile_b)
                T.gemm(tile_a, tile_b, acc, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                acc[i, j] *= a_scale[row * block_m + i] * b_scale[column * block_n + j]
                if with_bias:
                    acc[i, j] += bias[column * block_n + j]
            T.copy(acc, out[row * block_m, column * block_n])

    return fp8_gemm_kernel


@functools.cache
def _compiled(n: int, k: int, out_dtype: str, with_bias: bool, block_m: int) -> Any:
    made = program(n, k, out_dtype, with_bias, block_m, 128, 4)
    return tilelang.compile(made, out_idx=[-1])


def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    prefetch_weights: bool = False,
    levels: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(a @ b.T) * a_scale * b_scale.T + bias``.

    Raises:
        ShapeMismatchError: also where K is no multiple of 16.
    """
    both = levels_of(a, levels)
    if both is not None:
        return sum_of_levels(fp8_gemm, both, b, a_scale, b_scale, bias, out_dtype)
    check_dtype("b", b, (FP8,))
    m, (n, k) = a.shape[0], b.shape
    if k % _ALIGNMENT or k == 0:
        raise ShapeMismatchError(
            f"b.shape={(n, k)}: backend 'tilelang' expects K a multiple of {_ALIGNMENT}"
        )
    if m == 0 or n == 0:
        return torch.empty(m, n, dtype=out_dtype, device=a.device)
    kernel = _compiled(n, k, shown(out_dtype), bias is not None, 64 if m <= 64 else 128)
    a_rows = a_scale.reshape(-1).expand(m).contiguous()
    b_rows = b_scale.reshape(-1).expand(n).contiguous()
    added = b_rows if bias is None else bias.float()
    return kernel(a.contiguous(), b.contiguous(), a_rows, b_rows, added)
