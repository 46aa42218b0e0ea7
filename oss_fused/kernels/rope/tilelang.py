# SPDX-License-Identifier: MIT
"""RMSNorm + rotary embedding of whole rows in one launch, in TileLang; see kernels/rope.

A CTA holds one row: the left and the right element of each pair in two float32 fragments.
"""

import functools
from typing import Any

import tilelang
import tilelang.language as T
import torch

from oss_fused.kernels.checks import shown

_PAIRS_PER_THREAD = 8


def program(hidden: int, head_dim: int, dtype: str, threads: int, eps: float) -> Any:
    """x [rows, hidden], weight [hidden], cos and sin [sequence, head_dim] -> out [rows, hidden]."""
    rows, sequence = T.dynamic("rows"), T.dynamic("sequence")
    pairs, half = hidden // 2, head_dim // 2

    def left_of(pair: Any) -> Any:
        return pair // half * head_dim + pair % half

    @T.prim_func
    def rmsnorm_rope_kernel(
        x: T.Tensor((rows, hidden), dtype),
        weight: T.Tensor((hidden,), dtype),
        cos: T.Tensor((sequence, head_dim), dtype),
        sin: T.Tensor((sequence, head_dim), dtype),
        out: T.Tensor((rows, hidden), dtype),
    ):
        with T.Kernel(rows, threads=threads) as row:
            left = T.alloc_fragment((pairs,), "float32")
            right = T.alloc_fragment((pairs,), "float32")
            squares = T.alloc_fragment((pairs,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(pairs):
                left[i] = T.cast(x[row, left_of(i)], "float32")
                right[i] = T.cast(x[row, left_of(i) + half], "float32")
            for i in T.Parallel(pairs):
                squares[i] = left[i] * left[i] + right[i] * right[i]
            T.reduce_sum(squares, total, dim=0)
            total[0] = T.rsqrt(total[0] / hidden + eps)
            token = row % sequence
            for i in T.Parallel(pairs):
                left[i] = left[i] * total[0] * T.cast(weight[left_of(i)], "float32")
                right[i] = right[i] * total[0] * T.cast(weight[left_of(i) + half], "float32")
            for i in T.Parallel(pairs):
                out[row, left_of(i)] = T.cast(
                    left[i] * T.cast(cos[token, i % half], "float32")
                    - right[i] * T.cast(sin[token, i % half], "float32"),
                    dtype,
                )
                out[row, left_of(i) + half] = T.cast(
                    right[i] * T.cast(cos[token, half + i % half], "float32")
                    + left[i] * T.cast(sin[token, half + i % half], "float32"),
                    dtype,
                )

    return rmsnorm_rope_kernel


@functools.cache
def _compiled(hidden: int, head_dim: int, dtype: str, eps: float) -> Any:
    threads = min(max(32, hidden // (2 * _PAIRS_PER_THREAD) // 32 * 32), 512)
    return tilelang.compile(program(hidden, head_dim, dtype, threads, eps), out_idx=[-1])


def rmsnorm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """``y * cos + rotate_half(y) * sin`` of ``y = rms_norm(x)``."""
    if x.numel() == 0:
        return torch.empty_like(x)
    hidden, head_dim = x.shape[2], cos.shape[1]
    kernel = _compiled(hidden, head_dim, shown(x.dtype), eps)
    # one dtype for every operand: the tables of a model have it already
    tables = (t.to(x.dtype).contiguous() for t in (weight, cos, sin))
    return kernel(x.reshape(-1, hidden).contiguous(), *tables).view(x.shape)
