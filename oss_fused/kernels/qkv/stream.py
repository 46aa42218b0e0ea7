# SPDX-License-Identifier: MIT
"""qkv_rope_kv of at most 16 tokens in one Gluon kernel.

A CTA takes 32 rotation pairs of one head. These are 64 rows of the weight, in two boxes of 32
rows, so that both halves of a pair meet in its accumulator.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.pipeline import descriptor
from oss_fused.kernels.qkv.product import (
    BLOCK_K,
    GROUP_K,
    SLABS,
    block_m,
    fits,
    groups,
    product,
    request_tokens,
    request_weights,
    runs_on,
    stages,
    steps,
)

_PAIRS = 32


@gluon.jit
def _store(target, values, mask, scale):
    if scale is not None:
        x = values.to(gl.float32)
        finite = (x.to(gl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        y = gl.minimum(gl.maximum(x * gl.div_rn(1.0, gl.load(scale)), -448.0), 448.0)
        gl.store(target, gl.where(finite, y, float("nan")).to(gl.float8e4nv), mask=mask)
    else:
        gl.store(target, values, mask=mask)


@gluon.jit(do_not_specialize=["m", "slots", "heads"])
def _qkv_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    bias,
    positions,
    cos_sin,
    q_out,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    q_scale,
    m,
    slots,
    block_size,
    heads,
    kv_heads,
    stride_table,
    key_block,
    key_page,
    key_head,
    value_block,
    value_page,
    value_head,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    PAIRS: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    HALF: gl.constexpr = HEAD_DIM // 2
    PARTS: gl.constexpr = HALF // PAIRS
    dtype: gl.constexpr = q_out.dtype.element_ty if q_scale is None else cos_sin.dtype.element_ty
    pid = gl.program_id(0)
    head = pid // PARTS
    first = (pid % PARTS) * PAIRS
    first_n = head * HEAD_DIM + first

    tokens = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, BLOCK_M, 4 * BLOCK_K], b_desc.layout)
    boxes = gl.allocate_shared_memory(
        gl.float8e4nv, [2 * STAGES * SLABS, PAIRS, BLOCK_K], b_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(slot), count=1)
    wait_unless(PREFETCH)
    for step in gl.static_range(STAGES):
        request_weights(b_desc, first_n, first_n + HALF, step, step, full, boxes, SLABS)
    wait_for_inputs()
    start_next()
    request_tokens(a_desc, full, tokens, STAGES)

    # one thread has both halves of a pair
    threads_m: gl.constexpr = BLOCK_M // 4
    threads_n: gl.constexpr = 32 // threads_m
    paired: gl.constexpr = gl.BlockedLayout(
        [PAIRS // threads_n, 1, 2], [threads_n, threads_m, 1], [1, gl.num_warps(), 1], [2, 0, 1]
    )
    flat: gl.constexpr = gl.SliceLayout(2, paired)
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, flat))
    in_m = token < m
    pair = first + gl.arange(0, PAIRS, gl.SliceLayout(1, flat))
    left_n = head * HEAD_DIM + pair
    is_value = head >= heads + kv_heads
    left_scale = gl.load(b_scale + left_n)
    right_scale = gl.load(b_scale + left_n + HALF)
    slot_of = gl.load(slot_mapping + token, mask=token < slots, other=-1).to(gl.int64)
    table = gl.load(positions + token, mask=in_m, other=0).to(gl.int64) * stride_table
    angles = cos_sin + table[None, :] + pair[:, None]
    cos = gl.load(angles).to(gl.float32)
    sin = gl.load(angles + HALF).to(gl.float32)

    row_scale = gl.load(a_scale + token, mask=in_m, other=0.0)
    mbarrier.wait(full.index(STAGES), 0)
    acc = product(b_desc, first_n, first_n + HALF, full, tokens, boxes, STEPS, STAGES, SLABS)
    both = gl.convert_layout(acc.reshape([2, PAIRS, BLOCK_M]).permute((1, 2, 0)), paired)
    left, right = gl.split(both)
    left = left * row_scale[None, :] * left_scale[:, None]
    right = right * row_scale[None, :] * right_scale[:, None]
    if bias is not None:
        left += gl.load(bias + left_n).to(gl.float32)[:, None]
        right += gl.load(bias + left_n + HALF).to(gl.float32)[:, None]
    left, right = left.to(dtype), right.to(dtype)
    if not is_value:
        x_left, x_right = left.to(gl.float32), right.to(gl.float32)
        left = (x_left * cos - x_right * sin).to(dtype)
        right = (x_right * cos + x_left * sin).to(dtype)
    if head < heads:
        target = q_out + token.to(gl.int64)[None, :] * (heads * HEAD_DIM) + left_n[:, None]
        mask = (in_m[None, :]) & (pair < HALF)[:, None]
        _store(target, left, mask, q_scale)
        _store(target + HALF, right, mask, q_scale)
    else:
        mask = (in_m & (slot_of >= 0))[None, :] & (pair < HALF)[:, None]
        block = slot_of // block_size
        page = slot_of % block_size
        if is_value:
            at = value_cache + (head - heads - kv_heads).to(gl.int64) * value_head
            target = at + (block * value_block + page * value_page)[None, :] + pair[:, None]
            _store(target, left, mask, v_scale)
            _store(target + HALF, right, mask, v_scale)
        else:
            at = key_cache + (head - heads).to(gl.int64) * key_head
            target = at + (block * key_block + page * key_page)[None, :] + pair[:, None]
            _store(target, left, mask, k_scale)
            _store(target + HALF, right, mask, k_scale)


def joins(device: torch.device, head_dim: int, rotary_dim: int, is_neox: bool) -> bool:
    """Whether this kernel runs on ``device`` and takes that rotary embedding."""
    return runs_on(device) and is_neox and rotary_dim == head_dim and head_dim % (2 * _PAIRS) == 0


def fits_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    key_cache: torch.Tensor,
) -> bool:
    """Whether this kernel takes the projection of ``x``."""
    return (
        fits(x, weight, weight_scale, _PAIRS)
        and x_scale.numel() == x.shape[0]
        and joins(x.device, key_cache.shape[3], cos_sin_cache.shape[1], is_neox)
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    prefetch_weights: bool,
) -> torch.Tensor:
    """Rotated q of arguments that ``fits_projection`` takes."""
    m, k = x.shape
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    q_dtype = out_dtype if q_scale is None else FP8
    q = torch.empty(m, num_heads * head_dim, dtype=q_dtype, device=x.device)
    _qkv_kernel[(weight.shape[0] // (2 * _PAIRS),)](
        descriptor(x, block_m(m), GROUP_K),
        descriptor(weight, _PAIRS, BLOCK_K),
        x_scale,
        weight_scale,
        bias,
        positions,
        cos_sin_cache,
        q,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        q_scale,
        m,
        slot_mapping.shape[0],
        block_size,
        num_heads,
        kv_heads,
        cos_sin_cache.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEAD_DIM=head_dim,
        STAGES=stages(m, k, _PAIRS),
        SLABS=SLABS,
        STEPS=steps(k),
        GROUPS=groups(k),
        BLOCK_M=block_m(m),
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(x.device),
    )
    return q
