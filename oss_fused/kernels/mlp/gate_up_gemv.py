# SPDX-License-Identifier: MIT
"""Gate and up projection of one or two tokens, activation and product in one launch.

The product of gemm/gemv.py: neighbouring rows of a program's tile are a gate row and its up row,
so that both sums of a pair lie in one thread. What it leaves: y, rounded where the unfused
operations round, and the largest magnitude of each program's pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.gemm.gemv import dot_codes, load_tokens, load_weights
from oss_fused.kernels.integers import cdiv, next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_unless
from oss_fused.kernels.mlp.triton import activate
from oss_fused.kernels.numerics import magnitude_bits, round_to


@triton.jit(do_not_specialize=["m"])
def _gate_up_gemv_kernel(
    a,
    b,
    a_scale,
    b_scale,
    y,
    part_amax,
    m,
    n,
    k_words,
    stride_a,
    stride_b,
    ACTIVATION: tl.constexpr,
    ROWS_M: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    offs_m = tl.arange(0, ROWS_M)
    offs_w = tl.arange(0, BLOCK_W)
    lanes = tl.arange(0, 2 * PAIRS)
    rows = tl.minimum(tl.program_id(0) * PAIRS + lanes // 2, n - 1) + lanes % 2 * n
    rows_b = b + rows.to(tl.int64)[:, None] * stride_b
    rows_a = a + tl.minimum(offs_m, m - 1)[:, None] * stride_a
    wait_unless(PREFETCH)
    words = load_weights(rows_b, offs_w, k_words)
    channel = tl.load(b_scale + rows)[None, :]
    wait_for_inputs()
    start_next()
    token = tl.load(a_scale + tl.minimum(offs_m, m - 1))[:, None]
    acc = tl.zeros([ROWS_M, 2 * PAIRS, BLOCK_W // 4], tl.float32)
    for start in range(0, k_words, BLOCK_W):
        x = load_tokens(rows_a, start + offs_w, k_words).reshape([ROWS_M, 1, BLOCK_W // 4, 4])
        current = words.reshape([1, 2 * PAIRS, BLOCK_W // 4, 4])
        words = load_weights(rows_b, start + BLOCK_W + offs_w, k_words)
        acc += dot_codes(x, current)
    total = round_to(tl.sum(acc, 2) * 64.0 * token * channel, dtype).to(tl.float32)
    gate, up = tl.split(total.reshape([ROWS_M, PAIRS, 2]))
    activated = round_to(activate(gate, ACTIVATION), dtype).to(tl.float32)
    value = round_to(activated * up, dtype)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = (offs_m < m)[:, None] & (pair < n)[None, :]
    tl.store(y + offs_m[:, None] * n + pair[None, :], value, mask=mask)
    # pairs past the end repeat the last one, which changes no maximum
    amax = tl.max(magnitude_bits(value.to(tl.float32)), 1)
    tl.store(part_amax + offs_m * tl.num_programs(0) + tl.program_id(0), amax, mask=offs_m < m)


def gate_up_gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    activation: str,
    rows_n: int,
    block_k: int,
    num_warps: int,
    prefetch_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [M, I] and the largest magnitudes [M, parts] of its parts, as float32 bits."""
    m, k = a.shape
    n = b.shape[0] // 2
    pairs = rows_n // 2
    y = torch.empty(m, n, dtype=out_dtype, device=a.device)
    part_amax = torch.empty(m, cdiv(n, pairs), dtype=torch.int32, device=a.device)
    _gate_up_gemv_kernel[(cdiv(n, pairs),)](
        a.view(torch.int32),
        b.view(torch.int32),
        a_scale,
        b_scale,
        y,
        part_amax,
        m,
        n,
        k // 4,
        a.stride(0) // 4,
        b.stride(0) // 4,
        ACTIVATION=activation,
        ROWS_M=next_power_of_2(m),
        PAIRS=pairs,
        BLOCK_W=block_k // 4,
        PREFETCH=prefetch_weights,
        num_warps=num_warps,
        **pdl_options(a.device),
    )
    return y, part_amax
