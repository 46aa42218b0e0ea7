# SPDX-License-Identifier: MIT
"""``rmsnorm_rope``, ``rmsnorm_rope_backward`` and ``rope_kv``.

rmsnorm_rope: x [B, S, H], weight [H], cos and sin [S, head_dim]; y = rms_norm(x) * weight in
float32, then ``y * cos + rotate_half(y) * sin`` per head of head_dim values, rounded once.

rmsnorm_rope_backward: grad [B, S, H] of that result and its inputs -> the gradients of x [B, S, H]
and of weight [H], each in the dtype of its input. float64 inputs are computed in float64.

rope_kv: qkv [T, (num_heads + 2 kv_heads) * head_dim], rows may be strided; positions [T];
cos_sin_cache [positions, rotary_dim] (cos | sin, YaRN's factors included), rotary_dim <= head_dim;
is_neox pairs (i, i + half), otherwise (2 i, 2 i + 1). Returns the rotated q [T, num_heads *
head_dim] and writes k (rotated) and v to key_cache and value_cache [blocks, block_size, kv_heads,
head_dim] (views of vLLM's cache, any strides) at slot_mapping [<= T]; slot -1 is padding. A cache
has qkv's dtype or is FP8, and then takes x / scale with k_scale and v_scale [1] (1 where None).
q_norm and k_norm [head_dim] apply RMSNorm to each head of q and k first (Qwen3). With q_scale [1]
the returned q is FP8, q / q_scale, as attention over an FP8 cache takes it. With with_keys, which
goes with no q_scale, the rotated k follows in the row of its q: [T, (num_heads + kv_heads) *
head_dim], for attention of sequences that have no other keys.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8, INT_DTYPES, check_dtype
from oss_fused.kernels.contract import Epsilon, Operand, Rule, Scale
from oss_fused.kernels.op import declare
from oss_fused.kernels.rope import reference


def _check_head_dim(x: torch.Tensor, cos: torch.Tensor) -> None:
    if not x.shape[-1]:
        raise ShapeMismatchError(f"x.shape={tuple(x.shape)}: expected hidden at least 1")
    head_dim = cos.shape[1]
    if head_dim % 2 or head_dim == 0 or x.shape[-1] % head_dim:
        raise ShapeMismatchError(
            f"cos.shape={tuple(cos.shape)}: expected an even head_dim that divides {x.shape[-1]}"
        )


def check_heads(
    qkv: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Raise unless widths and counts of ``rope_kv`` agree."""
    kv_heads, head_dim = key_cache.shape[2:]
    width = (num_heads + 2 * kv_heads) * head_dim
    if qkv.shape[1] != width:
        raise ShapeMismatchError(f"qkv.shape={tuple(qkv.shape)}: expected [tokens, {width}]")
    check_cache(cos_sin_cache, key_cache, qkv.dtype)
    if slot_mapping.shape[0] > qkv.shape[0]:
        raise ShapeMismatchError(
            f"slot_mapping.shape={tuple(slot_mapping.shape)}: expected at most {qkv.shape[0]} slots"
        )


