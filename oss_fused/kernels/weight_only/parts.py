# SPDX-License-Identifier: MIT
"""The sums of parts of K that CTAs left apart: added in order, scaled and rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.portable import bias_of, store_tile
from oss_fused.kernels.gemm.scales import scale_column
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs

# columns, and rows at most, of a tile of the result that a program adds
_ADDED = 32


@triton.jit(do_not_specialize=["m"])
def _add_parts_kernel(
    parts,
    scale,
    bias,
    out,
    m,
    n,
    padded,
    W_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (offs_n < n)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):
        line = (split * n + offs_n).to(tl.int64) * padded
        total += tl.load(parts + line[:, None] + offs_m[None, :], mask=inside, other=0.0)
    channel = scale_column(scale, offs_n, offs_n < n, W_ROWS)
    shift = bias_of(bias, offs_n, n, True)
    store_tile(total, 1.0, channel, shift, out, offs_m, offs_n, m, n, True)


def add_parts(
    parts: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Launch ``out = parts.sum(0).T * scale.T + bias``.

    Args:
        parts: float32 [splits, N, rows], rows being a multiple of 16 and at least M. What lies
            beyond M is not used.
        scale: float32 [N, 1] or [1].
        bias: [N] or None.
        out: [M, N].
    """
    splits, n, padded = parts.shape
    m = out.shape[0]
    block_m = min(_ADDED, padded & -padded)
    _add_parts_kernel[(cdiv(n, _ADDED), cdiv(m, block_m))](
        parts,
        scale,
        bias,
        out,
        m,
        n,
        padded,
        W_ROWS=scale.numel() != 1,
        SPLITS=splits,
        BLOCK_N=_ADDED,
        BLOCK_M=block_m,
        num_warps=4,
        **pdl_options(out.device),
    )
