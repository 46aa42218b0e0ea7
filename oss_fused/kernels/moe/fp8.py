# SPDX-License-Identifier: MIT
"""FP8 experts with channel scales and FP8 activations: the MXFP4 layer's plan, other products.

One program computes 64 weight rows for up to ROWS tokens of one expert, weights as the tensor
cores' 64-row operand. The intermediate is rounded to x's dtype and then quantised per token, since
its scale is known only when the row is complete.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import HALF_DTYPES, check_dtype
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.config import fp8_rows
from oss_fused.kernels.moe.router import encode_rows, route
from oss_fused.kernels.moe.tile import dot_tile
from oss_fused.kernels.moe.triton import combine
from oss_fused.kernels.numerics import round_to


@triton.jit
def _products(
    x,
    weight,
    row,
    row_mask,
    x_rows,
    x_mask,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    """Rows ``row`` [64] of ``weight`` [N, K] times tokens [ROWS], no scales applied yet."""
    k = tl.arange(0, 128)
    w_ptrs = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x + x_rows.to(tl.int64)[:, None] * KP + k[None, :]
    acc = tl.zeros((64, ROWS), tl.float32)
    for step in tl.range(0, (K + 127) // 128, num_stages=STAGES):
        # the columns that a row lacks are zeros, on both sides
        mask = row_mask[:, None] & (k < K - step * 128)[None, :]
        policy: tl.constexpr = "evict_first" if ROWS <= 32 else ""
        w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy=policy)
        tokens = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
        acc = dot_tile(w, tokens.T, acc, PROMOTE)
        w_ptrs += 128
        x_ptrs += 128
    return acc


@triton.jit
def _gate_up_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    order,
    tiles,
    top_k: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    STAGES: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    """act(w13 @ x + bias) of sorted rows: [P, N/2] in out's dtype."""
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs()
    start_next()
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    position = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < tl.load(tiles + tile * 3 + 2)
    expert = expert.to(tl.int64)
    token = tl.load(order + position, mask=mask, other=0) // top_k
    # tile rows r and r + 8 hold a gate and its up: one thread's rows of the product
    q = tl.arange(0, 64)
    row = unit * 64 + 2 * (q // 16 * 8 + q % 8) + q // 8 % 2
    acc = _products(
        x, weight + expert * N * K, row, row < N, token, mask, K, KP, ROWS, STAGES, PROMOTE
    )
    acc *= tl.load(weight_scale + expert * N + row, mask=row < N, other=0.0)[:, None]
    acc *= tl.load(x_scale + token, mask=mask, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + expert * N + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    gate, up = acc.reshape(4, 2, 8, ROWS).permute(0, 2, 3, 1).reshape(32, ROWS, 2).split()
    if SILU:
        act = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        act = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    column = unit * 32 + tl.arange(0, 32)
    o_ptrs = out + position.to(tl.int64)[None, :] * (N // 2) + column[:, None]
    o_mask = mask[None, :] & (column < N // 2)[:, None]
    tl.store(o_ptrs, round_to(act, out.dtype.element_ty), mask=o_mask)


@triton.jit
def _down_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    """w2 @ x + bias of sorted rows: [P, N] in out's dtype."""
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs()
    start_next()
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    position = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    mask = tl.arange(0, ROWS) < tl.load(tiles + tile * 3 + 2)
    expert = expert.to(tl.int64)
    row = unit * 64 + tl.arange(0, 64)
    acc = _products(
        x, weight + expert * N * K, row, row < N, position, mask, K, KP, ROWS, STAGES, PROMOTE
    )
    acc *= tl.load(weight_scale + expert * N + row, mask=row < N, other=0.0)[:, None]
    acc *= tl.load(x_scale + position, mask=mask, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + expert * N + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    o_ptrs = out + position.to(tl.int64)[None, :] * N + row[:, None]
    o_mask = mask[None, :] & (row < N)[:, None]
    tl.store(o_ptrs, round_to(acc, out.dtype.element_ty), mask=o_mask)


def moe_fp8(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    activation: str = "swigluoai",
) -> torch.Tensor:
    """FP8 experts; see kernels/moe for the contract."""
    check_dtype("x", x, HALF_DTYPES)
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    experts, rows13, _ = w13.shape
    pairs, inter = tokens * top_k, rows13 // 2
    rows = fp8_rows(pairs, experts)
    tile = {"ROWS": rows, "STAGES": 4, "PROMOTE": rows <= 16, "num_warps": 4}
    options = pdl_options(x.device)
    routing = route(
        router_logits, top_k, renormalize, expert_map, experts, rows, x, 1, permute=False
    )
    assert routing.codes is not None
    tiles = routing.tiles.shape[0]
    act = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(cdiv(rows13, 64), tiles)](
        routing.codes,
        routing.scale,
        w13,
        w13_scale,
        w13_bias,
        act,
        routing.order,
        routing.tiles,
        top_k=top_k,
        N=rows13,
        K=hidden,
        KP=routing.codes.shape[2],
        SILU=activation == "silu",
        **tile,
        **options,
    )
    codes, scale = encode_rows(act, 1, permute=False)
    y_dtype = torch.float32 if rows <= 32 else torch.bfloat16
    y = torch.empty(1, pairs, hidden, dtype=y_dtype, device=x.device)
    _down_kernel[(cdiv(hidden, 64), tiles)](
        codes,
        scale,
        w2,
        w2_scale,
        w2_bias,
        y,
        routing.tiles,
        N=hidden,
        K=inter,
        KP=codes.shape[2],
        **tile,
        **options,
    )
    return combine(routing, y, out)
