# SPDX-License-Identifier: MIT
"""Attention of single-token queries over a paged KV cache, one launch.

out[t, h] = softmax([q . k * scale, sink]) @ [v, 0] over the last ``window`` positions (all, where
window is 0). query [T, Hq, D]; caches [pages, page_size, Hkv, D] of any stride with unit stride
along D, bf16, fp16 or e4m3; Hq / Hkv query heads share a program, padded to a tensor-core tile.

Split over the context: SPLITS programs a head take equal runs of tiles. A split that is alone
writes the result; otherwise each leaves its sum, maximum and weight in a scratch buffer, and the
one that arrives last adds them up in order: one launch, no float atomics, the same bits each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.triton.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.triton.numerics import INTERPRETED, from_fp8, round_to
from oss_fused.kernels.validation_attention import check_decode_attention

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK_N = 64
# measured on an H200, batch 1 to 128, context 256 to 8192: more splits cost more to add up
# than they save
_MAX_SPLITS = 16
_TARGET_PROGRAMS = 1024
_WINDOW_PER_SPLIT = 256


@triton.jit
def _load_tile(cache, offsets, mask, dtype: tl.constexpr):
    tile = tl.load(cache + offsets, mask=mask, other=0.0)
    if tile.dtype == tl.float8e4nv:
        # e4m3 -> bf16 is exact
        return from_fp8(tile).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit(do_not_specialize=["table_stride", "page_size"])
def _decode_attention_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    out,
    arrivals,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    partial_sums,
    partial_stats,
    softmax_scale,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_ot,
    stride_oh,
    table_stride,
    page_size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    start_next()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_inputs()
    length = tl.load(seq_lens + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first // BLOCK_N
    tiles = tl.maximum(tl.cdiv(length, BLOCK_N) - first_tile, 1)
    tiles_per_split = tl.cdiv(tiles, SPLITS)
    active = tl.cdiv(tiles, tiles_per_split)
    if split >= active:
        return

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    in_g = offs_g < GROUP
    in_d = offs_d < HEAD_DIM
    mask_q = in_g[:, None] & in_d[None, :]
    heads = head * GROUP + offs_g
    q_offsets = row * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
    q = _load_tile(query, q_offsets, mask_q, DTYPE)
    scale = softmax_scale * _LOG2E
    if q_scale is not None:
        scale *= tl.load(q_scale)
    if k_scale is not None:
        scale *= tl.load(k_scale)

    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    begin = (first_tile + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(length, begin + tiles_per_split * BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = (positions >= first) & (positions < length)
        pages = tl.load(
            block_table + row * table_stride + positions // page_size, mask=valid, other=0
        ).to(tl.int64)
        slots = positions % page_size
        mask = valid[:, None] & in_d[None, :]
        k_rows = pages * stride_kp + slots * stride_kn + head * stride_kh
        v_rows = pages * stride_vp + slots * stride_vn + head * stride_vh
        k = _load_tile(key_cache, k_rows[:, None] + offs_d[None, :], mask, DTYPE)
        v = _load_tile(value_cache, v_rows[:, None] + offs_d[None, :], mask, DTYPE)
        logits = tl.dot(q, tl.trans(k)) * scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        # each tile holds a valid position, so the new maximum is a number
        new_best = tl.maximum(best, tl.max(logits, 1))
        weights = tl.exp2(logits - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(round_to(weights, DTYPE), v)
        best = new_best

    slot = row * HEADS + head
    writes = active == 1
    if active > 1:
        here = (slot * SPLITS + split) * BLOCK_G
        tl.store(partial_sums + (here + offs_g[:, None]) * BLOCK_D + offs_d[None, :], acc)
        tl.store(partial_stats + (here + offs_g) * 2, best)
        tl.store(partial_stats + (here + offs_g) * 2 + 1, total)
        # every thread's stores come before the arrival that announces them
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + slot, 1, sem="acq_rel", scope="gpu")
        writes = arrived == active - 1
        if writes:
            tl.store(arrivals + slot, 0)
            best = tl.full([BLOCK_G], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for other in range(0, active):
                there = (slot * SPLITS + other) * BLOCK_G
                other_best = tl.load(partial_stats + (there + offs_g) * 2, cache_modifier=".cg")
                other_total = tl.load(
                    partial_stats + (there + offs_g) * 2 + 1, cache_modifier=".cg"
                )
                other_acc = tl.load(
                    partial_sums + (there + offs_g[:, None]) * BLOCK_D + offs_d[None, :],
                    cache_modifier=".cg",
                )
                new_best = tl.maximum(best, other_best, propagate_nan=tl.PropagateNan.ALL)
                shrink = tl.exp2(best - new_best)
                grow = tl.exp2(other_best - new_best)
                total = total * shrink + other_total * grow
                acc = acc * shrink[:, None] + other_acc * grow[:, None]
                best = new_best
    if writes:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=in_g, other=0.0).to(tl.float32) * _LOG2E
            new_best = tl.maximum(best, sink, propagate_nan=tl.PropagateNan.ALL)
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.exp2(sink - new_best)
            acc = acc * shrink[:, None]
        # a padding row has no position: its result is 0, not 0 / 0
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if v_scale is not None:
            result *= tl.load(v_scale)
        o_offsets = row * stride_ot + heads[:, None] * stride_oh + offs_d[None, :]
        tl.store(out + o_offsets, round_to(result, out.dtype.element_ty), mask=mask_q)


def split_count(rows: int, heads: int, window: int) -> int:
    """Programs a head: a power of two that fills the GPU."""
    wanted = max(1, _TARGET_PROGRAMS // max(1, rows * heads))
    if window:
        wanted = min(wanted, triton.cdiv(window, _WINDOW_PER_SPLIT))
    return min(_MAX_SPLITS, triton.next_power_of_2(wanted))


def _dot_dtype(out_dtype: torch.dtype) -> tl.dtype:
    # the interpreter multiplies bf16 tiles as if they were integers
    if INTERPRETED.value:
        return tl.float32
    return tl.float16 if out_dtype == torch.float16 else tl.bfloat16


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
) -> None:
    """Softmax attention into ``out``; see ops/attention.py for the contract."""
    check_decode_attention(query, key_cache, value_cache, block_table, seq_lens, out, arrivals)
    rows, q_heads, head_dim = query.shape
    if rows == 0:
        return
    page_size, heads = key_cache.shape[1:3]
    group = q_heads // heads
    splits = split_count(rows, heads, window)
    block_g = max(16, triton.next_power_of_2(group))
    block_d = max(16, triton.next_power_of_2(head_dim))
    scratch = (rows * heads * splits if splits > 1 else 0, block_g)
    sums = torch.empty(*scratch, block_d, dtype=torch.float32, device=query.device)
    stats = torch.empty(*scratch, 2, dtype=torch.float32, device=query.device)
    _decode_attention_kernel[(rows, heads, splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        out,
        arrivals,
        sinks,
        q_scale,
        k_scale,
        v_scale,
        sums,
        stats,
        softmax_scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        block_table.stride(0),
        page_size,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=window,
        SPLITS=splits,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_N=_BLOCK_N,
        DTYPE=_dot_dtype(out.dtype),
        num_warps=4,
        num_stages=3,
        **pdl_options(query.device),
    )
