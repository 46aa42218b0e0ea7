# SPDX-License-Identifier: MIT
"""Attention of single-token queries over a paged KV cache, one launch.

out[t, h] = softmax([q . k * scale, sink]) @ [v, 0] over the last ``window`` positions (all, where
window is 0). query [T, Hq, D]; caches [pages, page_size, Hkv, D] of any stride with unit stride
along D, bf16, fp16 or e4m3; Hq / Hkv query heads share a program, padded to a tensor-core tile.

Split over the context: several programs a head take equal runs of tiles. A split that is alone
writes the result; otherwise each leaves its sum, maximum and weight in a scratch buffer, and the
one that arrives last adds them up in order: one launch, no float atomics, the same bits each run.

Keys and values are loaded after the wait for the kernel ahead: it writes the newest position of
every sequence of the step, and a sequence that shares a full block may read another's.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.numerics import INTERPRETED, from_fp8, round_to

_LOG2E = tl.constexpr(1.4426950408889634)


class Launch(NamedTuple):
    """How a batch is cut up: programs a head, positions a tile and warps of one.

    A split has at least ``min_tiles`` tiles, so that short sequences take fewer of them.
    """

    splits: int
    block_n: int
    warps: int
    min_tiles: int


# (heads larger than 64, FP8 cache) -> launch for rows times KV heads of up to _PROGRAMS and
# beyond: the fastest on an H200 over contexts of 128 to 32768 (docs/decode.md)
_PROGRAMS = (8, 64, 512)
_LARGE_HEADS = (
    Launch(16, 128, 8, 1),
    Launch(4, 128, 4, 2),
    Launch(1, 128, 4, 1),
    Launch(1, 64, 4, 1),
)
_LAUNCHES = {
    (False, False): (
        Launch(32, 128, 4, 1),
        Launch(4, 128, 8, 2),
        Launch(4, 128, 4, 8),
        Launch(4, 64, 4, 16),
    ),
    (False, True): (
        Launch(64, 128, 4, 1),
        Launch(8, 128, 4, 1),
        Launch(2, 128, 4, 4),
        Launch(1, 128, 4, 1),
    ),
    # two warps: more programs fit a multiprocessor, 134 us instead of 151 at batch 128 and 1024
    (True, False): (*_LARGE_HEADS[:3], Launch(1, 64, 2, 1)),
    (True, True): _LARGE_HEADS,
}


@triton.jit
def _load_tile(cache, offsets, mask, dtype: tl.constexpr):
    tile = tl.load(cache + offsets, mask=mask, other=0.0)
    if tile.dtype == tl.float8e4nv:
        # e4m3 -> bf16 is exact
        return from_fp8(tile).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit
def _rows(table, positions, valid, page_size, stride_kp, stride_kn, stride_vp, stride_vn):
    """Offsets of the keys and of the values at ``positions``."""
    pages = tl.load(table + positions // page_size, mask=valid, other=0).to(tl.int64)
    slots = positions % page_size
    return pages * stride_kp + slots * stride_kn, pages * stride_vp + slots * stride_vn


@triton.jit
def _add_tile(q, k, v, valid, scale, best, total, acc, DTYPE: tl.constexpr):
    """One step of the online softmax; ``valid`` holds at least one position."""
    logits = tl.dot(q, tl.trans(k)) * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, 1))
    weights = tl.exp2(logits - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(round_to(weights, DTYPE), v)
    return new_best, total, acc


@triton.jit(do_not_specialize=["table_stride", "page_size", "min_tiles"])
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
    min_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    wait_unless(PREFETCH)
    length = tl.load(seq_lens + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    tiles = tl.maximum(tl.cdiv(length - first, BLOCK_N), 1)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), min_tiles)
    active = tl.cdiv(tiles, tiles_per_split)
    if split >= active:
        return

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    in_g = offs_g < GROUP
    in_d = offs_d < HEAD_DIM
    mask_q = in_g[:, None] & in_d[None, :]
    heads = head * GROUP + offs_g
    key_head = key_cache + head * stride_kh
    value_head = value_cache + head * stride_vh
    table = block_table + row * table_stride
    begin = first + split * tiles_per_split * BLOCK_N
    end = tl.minimum(length, begin + tiles_per_split * BLOCK_N)

    positions = begin + tl.arange(0, BLOCK_N)
    valid = positions < end
    k_rows, v_rows = _rows(
        table, positions, valid, page_size, stride_kp, stride_kn, stride_vp, stride_vn
    )
    k_offsets = k_rows[:, None] + offs_d[None, :]
    v_offsets = v_rows[:, None] + offs_d[None, :]
    start_next()
    wait_for_inputs()
    mask = valid[:, None] & in_d[None, :]
    k = _load_tile(key_head, k_offsets, mask, DTYPE)
    v = _load_tile(value_head, v_offsets, mask, DTYPE)
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
    # a padding row has no position at all
    if length > 0:
        best, total, acc = _add_tile(q, k, v, valid, scale, best, total, acc, DTYPE)
    for start in range(begin + BLOCK_N, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = positions < end
        k_rows, v_rows = _rows(
            table, positions, valid, page_size, stride_kp, stride_kn, stride_vp, stride_vn
        )
        mask = valid[:, None] & in_d[None, :]
        k = _load_tile(key_head, k_rows[:, None] + offs_d[None, :], mask, DTYPE)
        v = _load_tile(value_head, v_rows[:, None] + offs_d[None, :], mask, DTYPE)
        best, total, acc = _add_tile(q, k, v, valid, scale, best, total, acc, DTYPE)

    slot = row * HEADS + head
    writes = active == 1
    if active > 1:
        here = (slot * splits + split) * BLOCK_G
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
                there = (slot * splits + other) * BLOCK_G
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


def launch_for(
    rows: int, heads: int, head_dim: int, fp8: bool, window: int, positions: int
) -> Launch:
    """The launch of a batch; depends on nothing that changes between replays of a CUDA graph.

    Args:
        rows: sequences, padding included.
        heads: KV heads.
        head_dim: of a head.
        fp8: whether the cache is.
        window: of the layer, 0 for none.
        positions: most that a sequence can have, by the width of the block table.
    """
    bucket = bisect.bisect_left(_PROGRAMS, rows * heads)
    best = _LAUNCHES[head_dim > 64, fp8][bucket]
    tiles = cdiv(min(window or positions, positions), best.block_n)
    return best._replace(splits=min(best.splits, next_power_of_2(tiles)))


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
    prefetch_table: bool = False,
) -> None:
    """Softmax attention into ``out``; see kernels/attention for the contract."""
    rows, q_heads, head_dim = query.shape
    if rows == 0:
        return
    page_size, heads = key_cache.shape[1:3]
    group = q_heads // heads
    positions = block_table.shape[1] * page_size
    fp8 = key_cache.dtype == FP8
    launch = launch_for(rows, heads, head_dim, fp8, window, positions)
    splits = launch.splits
    block_g = max(16, next_power_of_2(group))
    block_d = max(16, next_power_of_2(head_dim))
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
        launch.min_tiles,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_N=launch.block_n,
        DTYPE=_dot_dtype(out.dtype),
        PREFETCH=prefetch_table,
        num_warps=launch.warps,
        num_stages=3,
        **pdl_options(query.device),
    )