def check_cache(cos_sin_cache: torch.Tensor, key_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise unless the cache takes ``dtype``, and the rotated part is even and fits into a head."""
    check_dtype("key_cache", key_cache, (FP8, dtype))
    rotary, head_dim = cos_sin_cache.shape[1], key_cache.shape[3]
    if rotary % 2 or rotary > head_dim:
        raise ShapeMismatchError(
            f"cos_sin_cache.shape={tuple(cos_sin_cache.shape)}: expected [positions, rotary_dim], "
            f"rotary_dim even and at most {head_dim}"
        )


# of rope_kv and of the projection that ends in it
CACHE_RULES: dict[str, Rule] = {
    "positions": Operand("T", *INT_DTYPES),
    "cos_sin_cache": Operand("P R", *FLOAT_DTYPES, contiguous=True),
    "key_cache": Operand("B S Hkv D", FP8, *FLOAT_DTYPES, contiguous=True),
    "value_cache": Operand("B S Hkv D", like="key_cache", contiguous=True),
    "slot_mapping": Operand("slots", *INT_DTYPES),
    "k_scale": Scale(),
    "v_scale": Scale(),
    "q_norm": Operand("D", *FLOAT_DTYPES),
    "k_norm": Operand("D", *FLOAT_DTYPES),
    "q_scale": Scale(),
    "eps": Epsilon(),
}


def rotated_q(num_heads: int, key_cache: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An empty q [T, num_heads * head_dim] of the rows and dtype of ``like``."""
    return like.new_empty((like.shape[0], num_heads * key_cache.shape[3]))


def _check_rope_kv(
    qkv: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_scale: torch.Tensor | None,
    with_keys: bool,
) -> None:
    check_heads(qkv, cos_sin_cache, num_heads, key_cache, slot_mapping)
    if with_keys and q_scale is not None:
        raise SchemeError(f"with_keys={with_keys}: expected no q_scale beside it, keys have none")


def _rope_kv_fake(
    qkv: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    q_scale: torch.Tensor | None,
    with_keys: bool,
) -> torch.Tensor:
    heads = num_heads + key_cache.shape[2] if with_keys else num_heads
    q = rotated_q(heads, key_cache, qkv)
    return q if q_scale is None else q.to(FP8)


def _halves(generator: torch.Generator) -> torch.Tensor:
    # vLLM's kernels read one half of a table, whose halves are alike
    return torch.randn(5, 16, generator=generator).repeat(1, 2).to(torch.bfloat16)


def _cache(generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)


CACHE_EXAMPLE = {
    "T": 3,
    "P": 9,
    "R": 64,
    "positions": torch.tensor([3, 1, 8]),
    "num_heads": 4,
    "is_neox": True,
    "key_cache": _cache,
    "value_cache": _cache,
    "slot_mapping": torch.tensor([5, -1, 0]),
    **dict.fromkeys(("k_scale", "v_scale", "q_norm", "k_norm", "q_scale")),
    "eps": 1e-6,
}

declare(
    reference.rmsnorm_rope,
    {
        "x": Operand("B S H", *FLOAT_DTYPES),
        "weight": Operand("H", *FLOAT_DTYPES),
        "cos": Operand("S D", *FLOAT_DTYPES),
        "sin": Operand("S D", *FLOAT_DTYPES),
        "eps": Epsilon(),
    },
    {"triton": "rmsnorm_rope", "cuda": "cuda", "tilelang": "tilelang", "nvcc": "nvcc"},
    check=_check_head_dim,
    example={"B": 2, "S": 5, "H": 256, "D": 32, "eps": 1e-6, "cos": _halves, "sin": _halves},
)
declare(
    reference.rmsnorm_rope_backward,
    {
        "grad": Operand("B S H", like="x"),
        "x": Operand("B S H", *FLOAT_DTYPES, torch.float64),
        "weight": Operand("H", *FLOAT_DTYPES, torch.float64),
        "cos": Operand("S D", *FLOAT_DTYPES, torch.float64),
        "sin": Operand("S D", *FLOAT_DTYPES, torch.float64),
        "eps": Epsilon(),
    },
    {"triton": "rmsnorm_rope_backward"},
    check=_check_head_dim,
    example={"B": 2, "S": 5, "H": 256, "D": 32, "eps": 1e-6},
)
declare(
    reference.rope_kv,
    {"qkv": Operand("T W", *FLOAT_DTYPES, contiguous=True), **CACHE_RULES},
    {"triton": "rope_kv", "cuda": "cuda"},
    mutates=("key_cache", "value_cache"),
    check=_check_rope_kv,
    fake=_rope_kv_fake,
    example={"W": 512, **CACHE_EXAMPLE},
)
