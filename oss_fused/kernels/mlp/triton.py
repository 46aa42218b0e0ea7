# SPDX-License-Identifier: MIT
"""activation(gate) * up with FP8 quantisation behind it: x [T, 2 I] -> q [T, I], scale.

y = round(round(act(gate)) * up), rounded to x.dtype where the unfused operations round;
q, scale = quantise(y). A row's scale needs its largest value: one CTA a row, or, for few rows,
many CTAs that leave y and the largest value of their part to a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import KEPT, pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import (
    INTERPRETED,
    magnitude_bits,
    quantize_dynamic,
    quantize_static,
    round_to,
    scale_of_amax,
)
from oss_fused.kernels.token_tiles import empty_token_codes

_MAX_INTERMEDIATE = 65536
# up to so many rows, CTAs of so many columns: one CTA takes 3 us to activate 14336 (H200)
_SPLIT_ROWS = 32
_PART = 1024
# columns of a CTA that quantises, of two warps
_CODED_PART = 512

# x / (1 + 2^(-x log2(e)))
_SILU_ASM = tl.constexpr("""{
    .reg .f32 power;
    mul.f32 power, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 power, power;
    add.f32 power, power, 0f3F800000;
    rcp.approx.ftz.f32 power, power;
    mul.f32 $0, $1, power;
}""")


@triton.jit
def _silu(x):
    """``x * sigmoid(x)`` with a relative error of about 2^-21 + |x| * 2^-24; 0 below -87.4.

    Triton's division also serves denormal quotients. That takes a quarter of the instructions of
    the launch that activates and quantises.
    """
    if INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            _SILU_ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU (erf form) or GELU (tanh form) of float32 values."""
    if ACTIVATION == "silu":
        return _silu(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(z) = 1 - 2 / (exp(2 z) + 1), without overflow on either side
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))


@triton.jit
def _act_mul_quant_kernel(
    x,
    static_scale,
    q,
    scale,
    y,
    part_amax,
    stride,
    n_cols,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    POLICY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    start_next()
    wait_for_inputs()
    gate = tl.load(x + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    activated = round_to(activate(gate, ACTIVATION), dtype).to(tl.float32)
    value = round_to(activated * up, dtype)
    if STATIC:
        row_scale = tl.load(static_scale)
        codes = quantize_static(value.to(tl.float32), tl.div_rn(1.0, row_scale))
        tl.store(scale, row_scale, mask=(row == 0) & (part == 0))
        tl.store(q + row * n_cols + cols, codes, mask=mask, eviction_policy=POLICY)
    else:
        amax = tl.max(magnitude_bits(value.to(tl.float32)), 0)
        if y is not None:
            tl.store(y + row * n_cols + cols, value, mask=mask, eviction_policy=POLICY)
            tl.store(part_amax + row * tl.num_programs(1) + part, amax)
        else:
            row_scale = scale_of_amax(amax)
            codes = quantize_dynamic(value.to(tl.float32), tl.div_rn(1.0, row_scale))
            tl.store(scale + row, row_scale)
            tl.store(q + row * n_cols + cols, codes, mask=mask, eviction_policy=POLICY)


@triton.jit
def _quantize_parts_kernel(
    y, part_amax, q, scale, n_cols, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Codes of some columns of a row, for the scale that its parts' largest values give."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    which = tl.arange(0, PARTS)
    start_next()
    wait_for_inputs()
    amax = tl.load(part_amax + row * parts + which, mask=which < parts, other=0)
    value = tl.load(y + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    row_scale = scale_of_amax(tl.max(amax, 0))
    codes = quantize_dynamic(value, tl.div_rn(1.0, row_scale))
    tl.store(q + row * n_cols + cols, codes, mask=mask, eviction_policy=KEPT)
    tl.store(scale + row, row_scale, mask=part == 0)


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``; see kernels/mlp."""
    n_cols = x.shape[-1] // 2
    if n_cols > _MAX_INTERMEDIATE:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected at most {2 * _MAX_INTERMEDIATE} columns"
        )
    rows = as_rows(x)
    q = empty_token_codes((*x.shape[:-1], n_cols), x.device)
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    out_scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
    if q.numel() == 0:
        return q, out_scale.fill_(1.0) if scale is None else out_scale.copy_(scale)
    parts = cdiv(n_cols, _PART) if rows.shape[0] <= _SPLIT_ROWS else 1
    block = next_power_of_2(n_cols) if parts == 1 else _PART
    y = part_amax = None
    if parts > 1 and scale is None:
        y = torch.empty(rows.shape[0], n_cols, dtype=x.dtype, device=x.device)
        part_amax = torch.empty(rows.shape[0], parts, dtype=torch.int32, device=x.device)
    grid = (rows.shape[0], parts)
    _act_mul_quant_kernel[grid](
        rows,
        scale,
        q,
        out_scale,
        y,
        part_amax,
        rows.stride(0),
        n_cols,
        ACTIVATION=activation,
        BLOCK=block,
        STATIC=scale is not None,
        POLICY=activation_policy(rows.shape[0]),
        num_warps=4 if parts > 1 else min(max(block // 1024, 1), 16),
        **pdl_options(x.device),
    )
    if y is not None and part_amax is not None:
        quantize_parts(y, part_amax, q, out_scale)
    return q, out_scale


def quantize_parts(
    y: torch.Tensor, part_amax: torch.Tensor, q: torch.Tensor, scale: torch.Tensor
) -> None:
    """Codes of y [M, I] into ``q``, for the largest magnitudes [M, parts] as float32 bits."""
    n_cols, parts = y.shape[1], part_amax.shape[1]
    _quantize_parts_kernel[(y.shape[0], cdiv(n_cols, _CODED_PART))](
        y,
        part_amax,
        q,
        scale,
        n_cols,
        parts,
        PARTS=next_power_of_2(parts),
        BLOCK=_CODED_PART,
        num_warps=2,
        **pdl_options(y.device),
    )
