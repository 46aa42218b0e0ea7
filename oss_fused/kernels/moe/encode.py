# SPDX-License-Identifier: MIT
"""Rows of activations as e4m3 codes, in one or two levels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.tile import activation_position
from oss_fused.kernels.numerics import (
    from_fp8,
    magnitude_bits,
    quantize_dynamic,
    scale_of_amax,
    to_fp8,
)


class Encoded(NamedTuple):
    """Rows x [T, H], and their codes [R, levels, KP] and scales [R]; all None without rows."""

    x: Any
    codes: Any
    scale: Any


@triton.jit
def encode_row(
    rows,
    source,
    row,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    """Codes and scale ``row`` of x's row ``source``; see moe/gemm.py for what LEVELS means."""
    HP: tl.constexpr = (H + 127) // 128 * 128
    column = tl.arange(0, BLOCK)
    value = tl.load(rows.x + source.to(tl.int64) * H + column, mask=column < H, other=0.0)
    value = value.to(tl.float32)
    amax = tl.max(magnitude_bits(value), 0)
    position = activation_position(column) if PERMUTE else column
    target = rows.codes + row.to(tl.int64) * (LEVELS * HP) + position
    mask = column < HP
    if LEVELS == 2:
        # a power of two that puts amax into [128, 256); a row with Inf or NaN becomes NaN
        exponent = tl.maximum(amax >> 23, 8)
        unit = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
        unit = tl.where(exponent == 255, float("nan"), unit)
        value = value * ((261 - exponent) << 23).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 255, 0.0, value)
        first = to_fp8(value)
        tl.store(target, first, mask=mask)
        tl.store(target + HP, to_fp8((value - from_fp8(first)) * 16.0), mask=mask)
    else:
        unit = scale_of_amax(amax)
        tl.store(target, quantize_dynamic(value, tl.div_rn(1.0, unit)), mask=mask)
    tl.store(rows.scale + row, unit)


@triton.jit(do_not_specialize=["n_rows"])
def _encode_kernel(
    rows,
    order,
    n_rows,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0)
    source = row
    if order is not None:
        pair = tl.load(order + row)
        # behind the pairs that are computed here order is not written
        source = tl.where((pair >= 0) & (pair < n_rows), pair // TOP_K, 0)
    encode_row(rows, source, row, H, BLOCK, LEVELS, PERMUTE)


def encode_rows(
    x: torch.Tensor,
    levels: int,
    permute: bool = True,
    order: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, K] as e4m3 codes [R, levels, KP] (KP: K rounded up to 128) and scales [R].

    ``permute`` puts the columns into the order of moe/tile.py; ``order`` [P] of a Routing gives a
    row for each of its pairs, in that order, from a row of x for each token.
    """
    tokens, width = x.shape
    rows = tokens if order is None else order.shape[0]
    encoded = empty_codes(x, rows, levels)
    if rows:
        _encode_kernel[(rows,)](
            encoded,
            order,
            rows,
            TOP_K=rows // tokens,
            H=width,
            BLOCK=next_power_of_2(encoded.codes.shape[2]),
            LEVELS=levels,
            PERMUTE=permute,
            num_warps=4,
            **pdl_options(x.device),
        )
    return encoded.codes, encoded.scale


def empty_codes(x: torch.Tensor, rows: int, levels: int) -> Encoded:
    """``x`` [T, K] with room for the codes and scales of ``rows`` rows."""
    padded = -(-x.shape[1] // 128) * 128
    codes = torch.empty(rows, levels, padded, dtype=torch.float8_e4m3fn, device=x.device)
    return Encoded(x, codes, torch.empty(rows, dtype=torch.float32, device=x.device))
