# SPDX-License-Identifier: MIT
"""activation(gate) * up with FP8 quantisation behind it: x [T, 2 I] -> q [T, I], scale.

y = round(round(act(gate)) * up), rounded to x.dtype where the unfused operations round;
q, scale = quantise(y). One CTA a row: a row's scale needs its largest value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.triton.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.triton.numerics import (
    magnitude_bits,
    quantize_dynamic,
    quantize_static,
    round_to,
    scale_of_amax,
)
from oss_fused.kernels.validation import FP8, as_rows, check_act_quant

_MAX_INTERMEDIATE = 65536


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU (erf form) or GELU (tanh form) of float32 values."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
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
    stride,
    n_cols,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    wait_for_inputs()
    start_next()
    gate = tl.load(x + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    activated = round_to(activate(gate, ACTIVATION), dtype).to(tl.float32)
    y = round_to(activated * up, dtype).to(tl.float32)
    if STATIC:
        row_scale = tl.load(static_scale)
        codes = quantize_static(y, tl.div_rn(1.0, row_scale))
        tl.store(scale, row_scale, mask=row == 0)
    else:
        row_scale = scale_of_amax(tl.max(magnitude_bits(y), 0))
        codes = quantize_dynamic(y, tl.div_rn(1.0, row_scale))
        tl.store(scale + row, row_scale)
    tl.store(q + row * n_cols + cols, codes, mask=mask)


def act_mul_quant(
    x: torch.Tensor, activation: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of ``activation(x[..., :I]) * x[..., I:]``; see ops/mlp.py."""
    check_act_quant(x, activation, scale)
    n_cols = x.shape[-1] // 2
    if n_cols > _MAX_INTERMEDIATE:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: expected at most {2 * _MAX_INTERMEDIATE} columns"
        )
    rows = as_rows(x)
    q = torch.empty(*x.shape[:-1], n_cols, dtype=FP8, device=x.device)
    scale_shape = (*x.shape[:-1], 1) if scale is None else scale.shape
    out_scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
    if q.numel() == 0:
        return q, out_scale.fill_(1.0) if scale is None else out_scale.copy_(scale)
    block = triton.next_power_of_2(n_cols)
    _act_mul_quant_kernel[(rows.shape[0],)](
        rows,
        scale,
        q,
        out_scale,
        rows.stride(0),
        n_cols,
        ACTIVATION=activation,
        BLOCK=block,
        STATIC=scale is not None,
        num_warps=min(max(block // 1024, 1), 16),
        **pdl_options(x.device),
    )
    return q, out_scale
