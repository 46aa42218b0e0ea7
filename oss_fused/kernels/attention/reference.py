# SPDX-License-Identifier: MIT
"""Attention of few query tokens per sequence over a paged KV cache, row by row in float32."""

from __future__ import annotations

from itertools import pairwise

import torch


def decode_attention(
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
    query_starts: torch.Tensor | None = None,
    max_query_len: int = 1,
) -> None:
    """Softmax attention into ``out``; see kernels/attention for the contract."""
    group = query.shape[1] // key_cache.shape[2]
    page_size = key_cache.shape[1]
    scale = softmax_scale * _value(q_scale) * _value(k_scale)
    if query_starts is None:
        starts = list(range(query.shape[0] + 1))
    else:
        starts = query_starts.tolist()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        for row in range(start, end):
            # the last row of a sequence is at its last position
            length = int(seq_lens[sequence]) - (end - 1 - row)
            first = max(0, length - window) if window else 0
            positions = torch.arange(first, max(first, length), device=query.device)
            pages = block_table[sequence, positions // page_size].long()
            keys = key_cache[pages, positions % page_size].float().repeat_interleave(group, 1)
            values = value_cache[pages, positions % page_size].float().repeat_interleave(group, 1)
            logits = torch.einsum("hd,nhd->hn", query[row].float(), keys) * scale
            if sinks is not None:
                logits = torch.cat([logits, sinks.float()[:, None]], 1)
            weights = torch.softmax(logits, 1)[:, : positions.numel()]
            result = torch.einsum("hn,nhd->hd", weights, values) * _value(v_scale)
            out[row] = result.to(out.dtype)


def window_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    window: int,
    sinks: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Softmax attention of prompts into ``out``; see kernels/attention for the contract."""
    cache = (query, key_cache, value_cache, block_table, seq_lens, out, seq_lens)
    scales = (q_scale, k_scale, v_scale, False)
    decode_attention(*cache, softmax_scale, window, sinks, *scales, query_starts, query.shape[0])


def _value(scale: torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)
