# SPDX-License-Identifier: MIT
"""FP8 quantisation: codes q (float8_e4m3fn) and float32 scales with x ~= q * scale.

Per row: one CTA a row, the row in registers where it fits. Per tensor: an amax pass over all
CTAs (integer atomic max, so the result does not depend on their order), then an elementwise one.

Adjusted static scales: per row, the row's amax is known before its codes are written. Per tensor,
the pass that quantises notes the amax of what it had to clip; a second launch looks at that note
on the device, and does nothing where it is empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import FP8, as_rows
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import (
    from_fp8,
    magnitude_bits,
    quantize_dynamic,
    quantize_static,
    round_to,
    scale_of_amax,
    two_levels,
)
from oss_fused.kernels.token_tiles import empty_token_codes

# widest row kept in registers: 64 values a thread with 256 threads
_MAX_ROW_BLOCK = 16384
_BLOCK = 4096
_TL_DTYPE = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _store_row(values, bits, q, cols, n_cols, LEVELS: tl.constexpr, POLICY: tl.constexpr):
    """Store the codes of (a part of) a row whose amax has these bits; returns the row's scale."""
    if LEVELS == 1:
        row_scale = scale_of_amax(bits)
        codes = quantize_dynamic(values, tl.div_rn(1.0, row_scale))
    else:
        codes, rest, row_scale = two_levels(values, bits)
        tl.store(q + n_cols + cols, rest, mask=cols < n_cols, eviction_policy=POLICY)
    tl.store(q + cols, codes, mask=cols < n_cols, eviction_policy=POLICY)
    return row_scale


