# SPDX-License-Identifier: MIT
"""Decode projection of at most 16 tokens in Gluon: [norm,] QKV product, RoPE, cache write.

A CTA takes 32 rotation pairs of one head: 64 rows of the weight, in two boxes of 32 rows, so that
both halves of a pair meet in its accumulator. Its weights are requested before it waits for the
kernel before. With NORM the first CTAs normalise and quantise one token each and count it in
``ready``; all others wait for the count while their weights arrive, so that no launch lies
between. The products are those of gemm_stream, the rotation that of rope_kv.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oss_fused.kernels.triton.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.validation import FP8

MAX_ROWS = 16
_PAIRS = 32
_BLOCK_K = 128
# bytes of shared memory for a CTA's weights and tokens
_SHARED = 220 * 1024
# fewer weight tiles in flight than these stream no faster than the separate kernels
_MIN_STAGES = 8


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _norm_row(
    row, x, residual, gain, codes, scales, residual_out, stride_x, stride_r, hidden, eps,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """add_rms_norm_quant of one row; the arithmetic is norm.py's."""
    dtype: gl.constexpr = x.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, BLOCK, layout)
    mask = cols < hidden
    h = gl.load(x + row * stride_x + cols, mask=mask, other=0.0).to(gl.float32)
    if residual is not None:
        h += gl.load(residual + row * stride_r + cols, mask=mask, other=0.0).to(gl.float32)
        h = h.to(dtype).to(gl.float32)
    weight = gl.load(gain + cols, mask=mask, other=0.0).to(gl.float32)
    rstd = gl.rsqrt(gl.reduce(h * h, 0, _sum) / hidden + eps)
    y = ((h * rstd).to(dtype).to(gl.float32) * weight).to(dtype).to(gl.float32)
    bits = gl.reduce(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0, _larger)
    scale = gl.div_rn(bits.to(gl.float32, bitcast=True), 448.0)
    scale = gl.maximum(scale.to(gl.int32, bitcast=True), 0x00800000).to(gl.float32, bitcast=True)
    scale = gl.where(bits == 0, 1.0, scale)
    gl.store(codes + row * hidden + cols, (y * gl.div_rn(1.0, scale)).to(gl.float8e4nv), mask=mask)
    gl.store(residual_out + row * hidden + cols, h.to(dtype), mask=mask)
    gl.store(scales + row, scale)


@gluon.jit
def _fence_proxies():
    """Order plain writes to memory and reads of it by the tensor memory accelerator."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _store(target, values, mask, scale):
    if scale is not None:
        x = values.to(gl.float32)
        finite = (x.to(gl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        y = gl.minimum(gl.maximum(x * gl.div_rn(1.0, gl.load(scale)), -448.0), 448.0)
        gl.store(target, gl.where(finite, y, float("nan")).to(gl.float8e4nv), mask=mask)
    else:
        gl.store(target, values, mask=mask)


@gluon.jit
def _request(desc, first_n, half_n, step, slot, full, halves):
    """Ask for both halves of a weight tile, into ring slot ``slot``."""
    BLOCK_K: gl.constexpr = desc.block_type.shape[1]
    mbarrier.expect(full.index(slot), 2 * desc.block_type.shape[0] * BLOCK_K)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            desc,
            [first_n + half * half_n, step * BLOCK_K],
            full.index(slot),
            halves.index(2 * slot + half),
        )


@gluon.jit(do_not_specialize=["m", "slots", "heads"])
def _qkv_kernel(
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    bias,
    x,
    residual,
    gain,
    codes,
    residual_out,
    ready,
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
    n,
    k,
    slots,
    block_size,
    heads,
    kv_heads,
    stride_x,
    stride_r,
    stride_table,
    key_block,
    key_page,
    key_head,
    value_block,
    value_page,
    value_head,
    eps,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    NORM_BLOCK: gl.constexpr,
):
    start_next()
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    PAIRS: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    HALF: gl.constexpr = HEAD_DIM // 2
    PARTS: gl.constexpr = HALF // PAIRS
    dtype: gl.constexpr = q_out.dtype.element_ty if q_scale is None else cos_sin.dtype.element_ty
    pid = gl.program_id(0)
    head = pid // PARTS
    first = (pid % PARTS) * PAIRS
    first_n = head * HEAD_DIM + first

    tokens = gl.allocate_shared_memory(gl.float8e4nv, [STEPS, BLOCK_M, BLOCK_K], a_desc.layout)
    halves = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, PAIRS, BLOCK_K], b_desc.layout)
    weights = halves._reinterpret(gl.float8e4nv, [STAGES, 2 * PAIRS, BLOCK_K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(slot), count=1)
    for step in gl.static_range(STAGES):
        _request(b_desc, first_n, HALF, step, step, full, halves)
    wait_for_inputs()
    if NORM_BLOCK:
        for row in range(pid, m, gl.num_programs(0)):
            _norm_row(
                row, x, residual, gain, codes, a_scale, residual_out, stride_x, stride_r, k, eps,
                NORM_BLOCK,
            )  # fmt: skip
            _fence_proxies()
            gl.thread_barrier()
            gl.atomic_add(ready, 1, sem="release")
        count = gl.atomic_add(ready, 0, sem="acquire")
        while count < m:
            count = gl.atomic_add(ready, 0, sem="acquire")
        _fence_proxies()
    mbarrier.expect(full.index(STAGES), STEPS * BLOCK_M * BLOCK_K)
    for step in gl.static_range(STEPS):
        tma.async_copy_global_to_shared(
            a_desc, [0, step * BLOCK_K], full.index(STAGES), tokens.index(step)
        )

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

    product: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32]
    )
    acc = gl.zeros([2 * PAIRS, BLOCK_M], gl.float32, layout=product)
    mbarrier.wait(full.index(STAGES), 0)
    for step in gl.static_range(STEPS):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) % 2)
        acc = warpgroup_mma(
            weights.index(step % STAGES), tokens.index(step).permute((1, 0)), acc, is_async=True
        )
        if step >= 1 and step - 1 + STAGES < STEPS:
            # the product before this one has left its slot
            acc = warpgroup_mma_wait(1, deps=[acc])
            _request(b_desc, first_n, HALF, step - 1 + STAGES, (step - 1) % STAGES, full, halves)
    acc = warpgroup_mma_wait(0, deps=[acc])

    both = gl.convert_layout(acc.reshape([2, PAIRS, BLOCK_M]).permute((1, 2, 0)), paired)
    left, right = gl.split(both)
    row_scale = gl.load(a_scale + token, mask=in_m, other=0.0)[None, :]
    left = left * row_scale * left_scale[:, None]
    right = right * row_scale * right_scale[:, None]
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
    if NORM_BLOCK:
        # the last CTA to pass resets the counts for the next launch
        last = gl.atomic_add(ready + 1, 1) == gl.num_programs(0) - 1
        gl.store(ready, 0, mask=last)
        gl.store(ready + 1, 0, mask=last)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    # one pair for all layers: their launches follow one another on one stream
    return torch.zeros(2, dtype=torch.int32, device=device)


@functools.cache
def _runs(device: torch.device) -> bool:
    """Whether ``device`` has Hopper's instructions; the interpreter knows no Gluon."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can address the rows of ``tensor``."""
    return tensor.stride(0) % 16 == 0 and tensor.data_ptr() % 16 == 0 and tensor.stride(1) == 1


