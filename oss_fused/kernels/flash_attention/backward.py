# SPDX-License-Identifier: MIT
"""Gradients of attention; see kernels/flash_attention.

Three kernels: each row's ``log2(sum e^S)`` and ``rowsum(dO O)``; dQ, which walks over keys as
forward does; dK and dV, which walk over the queries of all heads that share the keys. No matrix of
logits is in memory, and no sum uses atomics: the same bits each run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.flash_attention.key_gradient import dkv_kernel
from oss_fused.kernels.flash_attention.query_gradient import dq_kernel
from oss_fused.kernels.flash_attention.tile import (
    LOG2E,
    Program,
    Tiles,
    dot_dtype,
    dropout,
    for_hopper,
    head_block,
    mask_rows,
    program,
    rows_of,
    shared_memory,
    triton_dtype,
    window_of,
    with_tiles,
)
from oss_fused.kernels.integers import cdiv


class RowTerms(NamedTuple):
    """Float32 [B, H, N]: ``log2(sum e^S)`` and ``rowsum(dO O)`` of a row."""

    log_sum: Any
    delta: Any


@triton.jit
def _row_kernel(
    grad,
    out,
    row_max,
    row_sum,
    terms,
    rows,
    DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.zeros([BLOCK], tl.float32)
    for column in tl.static_range(0, DIM_V, BLOCK_DV):
        cols = column + tl.arange(0, BLOCK_DV)[None, :]
        mask = inside[:, None] & (cols < DIM_V)
        place = row[:, None] * DIM_V + cols
        left = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(left * tl.load(out + place, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(terms.delta + row, total, mask=inside)
    weight = tl.load(row_sum + row, mask=inside, other=0.0)
    found = tl.load(row_max + row, mask=inside, other=0.0) * LOG2E + tl.log2(weight)
    # a row that sees nothing: every weight is 2^-inf
    tl.store(terms.log_sum + row, tl.where(weight == 0.0, float("inf"), found), mask=inside)


def _tiles(device: torch.device, dtype: torch.dtype, dim: int, dim_v: int) -> Tiles:
    """The tile of a head size; queries and their gradients are in flight beside the keys held."""
    if device.type != "cuda" or dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    block = max(head_block(dim), head_block(dim_v))
    if max(dim, dim_v) > block:
        # further tiles of all four operands pass through shared memory
        return Tiles(64, 64, 8, 1)
    held = 2 * 128 * block * dtype.itemsize
    stages = (shared_memory(device) - held) // (2 * 64 * block * dtype.itemsize)
    return Tiles(128, 64, 8, max(1, min(2, stages)))


def flash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
    config: tuple[Tiles, Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; see kernels/flash_attention for the contract.

    ``config`` is the tuner's: tiles of dQ, and of dK and dV.
    """
    heads, queries, dim = q.shape[1:]
    keys, dim_v = v.shape[2:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=q.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if row_max.numel() == 0 or dk.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad = grad.contiguous()
    terms = _row_terms(grad, out.contiguous(), row_max.contiguous(), row_sum.contiguous())
    window = window_of(window_left, window_right, max(queries, keys))
    plain = config is mask is slopes is None and not dropout_p
    if plain and window == (-1, -1) and for_hopper(q, k, v, grad):
        # Gluon is experimental: another Triton may lack it
        from oss_fused.kernels.flash_attention.hopper_key_gradient import key_gradient
        from oss_fused.kernels.flash_attention.hopper_query_gradient import query_gradient

        query_gradient(grad, q, k, v, terms, dq, scale, causal)
        key_gradient(grad, q, k, v, terms, dk, dv, scale, causal)
        return dq, dk, dv
    rule = _tiles(q.device, q.dtype, dim, dim_v)
    # one width of both tiles: axis 2 counts tiles of dK and of dV alike
    block = max(head_block(dim), head_block(dim_v))
    shape = program(q, v, mask, slopes, causal, window, dropout_p, (block, block))
    operands = (*map(rows_of, (q, k, v)), grad, mask_rows(mask, heads), slopes, terms)
    limits = (queries, keys, scale, window, dropout(dropout_p, seed))
    _launch(operands, (dq, dk, dv), limits, shape, config or (rule, _swapped(rule)))
    return dq, dk, dv


def _launch(
    operands: tuple[Any, ...],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    limits: tuple[Any, ...],
    shape: Program,
    tiles: tuple[Tiles, Tiles],
) -> None:
    """Fill dQ, then dK and dV."""
    dq, dk, dv = gradients
    batch, heads, queries, dim = dq.shape
    kv_heads, keys, dim_v = dv.shape[1:]
    tiles_q, tiles_kv = tiles
    dtypes = (triton_dtype(dq.dtype), dot_dtype(dq.dtype))
    widths = [cdiv(size, shape.block_d) for size in (dim, dim_v)]
    dq_kernel[(batch * heads, cdiv(queries, tiles_q.block_m), widths[0])](
        *operands,
        dq,
        *limits,
        with_tiles(shape, tiles_q, keys % tiles_q.block_n == 0),
        *dtypes,
        num_warps=tiles_q.warps,
    )
    even = queries % tiles_kv.block_m == 0 and keys % tiles_kv.block_n == 0
    dkv_kernel[(batch * kv_heads, cdiv(keys, tiles_kv.block_n), max(widths))](
        *operands,
        dk,
        dv,
        *limits,
        with_tiles(shape, tiles_kv, even),
        *dtypes,
        num_warps=tiles_kv.warps,
    )


def _row_terms(
    grad: torch.Tensor, out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor
) -> RowTerms:
    terms = RowTerms(torch.empty_like(row_max), torch.empty_like(row_max))
    rows, dim_v = row_max.numel(), out.shape[3]
    _row_kernel[(cdiv(rows, 64),)](
        grad, out, row_max, row_sum, terms, rows, DIM_V=dim_v, BLOCK=64, BLOCK_DV=head_block(dim_v)
    )
    return terms


def _swapped(tiles: Tiles) -> Tiles:
    return tiles._replace(block_m=tiles.block_n, block_n=tiles.block_m)
