# SPDX-License-Identifier: MIT
"""``oss_fused::rmsnorm_rope`` and ``oss_fused::rope_kv``.

rmsnorm_rope: x [B, S, H], weight [H], cos and sin [S, head_dim]; y = rms_norm(x) * weight in
float32, then ``y * cos + rotate_half(y) * sin`` per head of head_dim values, rounded once.

rope_kv: qkv [T, (num_heads + 2 kv_heads) * head_dim], rows may be strided; positions [T];
cos_sin_cache [positions, rotary_dim] (cos | sin, YaRN's factors included), rotary_dim <= head_dim;
is_neox pairs (i, i + half), otherwise (2 i, 2 i + 1). Returns the rotated q [T, num_heads *
head_dim] and writes k (rotated) and v to key_cache and value_cache [blocks, block_size, kv_heads,
head_dim] (views of vLLM's cache, any strides) at slot_mapping [<= T]; slot -1 is padding. An FP8
cache takes x / scale with k_scale and v_scale [1] (1 where None). q_norm and k_norm [head_dim]
apply RMSNorm to each head of q and k first (Qwen3). With q_scale [1] the returned q is FP8,
q / q_scale, as attention over an FP8 cache takes it.
"""

from __future__ import annotations

import torch

from oss_fused.kernels.validation import FP8
from oss_fused.ops.registration import register_op


def _rmsnorm_rope_fake(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _rope_kv_fake(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    is_neox: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = qkv.dtype if q_scale is None else FP8
    return qkv.new_empty((qkv.shape[0], num_heads * key_cache.shape[-1]), dtype=dtype)


register_op(
    "rmsnorm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
    _rmsnorm_rope_fake,
)
register_op(
    "rope_kv(Tensor qkv, Tensor positions, Tensor cos_sin_cache, int num_heads, bool is_neox, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? q_scale=None) -> Tensor",
    _rope_kv_fake,
)