def _stages(rows: int, k: int) -> int:
    """Weight tiles in flight: all of K, or what shared memory leaves beside the tokens."""
    steps = triton.cdiv(k, _BLOCK_K)
    return min(steps, (_SHARED - steps * _block_m(rows) * _BLOCK_K) // (2 * _PAIRS * _BLOCK_K))


def _block_m(rows: int) -> int:
    return 8 if rows <= 8 else 16


def fusible(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    is_neox: bool,
    norms: tuple[torch.Tensor | None, ...],
    cache_scales: tuple[torch.Tensor | None, ...],
) -> bool:
    """Whether this kernel takes the projection."""
    rows, k = x.shape
    head_dim = key_cache.shape[3]
    return (
        _runs(x.device)
        and 0 < rows <= MAX_ROWS
        and is_neox
        and norms == (None, None)
        and (key_cache.dtype != FP8 or None not in cache_scales)
        and cos_sin_cache.shape[1] == head_dim
        and head_dim % (2 * _PAIRS) == 0
        and weight_scale.numel() == weight.shape[0]
        and _stages(rows, k) >= min(_MIN_STAGES, triton.cdiv(k, _BLOCK_K))
        and aligned(weight)
    )


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    gain: torch.Tensor | None,
    norm_eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q and, where ``gain`` asks for the norm, the new residual; arguments that fit."""
    m, k = x.shape
    n = weight.shape[0]
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    device = x.device
    q = torch.empty(m, num_heads * head_dim, dtype=dtype if q_scale is None else FP8, device=device)
    codes, residual_out, ready = x, None, None
    if gain is not None:
        codes = torch.empty(m, k, dtype=FP8, device=device)
        x_scale = torch.empty(m, 1, dtype=torch.float32, device=device)
        residual_out = torch.empty(m, k, dtype=dtype, device=device)
        ready = _counters(device)
    layout = gl.NVMMASharedLayout(_BLOCK_K, 8)
    _qkv_kernel[(n // (2 * _PAIRS),)](
        TensorDescriptor(codes, [m, k], [codes.stride(0), 1], [_block_m(m), _BLOCK_K], layout),
        TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [_PAIRS, _BLOCK_K], layout),
        x_scale,
        weight_scale,
        bias,
        None if gain is None else x,
        residual,
        gain,
        None if gain is None else codes,
        residual_out,
        ready,
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
        n,
        k,
        slot_mapping.shape[0],
        block_size,
        num_heads,
        kv_heads,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        cos_sin_cache.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        norm_eps,
        HEAD_DIM=head_dim,
        STAGES=_stages(m, k),
        STEPS=triton.cdiv(k, _BLOCK_K),
        NORM_BLOCK=0 if gain is None else triton.next_power_of_2(k),
        num_warps=4,
        **pdl_options(device),
    )
    return q, residual_out
