# SPDX-License-Identifier: MIT
"""Rows of activations as e4m3 codes, in one or two levels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.moe.tile import in_activation_order
from oss_fused.kernels.numerics import (
    magnitude_bits,
    quantize_dynamic,
    scale_of_amax,
    two_levels,
)


class Encoded(NamedTuple):
    """Rows x [T, H], and their codes [R, levels, KP] and scales [R]; all None without rows."""

    x: Any
    codes: Any
    scale: Any


NO_CODES = Encoded(None, None, None)


@triton.jit
def row_codes(value, LEVELS: tl.constexpr):
    """(codes, codes of the second level, scale) of a float32 row; see moe/gemm.py for LEVELS."""
    amax = tl.max(magnitude_bits(value), 0)
    if LEVELS == 2:
        first, second, unit = two_levels(value, amax)
    else:
        unit = scale_of_amax(amax)
        first = quantize_dynamic(value, tl.div_rn(1.0, unit))
        second = first
    return first, second, unit


@triton.jit
def store_encoded(
    rows,
    row,
    first,
    second,
    unit,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Store what ``row_codes`` made as row ``row``."""
    HP: tl.constexpr = (H + 127) // 128 * 128
    column = tl.arange(0, BLOCK)
    # with 16 codes a thread, Triton's choice, threads exchange the row that they have loaded
    target = rows.codes + row.to(tl.int64) * (LEVELS * HP) + tl.max_contiguous(column, 8)
    mask = column < HP
    if PERMUTE:
        first = in_activation_order(first)
        second = in_activation_order(second)
    tl.store(target, first, mask=mask, eviction_policy=POLICY)
    if LEVELS == 2:
        tl.store(target + HP, second, mask=mask, eviction_policy=POLICY)
    tl.store(rows.scale + row, unit)


@triton.jit
def load_row(x, row, H: tl.constexpr, BLOCK: tl.constexpr):
    """x's row as float32 [BLOCK], zeros beyond H."""
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * H + column, mask=column < H, other=0.0)
    return value.to(tl.float32)


@triton.jit
def store_row(
    rows,
    row,
    value,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Store codes and scale of float32 ``value`` [BLOCK], zeros beyond H, as row ``row``."""
    first, second, unit = row_codes(value, LEVELS)
    store_encoded(rows, row, first, second, unit, H, BLOCK, LEVELS, PERMUTE, POLICY)


@triton.jit
def encode_row(
    rows,
    row,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Codes and scale of x's row ``row``."""
    first, second, unit = row_codes(load_row(rows.x, row, H, BLOCK), LEVELS)
    store_encoded(rows, row, first, second, unit, H, BLOCK, LEVELS, PERMUTE, POLICY)


@triton.jit
def _encode_kernel(
    rows,
    place,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PERMUTE: tl.constexpr,
    POLICY: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0)
    if place is None:
        encode_row(rows, row, H, BLOCK, LEVELS, PERMUTE, POLICY)
    else:
        first, second, unit = row_codes(load_row(rows.x, row, H, BLOCK), LEVELS)
        for slot in tl.static_range(TOP_K):
            target = tl.load(place + row * TOP_K + slot)
            # an expert that is not here has no place for the row
            if target >= 0:
                store_encoded(rows, target, first, second, unit, H, BLOCK, LEVELS, PERMUTE, POLICY)


def encode_rows(
    x: torch.Tensor,
    levels: int,
    permute: bool = True,
    place: torch.Tensor | None = None,
    tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, K] as e4m3 codes [R, levels, KP] (KP: K rounded up to 128) and scales [R].

    ``permute`` puts the columns into the order of moe/tile.py; ``place`` [P] of a Routing gives a
    row for each of its pairs, in its place, from a row of x for each token. Behind the pairs that
    are computed here nothing is written. ``tokens`` of the step, where x has a row for each pair.
    """
    given, width = x.shape
    rows = given if place is None else place.shape[0]
    encoded = empty_codes(x, rows, levels)
    if rows:
        _encode_kernel[(given,)](
            encoded,
            place,
            TOP_K=rows // given,
            H=width,
            BLOCK=next_power_of_2(encoded.codes.shape[2]),
            LEVELS=levels,
            PERMUTE=permute,
            POLICY=activation_policy(given if tokens is None else tokens),
            num_warps=4,
            **pdl_options(x.device),
        )
    return encoded.codes, encoded.scale


def empty_codes(x: torch.Tensor, rows: int, levels: int) -> Encoded:
    """``x`` [T, K] with room for the codes and scales of ``rows`` rows."""
    padded = -(-x.shape[1] // 128) * 128
    codes = torch.empty(rows, levels, padded, dtype=torch.float8_e4m3fn, device=x.device)
    return Encoded(x, codes, torch.empty(rows, dtype=torch.float32, device=x.device))
