# SPDX-License-Identifier: MIT
"""Checks of decode_attention's arguments, shared by the kernel and its reference."""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.validation import FP8, HALF_DTYPES, check_dtype, check_same_device


def check_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """Raise unless shapes, layouts, dtypes and devices fit; see ops/attention.py."""
    if query.dim() != 3 or query.stride(-1) != 1:
        raise ShapeMismatchError(
            f"query.shape={tuple(query.shape)}, query.stride()={query.stride()}: expected "
            f"[T, Hq, D] with unit stride along D"
        )
    rows, q_heads, head_dim = query.shape
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.dim() == 4 and cache.shape[3] == head_dim and cache.stride(-1) == 1
        if not fits or q_heads % max(1, cache.shape[2]):
            raise ShapeMismatchError(
                f"{name}.shape={tuple(cache.shape)}, {name}.stride()={cache.stride()}: expected "
                f"[pages, page_size, Hkv, {head_dim}] with unit stride along the last and Hkv a "
                f"divisor of {q_heads}"
            )
        check_dtype(name, cache, (FP8,) if cache.dtype == FP8 else (out.dtype,))
    if block_table.dim() != 2 or block_table.shape[0] < rows or block_table.stride(-1) != 1:
        raise ShapeMismatchError(
            f"block_table.shape={tuple(block_table.shape)}: expected [{rows}, max_pages]"
        )
    if seq_lens.dim() != 1 or seq_lens.shape[0] < rows:
        raise ShapeMismatchError(f"seq_lens.shape={tuple(seq_lens.shape)}: expected [{rows}]")
    if out.shape != query.shape or out.stride(-1) != 1:
        raise ShapeMismatchError(
            f"out.shape={tuple(out.shape)}: expected {tuple(query.shape)}, unit stride along D"
        )
    needed = rows * key_cache.shape[2]
    if arrivals.numel() < needed or not arrivals.is_contiguous():
        raise ShapeMismatchError(
            f"arrivals.numel()={arrivals.numel()}: expected at least {needed}, contiguous"
        )
    check_dtype("query", query, (*HALF_DTYPES, FP8))
    check_dtype("out", out, HALF_DTYPES)
    for name, index in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("arrivals", arrivals),
    ):
        check_dtype(name, index, (torch.int32,))
    check_same_device(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        out=out,
        arrivals=arrivals,
    )
