# SPDX-License-Identifier: MIT
"""``oss_fused::qkv_rope_kv``, ``norm_qkv_rope_kv``, ``fp8_linear_add``: decode projections.

qkv_rope_kv: ``rope_kv(fp8_gemm(x, weight, x_scale, weight_scale, bias, out_dtype), ...)``: x
[T, K] FP8 codes with x_scale [T, 1] or [1], weight [(num_heads + 2 kv_heads) * head_dim, K] FP8;
the arguments from ``positions`` on are rope_kv's (ops/rope.py). Returns the rotated q.

norm_qkv_rope_kv: the same of ``add_rms_norm_quant(x, residual, gain, norm_eps, None)``, x and
residual [T, K] in the model's dtype. Returns the rotated q and ``x + residual``.

fp8_linear_add: ``fp8_linear(x, weight, weight_scale, input_scale, bias) + residual``, both
rounded to x's dtype; residual [..., N].

On a Hopper GPU they are one launch for few tokens: qkv_rope_kv up to 16 (head_dim a multiple of
64, rotated whole and in NeoX pairs, no norm per head), the others up to 4; otherwise the kernels
of their parts. The result is that of the parts; a sum of products may be rounded in another order.
``prefetch_weights`` is fp8_gemm's (ops/gemm.py).
"""

from __future__ import annotations

import torch

from oss_fused.kernels.validation import FP8
from oss_fused.ops.registration import register_op

_ROPE = (
    "Tensor positions, Tensor cos_sin_cache, int num_heads, bool is_neox, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? q_norm, Tensor? k_norm, float eps, Tensor? q_scale=None, bool prefetch_weights=False"
)


def _qkv_rope_kv_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
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
    prefetch_weights: bool = False,
) -> torch.Tensor:
    dtype = out_dtype if q_scale is None else FP8
    return x.new_empty((x.shape[0], num_heads * key_cache.shape[-1]), dtype=dtype)


def _norm_qkv_rope_kv_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    norm_eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
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
    prefetch_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if q_scale is None else FP8
    q = x.new_empty((x.shape[0], num_heads * key_cache.shape[-1]), dtype=dtype)
    return q, x.new_empty(x.shape)


def _fp8_linear_add_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    return x.new_empty(residual.shape)


register_op(
    "fp8_linear_add(Tensor x, Tensor weight, Tensor weight_scale, Tensor? input_scale, "
    "Tensor? bias, Tensor residual, bool prefetch_weights=False) -> Tensor",
    _fp8_linear_add_fake,
)
register_op(
    "qkv_rope_kv(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, "
    f"ScalarType out_dtype, {_ROPE}) -> Tensor",
    _qkv_rope_kv_fake,
)
register_op(
    "norm_qkv_rope_kv(Tensor x, Tensor? residual, Tensor gain, float norm_eps, Tensor weight, "
    f"Tensor weight_scale, Tensor? bias, {_ROPE}) -> (Tensor q, Tensor residual_out)",
    _norm_qkv_rope_kv_fake,
)
