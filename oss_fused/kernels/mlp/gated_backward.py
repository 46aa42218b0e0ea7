# SPDX-License-Identifier: MIT
"""Gradients of a gated MLP's projections in one kernel; see kernels/mlp.

Both projections of a tile are recomputed on tensor cores and meet the incoming gradient in the
epilogue, so neither is kept by the forward pass or written here. The plain products that remain
(gradients of x and of the weights) are cuBLAS's: see autograd.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.mlp import reference
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import INTERPRETED, round_to


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Derivative of ``activate``."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        return s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        steep = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * steep


@triton.jit(do_not_specialize=["m"])
def _gated_mlp_backward_kernel(
    grad,
    x,
    gate_weight,
    up_weight,
    d_gate,
    d_up,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    ACTIVATE_GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # tiles of one column of weights are neighbours: they find it in L2
    blocks_m = tl.cdiv(m, BLOCK_M)
    offs_m = (tl.program_id(0) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = (offs_m < m)[:, None]
    in_n = (offs_n < n)[None, :]
    rows_x = x + offs_m.to(tl.int64)[:, None] * k + offs_k[None, :]
    rows_w = offs_n.to(tl.int64)[None, :] * k + offs_k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        in_k = offs_k < k - start
        tile_x = tl.load(rows_x + start, mask=in_m & in_k[None, :], other=0.0)
        in_w = in_n & in_k[:, None]
        tile_gate = tl.load(gate_weight + rows_w + start, mask=in_w, other=0.0)
        tile_up = tl.load(up_weight + rows_w + start, mask=in_w, other=0.0)
        if INTERPRETED:
            # the interpreter multiplies bfloat16 bit patterns
            tile_x, tile_gate = tile_x.to(tl.float32), tile_gate.to(tl.float32)
            tile_up = tile_up.to(tl.float32)
        gate = tl.dot(tile_x, tile_gate, gate, input_precision="ieee")
        up = tl.dot(tile_x, tile_up, up, input_precision="ieee")
    mask = in_m & in_n
    out = offs_m.to(tl.int64)[:, None] * n + offs_n[None, :]
    g = tl.load(grad + out, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATE_GATE:
        left = g * up * _slope(gate, ACTIVATION)
        right = g * activate(gate, ACTIVATION)
    else:
        left = g * activate(up, ACTIVATION)
        right = g * gate * _slope(up, ACTIVATION)
    dtype: tl.constexpr = d_gate.dtype.element_ty
    tl.store(d_gate + out, round_to(left, dtype), mask=mask)
    tl.store(d_up + out, round_to(right, dtype), mask=mask)


def gated_mlp_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
    activation_on: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both projections' results; see kernels/mlp for the contract."""
    if x.dtype == torch.float64:
        # the kernel computes in float32
        operands = (grad, x, gate_weight, up_weight)
        return reference.gated_mlp_backward(*operands, activation, activation_on)
    n, k = gate_weight.shape
    rows = as_rows(x).contiguous()
    m = rows.shape[0]
    d_gate, d_up = (torch.empty(m, n, dtype=x.dtype, device=x.device) for _ in range(2))
    if d_gate.numel() == 0:
        return d_gate, d_up
    wide = x.dtype == torch.float32
    block_m, block_n, block_k = (64, 64, 32) if m <= 64 or wide else (128, 128, 64)
    _gated_mlp_backward_kernel[(cdiv(m, block_m) * cdiv(n, block_n),)](
        as_rows(grad).contiguous(),
        rows,
        gate_weight.contiguous(),
        up_weight.contiguous(),
        d_gate,
        d_up,
        m,
        n,
        k,
        ACTIVATION=activation,
        ACTIVATE_GATE=activation_on == "gate",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4 if block_m == 64 else 8,
        num_stages=3,
    )
    return d_gate, d_up
