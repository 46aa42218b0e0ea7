# SPDX-License-Identifier: MIT
"""Weight-only product on 16-bit tensor cores: out.T = (w @ x.T) * scale + bias.

Weights are the left operand, which wgmma reads from registers: a thread reads codes from shared
memory, converts them there and never writes them back. Codes become float16 in pairs, then
float32, then x's dtype; each step is exact. The direct conversion to bfloat16 runs on a unit of
16 results per cycle and takes longer than the product.

Where a result has fewer tiles than the GPU has multiprocessors, K is split over CTAs. They leave
float32 sums, which parts.py adds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.portable import bias_of, load_box, store_tile, tile_of
from oss_fused.kernels.gemm.scales import scale_column
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import INTERPRETED, finished, from_fp8, widened
from oss_fused.kernels.tma import row_descriptor
from oss_fused.kernels.weight_only.parts import add_parts


class _Tile(NamedTuple):
    """What the kernel is compiled for: a tile's sizes, row blocks that share weights in L2.

    ``tma``: operands are tensor descriptors, not pointers; ``split``: each grid row takes a part of
    K and leaves its sums unscaled.
    """

    m: int
    n: int
    k: int
    group: int = 8
    tma: bool = True
    split: bool = False


@triton.jit
def _dot_codes(codes, x, acc):
    """acc + codes @ x of e4m3 [N, K] and 16-bit [K, M], added in float32."""
    if INTERPRETED:
        return tl.dot(from_fp8(codes), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return finished(tl.dot(widened(codes, x.dtype), x, acc))


@triton.jit(do_not_specialize=["m"])
def _mixed_gemm_kernel(
    x, w, scale, bias, out, m, n, k, strides, W_ROWS: tl.constexpr, TILE: tl.constexpr
):
    wait_for_inputs()
    start_next()
    block_m, block_n = tile_of(tl.program_id(0), tl.cdiv(m, TILE.m), tl.cdiv(n, TILE.n), TILE.group)
    first_m, first_n = block_m * TILE.m, block_n * TILE.n
    offs_m, offs_n = first_m + tl.arange(0, TILE.m), first_n + tl.arange(0, TILE.n)
    steps = tl.cdiv(tl.cdiv(k, TILE.k), tl.num_programs(1))
    begin = tl.program_id(1) * steps * TILE.k
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    end = tl.minimum(begin + steps * TILE.k, k)
    # every part has a step. Without this word a path around the loop writes the sums between two
    # products, for which the assembler makes each product wait for the one before it
    tl.assume(begin < end)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, TILE.k):
        codes = load_box(w, first_n, n, k, strides[1], start, BLOCK_N, TILE)
        rows = load_box(x, first_m, m, k, strides[0], start, BLOCK_M, TILE)
        acc = _dot_codes(codes, rows.T, acc)
    if not TILE.split:
        channel = scale_column(scale, offs_n, offs_n < n, W_ROWS)
        shift = bias_of(bias, offs_n, n, True)
        store_tile(acc, 1.0, channel, shift, out, offs_m, offs_n, m, n, True)
    else:
        line = (tl.program_id(1) * n + offs_n).to(tl.int64) * (tl.cdiv(m, BLOCK_M) * BLOCK_M)
        tl.store(out + line[:, None] + offs_m[None, :], acc, mask=(offs_n < n)[:, None])


def product_tile(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block_m: int = 64,
    block_n: int = 64,
    block_k: int = 64,
    splits: int = 1,
    group_m: int = 8,
    num_stages: int = 3,
    num_warps: int = 4,
    tma: bool = True,
) -> None:
    """Launch into ``out`` [M, N]; arguments as in weight_only_linear, already checked.

    ``tma``: K and the row strides are multiples of 16, and rows begin on 16 bytes.
    ``splits``: parts of K, of which none may be empty (``tiles.splits_of``).
    """
    (m, k), n = x.shape, w.shape[0]
    tile = _Tile(block_m, block_n, block_k, group_m, tma, splits > 1)
    target = out
    if splits > 1:
        padded = cdiv(m, block_m) * block_m
        target = out.new_empty(splits, n, padded, dtype=torch.float32)
    _mixed_gemm_kernel[(cdiv(m, block_m) * cdiv(n, block_n), splits)](
        row_descriptor(x, block_m, block_k) if tma else x,
        row_descriptor(w, block_n, block_k) if tma else w,
        scale,
        bias,
        target,
        m,
        n,
        k,
        (x.stride(0), w.stride(0)),
        W_ROWS=scale.numel() != 1,
        TILE=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(x.device),
    )
    if splits > 1:
        add_parts(target, scale, bias, out)
