# SPDX-License-Identifier: MIT
"""fp8_linear_add: quantise, product, bias and residual add; one launch for few tokens, in Gluon."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from oss_fused.kernels.checks import as_rows, check_shape
from oss_fused.kernels.gemm.stream_parts import (
    BLOCK_K,
    SLABS,
    block_m,
    fits,
    groups,
    product,
    quantize_tokens,
    request_weights,
    stages,
    steps,
)
from oss_fused.kernels.gemm.triton import fp8_linear
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.pipeline import descriptor

# every CTA repeats the quantisation: beyond so many tokens the separate kernels are faster
FUSED_ROWS = 4
# 32 outputs a CTA: the products of the tile's other half are thrown away, but all of the machine
# fetches weights
_BOX = 16


@gluon.jit(do_not_specialize=["m"])
def _linear_add_kernel(
    x,
    weight_desc,
    weight_scale,
    bias,
    residual,
    out,
    m,
    n,
    k,
    stride_x,
    stride_r,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    BOX: gl.constexpr = weight_desc.block_type.shape[0]
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    first = gl.program_id(0) * (2 * BOX)
    tokens = gl.allocate_shared_memory(
        gl.float8e4nv, [GROUPS, BLOCK_M, 4 * WIDTH], weight_desc.layout
    )
    boxes = gl.allocate_shared_memory(
        gl.float8e4nv, [2 * STAGES * SLABS + 64 // BOX - 2, BOX, WIDTH], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    wait_unless(PREFETCH)
    for step in gl.static_range(STAGES):
        request_weights(weight_desc, first, first + BOX, step, step, full, boxes, SLABS)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = first + rows
    in_n = (rows < 2 * BOX) & (cols < n)
    channel = gl.load(weight_scale + cols, mask=in_n, other=0.0)[:, None]
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    mask = in_n[:, None] & (token < m)[None, :]
    wait_for_inputs()
    start_next()
    scale = quantize_tokens(x, None, None, None, tokens, m, k, stride_x, 0, 0.0, ROWS)
    scale = gl.convert_layout(scale, gl.SliceLayout(0, layout))[None, :]
    added = gl.load(
        residual + token.to(gl.int64)[None, :] * stride_r + cols[:, None], mask=mask, other=0.0
    )
    acc = product(weight_desc, first, first + BOX, full, tokens, boxes, STEPS, STAGES, SLABS)
    result = gl.convert_layout(acc, layout) * scale * channel
    if bias is not None:
        result += gl.load(bias + cols, mask=in_n, other=0.0).to(gl.float32)[:, None]
    # the projection is rounded before the sum, as it is where they are two kernels
    result = result.to(dtype).to(gl.float32) + added.to(gl.float32)
    target = out + token.to(gl.int64)[None, :] * n + cols[:, None]
    gl.store(target, result.to(dtype), mask=mask)


def fp8_linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    prefetch_weights: bool = False,
) -> torch.Tensor:
    """``fp8_linear(x, ...) + residual``; see kernels/qkv for the contract."""
    check_shape("residual", residual, (*x.shape[:-1], weight.shape[0]))
    rows, added = as_rows(x), as_rows(residual)
    m, n = rows.shape[0], weight.shape[0]
    if (
        m > FUSED_ROWS
        or input_scale is not None
        or rows.dtype != residual.dtype
        or rows.shape[1] != weight.shape[1]
        or not fits(rows, weight, weight_scale, _BOX)
    ):
        linear = fp8_linear(x, weight, weight_scale, input_scale, bias, prefetch_weights)
        return linear + residual
    k = weight.shape[1]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    _linear_add_kernel[(cdiv(n, 2 * _BOX),)](
        rows,
        descriptor(weight, _BOX, BLOCK_K),
        weight_scale,
        bias,
        added,
        out,
        m,
        n,
        k,
        rows.stride(0),
        added.stride(0),
        STAGES=stages(m, k, _BOX),
        SLABS=SLABS,
        STEPS=steps(k),
        GROUPS=groups(k),
        BLOCK_M=block_m(m),
        ROWS=next_power_of_2(m),
        PREFETCH=prefetch_weights,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out.view(residual.shape)
