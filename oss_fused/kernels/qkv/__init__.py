# SPDX-License-Identifier: MIT
"""``qkv_rope_kv``: the QKV projection of a decode step, rotated and written to the cache.

``rope_kv(fp8_gemm(x, weight, x_scale, weight_scale, bias, out_dtype), ...)``: x [T, K] FP8 codes
with x_scale [T, 1] or [1], weight [(num_heads + 2 kv_heads) * head_dim, K] FP8; the arguments from
``positions`` on are rope_kv's (kernels/rope). Returns the rotated q
[T, num_heads * head_dim]. ``prefetch_weights`` and ``levels`` are fp8_gemm's (kernels/gemm).

On a Hopper GPU this is one launch for at most 128 tokens, where head_dim is a multiple of 64,
rotated whole and in NeoX pairs, without a norm per head. Otherwise the kernels of the two parts
run. The result is that of the parts; a sum of products may be rounded in another order.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8
from oss_fused.kernels.contract import OneOf, Operand, Scale
from oss_fused.kernels.op import declare
from oss_fused.kernels.qkv import reference
from oss_fused.kernels.rope import CACHE_EXAMPLE, CACHE_RULES, check_cache, rotated_q


def _check(
    weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    kv_heads, head_dim = key_cache.shape[2:]
    outputs = (num_heads + 2 * kv_heads) * head_dim
    if weight.shape[0] != outputs:
        raise ShapeMismatchError(f"weight.shape={tuple(weight.shape)}: expected [{outputs}, K]")
    check_cache(cos_sin_cache, key_cache, out_dtype)
    if slot_mapping.shape[0] > x.shape[0]:
        raise ShapeMismatchError(
            f"slot_mapping.shape={tuple(slot_mapping.shape)}: expected at most {x.shape[0]} slots"
        )


def _fake(
    x: torch.Tensor,
    out_dtype: torch.dtype,
    num_heads: int,
    key_cache: torch.Tensor,
    q_scale: torch.Tensor | None,
) -> torch.Tensor:
    q = rotated_q(num_heads, key_cache, x)
    return q.to(out_dtype) if q_scale is None else q


declare(
    reference.qkv_rope_kv,
    {
        "x": Operand("T K", FP8),
        "weight": Operand("N K", FP8, cpu=(torch.float32,)),
        "x_scale": Scale("T"),
        "weight_scale": Scale("N"),
        "bias": Operand("N", *FLOAT_DTYPES),
        "out_dtype": OneOf(*FLOAT_DTYPES),
        **CACHE_RULES,
        "levels": Operand("L K", FP8),
    },
    {"triton": "triton"},
    mutates=("key_cache", "value_cache"),
    check=_check,
    fake=_fake,
    example={"N": 512, "K": 64, "out_dtype": torch.bfloat16, **CACHE_EXAMPLE, "levels": None},
)
