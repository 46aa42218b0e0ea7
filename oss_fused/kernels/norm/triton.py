# SPDX-License-Identifier: MIT
"""Residual add + RMSNorm + FP8 quantisation in one pass over the row.

h = round(x + residual); y = round(round(h * rsqrt(mean(h^2) + eps)) * weight), rounded to
x.dtype where round() stands; q, scale = quantise(y). One CTA a row, the row stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FP8, as_rows
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.levels import has_two_levels
from oss_fused.kernels.numerics import (
    magnitude_bits,
    quantize_dynamic,
    quantize_static,
    round_to,
    scale_of_amax,
    two_levels,
)
from oss_fused.kernels.token_tiles import empty_token_codes

_MAX_HIDDEN = 32768
# Rows and columns of which the results stay in an H200's L2 when what is read passes it as a
# stream: 7 % faster. Fewer rows fit there in any case, more do not. The rows are one bucket of
# kernels/tiles, for each of which a server compiles its kernels.
_STREAMED_ROWS = range(1025, 2049)
_STREAMED_COLUMNS = range(4096)
# rows that leave most multiprocessors idle: more warps take each
_FEW_ROWS = 16
# rows above which the next kernel's weights come behind what this one reads: a bucket's last
_EARLY_START_ROWS = 64


@triton.jit
def normalized(hidden, gain, n_cols, eps, dtype: tl.constexpr):
    """RMSNorm of a float32 row that holds ``n_cols`` values and zeros, rounded to ``dtype``."""
    rstd = tl.rsqrt(tl.sum(hidden * hidden, 0) / n_cols + eps)
    return round_to(round_to(hidden * rstd, dtype).to(tl.float32) * gain, dtype)


@triton.jit
def store_codes(y, static_scale, target, levels, n_cols, scale, row, mask, POLICY: tl.constexpr):
    """Store the codes of a row at ``target``, and its scale; static_scale None: the row's own.

    ``levels``: where the levels of the row begin, ``n_cols`` codes each; None: it has one.
    """
    y = y.to(tl.float32)
    if levels is not None:
        codes, rest, row_scale = two_levels(y, tl.max(magnitude_bits(y), 0))
        tl.store(levels, codes, mask=mask, eviction_policy=POLICY)
        tl.store(levels + n_cols, rest, mask=mask, eviction_policy=POLICY)
        tl.store(scale + row, row_scale)
    elif static_scale is not None:
        row_scale = tl.load(static_scale)
        codes = quantize_static(y, tl.div_rn(1.0, row_scale))
        tl.store(scale, row_scale, mask=row == 0)
    else:
        row_scale = scale_of_amax(tl.max(magnitude_bits(y), 0))
        codes = quantize_dynamic(y, tl.div_rn(1.0, row_scale))
        tl.store(scale + row, row_scale)
    tl.store(target, codes, mask=mask, eviction_policy=POLICY)


@triton.jit
def _add_rms_norm_quant_kernel(
    x,
    residual,
    weight,
    static_scale,
    q,
    levels,
    scale,
    residual_out,
    normed,
    stride_x,
    stride_part,
    stride_r,
    n_cols,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE_NORMED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STREAM: tl.constexpr,
    POLICY: tl.constexpr,
    START_FIRST: tl.constexpr,
):
    """The norm of a row: x in PARTS addends, ``stride_part`` apart, and the residual."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = residual_out.dtype.element_ty
    READ: tl.constexpr = "evict_first" if STREAM else ""
    WRITE: tl.constexpr = ".cs" if STREAM else ""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    wait_unless(PREFETCH)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if START_FIRST:
        start_next()
    wait_for_inputs()
    if not START_FIRST:
        start_next()
    place = x + row * stride_x + cols
    hidden = tl.load(place, mask=mask, other=0.0, eviction_policy=READ).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        place += stride_part
        hidden += tl.load(place, mask=mask, other=0.0, eviction_policy=READ)
    if PARTS > 1:
        hidden = round_to(hidden, dtype).to(tl.float32)
    if residual is not None:
        place = residual + row * stride_r + cols
        hidden += tl.load(place, mask=mask, other=0.0, eviction_policy=READ).to(tl.float32)
        hidden = round_to(hidden, dtype).to(tl.float32)
    place = residual_out + row * n_cols + cols
    tl.store(place, hidden.to(dtype), mask=mask, cache_modifier=WRITE, eviction_policy=POLICY)
    y = normalized(hidden, gain, n_cols, eps, dtype)
    if WRITE_NORMED:
        tl.store(normed + row * n_cols + cols, y, mask=mask, eviction_policy=POLICY)
    # eight codes a thread, as it holds them: 16 would pass shared memory first
    place = tl.max_contiguous(cols, 8)
    both = None if levels is None else levels + row * 2 * n_cols + place
    store_codes(y, static_scale, q + row * n_cols + place, both, n_cols, scale, row, mask, POLICY)


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    write_normed: bool = True,
    prefetch_weights: bool = False,
    bf16_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale, new residual, normed row, levels; see kernels/norm for the contract."""
    options = (weight, eps, scale, write_normed, prefetch_weights, bf16_rows)
    return _norm_of_sum(x, as_rows(x), 1, residual, *options)


def sums_norm_quant(
    sums: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    prefetch_weights: bool,
    bf16_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``add_rms_norm_quant`` of ``sums`` [M, H], or of the sum of its float32 parts [P, M, H].

    That sum is rounded to the dtype of ``residual`` [M, H]. Without normed rows.
    """
    rows, parts = (sums, 1) if sums.dim() == 2 else (sums[0], len(sums))
    options = (weight, eps, scale, False, prefetch_weights, bf16_rows)
    return _norm_of_sum(residual, rows, parts, residual, *options)


def _norm_of_sum(
    x: torch.Tensor,
    rows: torch.Tensor,
    parts: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    write_normed: bool,
    prefetch_weights: bool,
    bf16_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The launch: results have the shape and dtype of ``x``, whose first part is ``rows``."""
    n_cols = x.shape[-1]
    if n_cols > _MAX_HIDDEN:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected at most {_MAX_HIDDEN} columns"
        )
    residual_rows = None if residual is None else as_rows(residual)
    q = empty_token_codes(x.shape, x.device)
    residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape if write_normed else (0,), dtype=x.dtype, device=x.device)
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    out_scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
    levels = torch.empty(2 * bf16_rows, n_cols, dtype=FP8, device=x.device)
    if x.numel() == 0:
        if scale is not None:
            out_scale.copy_(scale)
        return q, out_scale, residual_out, normed, levels
    block = next_power_of_2(n_cols)
    of_warp = 512 if rows.shape[0] <= _FEW_ROWS else 1024
    _add_rms_norm_quant_kernel[(rows.shape[0],)](
        rows,
        residual_rows,
        weight,
        scale,
        q,
        levels if has_two_levels(rows.shape[0], bf16_rows) else None,
        out_scale,
        residual_out,
        normed,
        rows.stride(0),
        rows.numel() if parts > 1 else 0,
        0 if residual_rows is None else residual_rows.stride(0),
        n_cols,
        eps,
        PARTS=parts,
        BLOCK=block,
        WRITE_NORMED=write_normed,
        PREFETCH=prefetch_weights,
        STREAM=rows.shape[0] in _STREAMED_ROWS and n_cols in _STREAMED_COLUMNS,
        POLICY=activation_policy(rows.shape[0]),
        START_FIRST=rows.shape[0] <= _EARLY_START_ROWS,
        num_warps=min(max(block // of_warp, 1), 16),
        **pdl_options(x.device),
    )
    return q, out_scale, residual_out, normed, levels
