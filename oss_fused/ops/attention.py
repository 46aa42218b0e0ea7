# SPDX-License-Identifier: MIT
"""``oss_fused::decode_attention``: attention of single-token queries over a paged KV cache.

Args of the operator:
    query: [T, Hq, D], one token of each of T sequences; bf16, fp16 or e4m3 (with q_scale).
    key_cache, value_cache: [pages, page_size, Hkv, D], any strides, unit stride along D; the
        dtype of query, or e4m3 with k_scale and v_scale. Hq is a multiple of Hkv.
    block_table: [T, max_pages] int32; page of each run of page_size positions.
    seq_lens: [T] int32, the position of the query included; 0 marks a padding row (result 0).
    out: [T, Hq, D] bf16 or fp16, written.
    arrivals: int32, at least T * Hkv zeros, used as scratch and left at zero. Launches that
        overlap in time need buffers of their own.
    softmax_scale: factor of the logits.
    window: positions that a query sees, itself included; 0 for all.
    sinks: [Hq], a logit of each head that takes weight and adds no value.
    q_scale, k_scale, v_scale: float32 dequantisation multipliers of one element.
    prefetch_table: the caller vouches that no kernel still running writes block_table or seq_lens
        (ops/gemm.py): they are then read before the kernels ahead have finished.

Formula: online softmax, https://arxiv.org/abs/2205.14135; sinks, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch

from oss_fused.ops.registration import register_op


def _decode_attention_fake(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefetch_table: bool = False,
) -> None:
    return None


register_op(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor seq_lens, Tensor(a!) out, Tensor(b!) arrivals, float softmax_scale, int window, "
    "Tensor? sinks, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "bool prefetch_table=False) -> ()",
    _decode_attention_fake,
)