@triton.jit
def _quantize_row_kernel(
    x,
    q,
    scale,
    stride,
    n_cols,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
    LEVELS: tl.constexpr,
    POLICY: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    q += row * (LEVELS * n_cols)
    offs = tl.arange(0, BLOCK)
    if LOOP:
        bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n_cols, BLOCK):
            cols = start + offs
            values = tl.load(x + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(values))
        amax = tl.max(bits, 0)
        row_scale = scale_of_amax(amax)
        for start in range(0, n_cols, BLOCK):
            cols = start + offs
            values = tl.load(x + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            row_scale = _store_row(values, amax, q, cols, n_cols, LEVELS, POLICY)
    else:
        values = tl.load(x + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
        amax = tl.max(magnitude_bits(values), 0)
        row_scale = _store_row(values, amax, q, offs, n_cols, LEVELS, POLICY)
    tl.store(scale + row, row_scale)


@triton.jit
def _place(n_cols, BLOCK: tl.constexpr):
    """Row, first column and number of columns of a program.

    One axis has all programs: CUDA allows 65535 along the others.
    """
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    return row, first, tl.minimum(n_cols - first, BLOCK).to(tl.int32)


@triton.jit
def _amax_kernel(x, amax_bits, stride, n_cols, BLOCK: tl.constexpr):
    row, first, count = _place(n_cols, BLOCK)
    cols = tl.arange(0, BLOCK)
    values = tl.load(x + (row * stride + first) + cols, mask=cols < count, other=0.0).to(tl.float32)
    tl.atomic_max(amax_bits, tl.max(magnitude_bits(values), 0))


@triton.jit
def _scale_kernel(amax_bits, scale):
    tl.store(scale, scale_of_amax(tl.load(amax_bits)))


@triton.jit
def _quantize_static_kernel(x, q, scale, stride, scale_stride, n_cols, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    row, first, count = _place(n_cols, BLOCK)
    cols = tl.arange(0, BLOCK)
    inv = tl.div_rn(1.0, tl.load(scale + row * scale_stride))
    values = tl.load(x + (row * stride + first) + cols, mask=cols < count, other=0.0).to(tl.float32)
    tl.store(q + (row * n_cols + first) + cols, quantize_static(values, inv), mask=cols < count)


@triton.jit
def _finite_bits(values):
    # a NaN or an infinity says nothing about the range of the finite values
    bits = magnitude_bits(values)
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def _fitted_scale(least, amax_bits):
    return tl.where(amax_bits == 0, least, tl.maximum(least, scale_of_amax(amax_bits)))


@triton.jit
def _quantize_row_adjusted_kernel(
    x, q, scale, out_scale, stride, scale_stride, n_cols, BLOCK: tl.constexpr, LOOP: tl.constexpr
):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    q += row * n_cols
    offs = tl.arange(0, BLOCK)
    least = tl.load(scale + row * scale_stride)
    if LOOP:
        bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n_cols, BLOCK):
            cols = start + offs
            values = tl.load(x + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, _finite_bits(values))
        row_scale = _fitted_scale(least, tl.max(bits, 0))
        inv = tl.div_rn(1.0, row_scale)
        for start in range(0, n_cols, BLOCK):
            cols = start + offs
            values = tl.load(x + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            tl.store(q + cols, quantize_static(values, inv), mask=cols < n_cols)
    else:
        values = tl.load(x + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
        row_scale = _fitted_scale(least, tl.max(_finite_bits(values), 0))
        inv = tl.div_rn(1.0, row_scale)
        tl.store(q + offs, quantize_static(values, inv), mask=offs < n_cols)
    tl.store(out_scale + row, row_scale)


@triton.jit
def _quantize_noting_overflow_kernel(
    x, q, scale, clipped_bits, stride, n_cols, BLOCK: tl.constexpr
):
    row, first, count = _place(n_cols, BLOCK)
    cols = tl.arange(0, BLOCK)
    least = tl.load(scale)
    values = tl.load(x + (row * stride + first) + cols, mask=cols < count, other=0.0).to(tl.float32)
    codes = quantize_static(values, tl.div_rn(1.0, least))
    tl.store(q + (row * n_cols + first) + cols, codes, mask=cols < count)
    amax_bits = tl.max(_finite_bits(values), 0)
    if _fitted_scale(least, amax_bits) > least:
        tl.atomic_max(clipped_bits, amax_bits)


@triton.jit
def _requantize_clipped_kernel(
    x, q, scale, clipped_bits, out_scale, stride, n_cols, BLOCK: tl.constexpr
):
    row, first, count = _place(n_cols, BLOCK)
    cols = tl.arange(0, BLOCK)
    amax_bits = tl.load(clipped_bits)
    fitted = _fitted_scale(tl.load(scale), amax_bits)
    tl.store(out_scale, fitted)
    if amax_bits != 0:
        values = tl.load(x + (row * stride + first) + cols, mask=cols < count, other=0.0).to(
            tl.float32
        )
        codes = quantize_static(values, tl.div_rn(1.0, fitted))
        tl.store(q + (row * n_cols + first) + cols, codes, mask=cols < count)


@triton.jit
def _dequantize_kernel(
    q, scale, out, stride, scale_stride, n_cols, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    row, first, count = _place(n_cols, BLOCK)
    cols = tl.arange(0, BLOCK)
    mask = cols < count
    codes = tl.load(q + (row * stride + first) + cols, mask=mask, other=0.0)
    values = from_fp8(codes) * tl.load(scale + row * scale_stride)
    tl.store(out + (row * n_cols + first) + cols, round_to(values, DTYPE), mask=mask)


def quantize_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, strategy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` to FP8 E4M3; see kernels/quantize for the contract."""
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    # other strategies are those of weights
    if strategy == "token":
        q = empty_token_codes(x.shape, x.device)
    else:
        q = torch.empty(x.shape, dtype=FP8, device=x.device)
    if scale is not None:
        _quantize_static(rows, q, scale)
        return q, scale.clone()
    if strategy == "tensor":
        amax_bits = torch.zeros(1, dtype=torch.int32, device=x.device)
        out_scale = torch.empty(1, dtype=torch.float32, device=x.device)
        grid = (n_rows * cdiv(n_cols, _BLOCK),)
        if x.numel():
            _amax_kernel[grid](rows, amax_bits, rows.stride(0), n_cols, BLOCK=_BLOCK)
        _scale_kernel[(1,)](amax_bits, out_scale, num_warps=1)
        _quantize_static(rows, q, out_scale)
        return q, out_scale
    out_scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if n_cols == 0:
        return q, out_scale.fill_(1.0)
    _quantize_rows(rows, q, out_scale, 1)
    return q, out_scale


def quantize_levels(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both levels [2 R, C] of ``rows`` [R, C], C at least 1, and their scales [R, 1]."""
    n_rows, n_cols = rows.shape
    q = empty_token_codes((2 * n_rows, n_cols), rows.device)
    scale = torch.empty(n_rows, 1, dtype=torch.float32, device=rows.device)
    _quantize_rows(rows, q, scale, 2)
    return q, scale


def _quantize_rows(rows: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, levels: int) -> None:
    n_rows, n_cols = rows.shape
    if n_rows == 0:
        return
    block = min(next_power_of_2(n_cols), _MAX_ROW_BLOCK)
    _quantize_row_kernel[(n_rows,)](
        rows,
        q,
        scale,
        rows.stride(0),
        n_cols,
        BLOCK=block,
        LOOP=n_cols > block,
        LEVELS=levels,
        POLICY=activation_policy(n_rows),
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(rows.device),
    )


def quantize_fp8_adjusted(
    x: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with ``scale``, raised where it is too small; see kernels/quantize."""
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    if x.numel() == 0:
        return q, scale.clone()
    out_scale = torch.empty(scale.shape, dtype=torch.float32, device=x.device)
    if scale.numel() > 1:
        column = scale.reshape(-1, 1)
        block = min(next_power_of_2(n_cols), _MAX_ROW_BLOCK)
        _quantize_row_adjusted_kernel[(n_rows,)](
            rows,
            q,
            column,
            out_scale,
            rows.stride(0),
            column.stride(0),
            n_cols,
            BLOCK=block,
            LOOP=n_cols > block,
            num_warps=min(max(block // 512, 1), 8),
            **pdl_options(x.device),
        )
        return q, out_scale
    clipped_bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    block = min(next_power_of_2(n_cols), _BLOCK)
    grid, warps = (n_rows * cdiv(n_cols, block),), min(max(block // 512, 1), 4)
    _quantize_noting_overflow_kernel[grid](
        rows, q, scale, clipped_bits, rows.stride(0), n_cols, BLOCK=block, num_warps=warps
    )
    _requantize_clipped_kernel[grid](
        rows,
        q,
        scale,
        clipped_bits,
        out_scale,
        rows.stride(0),
        n_cols,
        BLOCK=block,
        num_warps=warps,
    )
    return q, out_scale


def _quantize_static(rows: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    n_rows, n_cols = rows.shape
    if rows.numel() == 0:
        return
    each = scale.numel() != 1
    scale = scale.reshape(-1, 1) if each else scale
    block = min(next_power_of_2(n_cols), _BLOCK)
    _quantize_static_kernel[(n_rows * cdiv(n_cols, block),)](
        rows,
        q,
        scale,
        rows.stride(0),
        scale.stride(0) if each else 0,
        n_cols,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 4),
        **pdl_options(rows.device),
    )


def dequantize_fp8(q: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``q * scale`` in float32, rounded to ``out_dtype``; see kernels/quantize."""
    rows = as_rows(q)
    n_rows, n_cols = rows.shape
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(n_cols), _BLOCK)
    _dequantize_kernel[(n_rows * cdiv(n_cols, block),)](
        rows,
        scale.contiguous(),
        out,
        rows.stride(0),
        0 if scale.numel() == 1 else 1,
        n_cols,
        DTYPE=_TL_DTYPE[out_dtype],
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 4),
    )
    return out
