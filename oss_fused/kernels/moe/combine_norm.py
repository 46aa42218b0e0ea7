# SPDX-License-Identifier: MIT
"""The weighted sum of a token's slots; or that, residual add, RMSNorm and FP8 quantisation in one
launch.

Where w2 was computed in shares of K, a token has too many rows for one program: several programs
add up some of the columns each, and the last one to arrive normalises the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.moe.choice import ranked
from oss_fused.kernels.norm.triton import normalized, store_codes
from oss_fused.kernels.numerics import round_to
from oss_fused.kernels.token_tiles import empty_token_codes

# columns of a program where several share a row
_PART = 128


class Summands(NamedTuple):
    """What a token's output is the sum of.

    y [shares, P, H]; weights [T, top_k] float32 and place [P] int32 of a Routing. Of one token that
    was not routed: its logits as the weights, and no place.
    """

    y: Any
    weights: Any
    place: Any


class _Shape(NamedTuple):
    """Columns, experts of a token, shares of K; experts of the model where the weights are logits,
    and whether they are renormalised."""

    columns: int
    top_k: int
    shares: int
    experts: int
    renormalize: bool


@triton.jit
def _weights_of_logits(logits, SHAPE: tl.constexpr):
    """Weights of all experts and their ranks."""
    value, rank = ranked(logits, SHAPE.experts)
    chosen = rank < SHAPE.top_k
    # max drops NaN, the differences bring it back
    exps = tl.exp(value - tl.max(tl.where(chosen, value, float("-inf")), 0))
    # padding beyond the experts adds exp(-inf)
    total = tl.sum(tl.where(chosen, exps, 0.0) if SHAPE.renormalize else exps, 0)
    return exps / total, rank


@triton.jit
def _slots(summands, token, SHAPE: tl.constexpr):
    """A token's rows of y and their weights, a tuple each."""
    K: tl.constexpr = SHAPE.top_k
    rows = ()
    weights = ()
    if summands.place is None:
        of_expert, rank = _weights_of_logits(summands.weights, SHAPE)
        for slot in tl.static_range(K):
            rows += (token.to(tl.int32) * K + slot,)  # type: ignore[assignment]
            weights += (tl.sum(tl.where(rank == slot, of_expert, 0.0), 0),)  # type: ignore[assignment]
    else:
        for slot in tl.static_range(K):
            rows += (tl.load(summands.place + token * K + slot),)  # type: ignore[assignment]
            weights += (tl.load(summands.weights + token * K + slot),)  # type: ignore[assignment]
    return rows, weights


@triton.jit
def _weighted_sum(y, rows, weights, column, mask, n_pairs, SHAPE: tl.constexpr):
    """sum over slots, in their order, of weight * (sum of y's shares at the slot's row)."""
    K: tl.constexpr = SHAPE.top_k
    SHARES: tl.constexpr = SHAPE.shares
    acc = tl.zeros(column.shape, tl.float32)
    for slot in tl.static_range(K):
        part = tl.zeros(column.shape, tl.float32)
        for share in tl.static_range(SHARES):
            row = (share * n_pairs + tl.maximum(rows[slot], 0)).to(tl.int64) * SHAPE.columns
            part += tl.load(y + row + column, mask=mask, other=0.0).to(tl.float32)
        # an expert that is not here adds nothing, whatever its weight or memory hold
        acc += tl.where(rows[slot] >= 0, part * weights[slot], 0.0)
    return acc


@triton.jit(do_not_specialize=["n_pairs"])
def _combine_kernel(
    summands, out, n_pairs, SHAPE: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SHAPE.columns
    start_next()
    wait_unless(PREFETCH)
    # routing was complete before the kernel ahead of w2's was
    rows, weights = _slots(summands, token, SHAPE)
    wait_for_inputs()
    acc = _weighted_sum(summands.y, rows, weights, column, mask, n_pairs, SHAPE)
    tl.store(out + token * SHAPE.columns + column, round_to(acc, out.dtype.element_ty), mask=mask)


def combine(
    summands: Summands, top_k: int, renormalize: bool, out: torch.Tensor, prefetch: bool = False
) -> torch.Tensor:
    """Weighted sum over the slots of every token, into ``out`` [T, H]."""
    shares, pairs, hidden = summands.y.shape
    experts = summands.weights.shape[1] if summands.place is None else 0
    block = min(1024, next_power_of_2(hidden))
    _combine_kernel[(out.shape[0], cdiv(hidden, block))](
        summands,
        out,
        pairs,
        SHAPE=_Shape(hidden, top_k, shares, experts, renormalize),
        BLOCK=block,
        PREFETCH=prefetch,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out


@triton.jit(do_not_specialize=["n_pairs"])
def _combine_norm_kernel(
    summands,
    residual,
    gain,
    static_scale,
    q,
    levels,
    scale,
    residual_out,
    arrivals,
    n_pairs,
    eps,
    SHAPE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    LATE: tl.constexpr,
    POLICY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = residual.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < SHAPE.columns
    own = tl.program_id(1) * PART + tl.arange(0, PART)
    own_mask = own < SHAPE.columns
    place = token * SHAPE.columns + columns
    both = None if levels is None else levels + token * 2 * SHAPE.columns + columns
    if not LATE:
        start_next()
    wait_unless(PREFETCH)
    # routing and residual were complete before the kernel ahead of w2's was
    rows, weights = _slots(summands, token, SHAPE)
    before = tl.load(residual + token * SHAPE.columns + own, mask=own_mask, other=0.0)
    factors = tl.load(gain + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs()
    if LATE:
        # the next kernel's weights come behind y
        start_next()
    out = _weighted_sum(summands.y, rows, weights, own, own_mask, n_pairs, SHAPE)
    hidden = round_to(out, dtype).to(tl.float32) + before.to(tl.float32)
    added = round_to(hidden, dtype)
    target = residual_out + token * SHAPE.columns + own
    tl.store(target, added, mask=own_mask, eviction_policy=POLICY)
    if PART == BLOCK:
        y = normalized(added.to(tl.float32), factors, SHAPE.columns, eps, dtype)
        store_codes(y, static_scale, q + place, both, SHAPE.columns, scale, token, mask, POLICY)
    else:
        # every thread's stores come before the arrival that announces them
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + token, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(1) - 1:
            tl.store(arrivals + token, 0)
            whole = tl.load(residual_out + place, mask=mask, other=0.0, cache_modifier=".cg")
            y = normalized(whole.to(tl.float32), factors, SHAPE.columns, eps, dtype)
            store_codes(y, static_scale, q + place, both, SHAPE.columns, scale, token, mask, POLICY)


def combine_norm(
    summands: Summands,
    top_k: int,
    renormalize: bool,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    arrivals: torch.Tensor,
    prefetch: bool,
    bf16_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [T, H] and scale of ``norm(residual + sum)``, the sum with the residual, levels.

    ``arrivals`` [T] int32 are zeros before and after.
    """
    shares, pairs, hidden = summands.y.shape
    tokens, device = residual.shape[0], residual.device
    experts = summands.weights.shape[1] if summands.place is None else 0
    shape = _Shape(hidden, top_k, shares, experts, renormalize)
    q = empty_token_codes((tokens, hidden), device)
    residual_out = torch.empty_like(residual)
    out_scale = torch.empty(
        (tokens, 1) if scale is None else scale.shape, dtype=torch.float32, device=device
    )
    levels = torch.empty(2 * bf16_rows, hidden, dtype=FP8, device=device)
    block = next_power_of_2(hidden)
    part = min(_PART, block) if shares > 1 else block
    # few tokens have float32 y; the rows of many fill the GPU with less
    most = 16 if summands.y.element_size() == 4 else 8
    _combine_norm_kernel[(tokens, cdiv(hidden, part) if part < block else 1)](
        summands,
        residual,
        weight,
        scale,
        q,
        levels if has_two_levels(tokens, bf16_rows) else None,
        out_scale,
        residual_out,
        arrivals,
        pairs,
        eps,
        SHAPE=shape,
        PART=part,
        BLOCK=block,
        PREFETCH=prefetch,
        # of one token, or without shares, y is little: early weights win (measured on an H200)
        LATE=shares > 1 and tokens > 1,
        POLICY=activation_policy(tokens),
        num_warps=4 if shares > 1 else min(most, max(1, block // 256)),
        **pdl_options(device),
    )
    return q, out_scale, residual_out, levels
