# SPDX-License-Identifier: MIT
"""MXFP4 as gpt-oss checkpoints store it: e2m1 codes two per byte, one e8m0 scale per 32 values.

``blocks`` [..., K/32, 16] uint8 (low nibble = even position), ``scales`` [..., K/32] uint8 with
bias 127, along the last (input) dimension K. Format: OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant.formats import E2M1_VALUES, E8M0_BIAS, MXFP4_BLOCK, MXFP4_MAX

_EMAX = 2  # exponent of the largest e2m1 value, 6 = 1.5 * 2**2
_LARGEST = 125  # block exponent: with one more, 4 would overflow bf16 and float32
_EXPONENT_BITS = 0x7F800000  # of a float32
# 1.5 * 2**23 steps, where a step is half of a value's power of two: added and taken away again, it
# leaves a float32 rounded to a multiple of the step, ties to even
_STEPS = 0.75 * 2.0**23
_CHUNK = 1 << 20  # values rounded at once: temporaries stay in a CPU's cache
# exponents tried beside the largest magnitude's. Larger than one more, the grid is a subset of a
# finer one's; smaller than one less, the largest value alone loses more than all others can gain
_SHIFTS = (0, 1, -1)
# a largest value whose input is weak may lose more
_WEIGHTED_SHIFTS = (0, 1, -1, -2)


def unpack_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Values of an MXFP4 tensor.

    Args:
        blocks: [..., G, 16] uint8.
        scales: [..., G] uint8; 255 is the NaN of e8m0.
        dtype: of the result; bfloat16 holds every MXFP4 value exactly.

    Returns:
        [..., G * 32] values.

    Raises:
        ShapeMismatchError: blocks and scales do not belong together.
    """
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != MXFP4_BLOCK // 2:
        raise ShapeMismatchError(
            f"blocks.shape={tuple(blocks.shape)}, scales.shape={tuple(scales.shape)}: "
            f"expected [..., G, 16] and [..., G]"
        )
    positive = torch.tensor(E2M1_VALUES, device=blocks.device)
    table = torch.cat((positive, -positive)).to(dtype)
    values = torch.empty(*blocks.shape[:-1], MXFP4_BLOCK, dtype=dtype, device=blocks.device)
    values[..., 0::2] = table[(blocks & 15).int()]
    values[..., 1::2] = table[(blocks >> 4).int()]
    exponent = (scales.int() - E8M0_BIAS).unsqueeze(-1)
    values = torch.ldexp(values, exponent).to(dtype)
    values.masked_fill_((scales == 255).unsqueeze(-1), float("nan"))
    return values.flatten(-2)


def pack_mxfp4(
    values: torch.Tensor, exponents: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``values`` to the nearest MXFP4; magnitudes beyond 6 * 2**exponent saturate.

    Args:
        values: [..., K], finite.
        exponents: [..., K/32] int32 from -127 to 127; None takes those of the largest magnitudes,
            floor(log2 amax) - 2 (MX v1.0).

    Returns:
        blocks [..., K/32, 16] uint8 and scales [..., K/32] uint8.

    Raises:
        ShapeMismatchError: K is not a multiple of 32, or the exponents do not fit.
        NumericalOverflowError: values hold NaN or Inf, which e2m1 cannot express.
    """
    groups = _groups(values)
    if exponents is None:
        exponents = torch.cat([amax_exponents(x) for x in _chunks(groups)])
    elif exponents.shape != (*values.shape[:-1], groups.shape[-2]):
        raise ShapeMismatchError(
            f"exponents.shape={tuple(exponents.shape)}: expected one per 32 of "
            f"values.shape={tuple(values.shape)}"
        )
    else:
        _check_finite(values)
        exponents = exponents.reshape(groups.shape[:-1])
    codes = [
        e2m1_codes(round_e2m1(x.float() * _power_of_two(-exponent)))
        for x, exponent in zip(_chunks(groups), _chunks(exponents, MXFP4_BLOCK))
    ]
    shape = (*values.shape[:-1], groups.shape[-2])
    blocks = torch.cat([join_nibbles(part) for part in codes])
    scales = (exponents + E8M0_BIAS).to(torch.uint8)
    return blocks.reshape(*shape, MXFP4_BLOCK // 2), scales.reshape(shape)


def amax_exponents(groups: torch.Tensor) -> torch.Tensor:
    """Exponents [..., G] int32 of the largest magnitudes of ``groups`` [..., G, 32].

    Raises:
        NumericalOverflowError: a value is NaN or Inf.
    """
    amax = groups.abs().amax(-1).float()
    _check_finite(amax)
    # frexp gives m in [0.5, 1): floor(log2 amax) is its exponent minus one
    exponents = (torch.frexp(amax).exponent - 1 - _EMAX).clamp_(-E8M0_BIAS, E8M0_BIAS)
    return exponents.masked_fill_(amax == 0, 0)


def least_error_exponents(values: torch.Tensor, power: torch.Tensor | None = None) -> torch.Tensor:
    """Exponents [..., K/32] int32 with the least squared error of each block of ``values``.

    Without ``power`` no other exponent has a smaller error: three candidates are enough.

    Args:
        values: [..., K], finite.
        power: [K], what each input's error counts; None counts all alike.

    Raises:
        ShapeMismatchError: K is not a multiple of 32, or power has another size.
        NumericalOverflowError: values hold NaN or Inf.
    """
    groups = _groups(values)
    if power is not None:
        if power.shape != values.shape[-1:]:
            raise ShapeMismatchError(
                f"power.shape={tuple(power.shape)}: expected {tuple(values.shape[-1:])}"
            )
        power = power.float().unflatten(-1, (-1, MXFP4_BLOCK))
    found = torch.cat([_least_error(x, power) for x in _chunks(groups)])
    return found.reshape(*values.shape[:-1], groups.shape[-2])


def _least_error(groups: torch.Tensor, power: torch.Tensor | None) -> torch.Tensor:
    """The same for [R, G, 32] with power [G, 32]."""
    exponents = amax_exponents(groups)
    magnitudes = groups.float().abs() * _power_of_two(-exponents)
    best = torch.zeros_like(exponents)
    least = torch.full(exponents.shape, float("inf"), device=groups.device)
    for shift in _SHIFTS if power is None else _WEIGHTED_SHIFTS:
        scaled = magnitudes * 2.0**-shift
        error = round_e2m1(scaled).sub_(scaled).square_()
        error = (error if power is None else error.mul_(power)).sum(-1).mul_(4.0**shift)
        shifted = exponents + shift
        error.masked_fill_((shifted < -E8M0_BIAS) | (shifted > _LARGEST), float("inf"))
        best.masked_fill_(error < least, shift)
        least = torch.minimum(error, least)
    return exponents + best


def round_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 value of each float32 of ``scaled``, ties to the even code, saturated at 6."""
    magnitude = scaled.abs().clamp_(max=MXFP4_MAX)
    shift = (magnitude.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    shift.clamp_(min=1.0).mul_(_STEPS)
    return magnitude.add_(shift).sub_(shift).copysign_(scaled)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes, uint8 from 0 to 15, of float32 ``values`` that are e2m1 values."""
    magnitude = values.abs()
    # the codes of 0 to 2, of 2 to 4 and of 4 to 6 lie on three lines
    code = torch.minimum(magnitude * 2, torch.minimum(magnitude + 2, magnitude / 2 + 4))
    sign = (values.view(torch.int32) >> 28) & 8
    return code.to(torch.uint8) | sign.to(torch.uint8)


def join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 16] of codes [..., 32]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Factors [..., 1] for blocks."""
    ones = torch.ones_like(exponents, dtype=torch.float32)
    return torch.ldexp(ones, exponents).unsqueeze(-1)


def _check_finite(values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NumericalOverflowError("values: expected finite numbers, found NaN or Inf")


def _groups(values: torch.Tensor) -> torch.Tensor:
    """``values`` [..., K] as [R, K/32, 32]."""
    if values.dim() == 0 or values.shape[-1] % MXFP4_BLOCK:
        raise ShapeMismatchError(
            f"values.shape={tuple(values.shape)}: expected a last dimension that is a multiple "
            f"of {MXFP4_BLOCK}"
        )
    return values.reshape(-1, values.shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK)


def _chunks(rows: torch.Tensor, values: int = 1) -> Iterator[torch.Tensor]:
    """Some rows at a time; each element stands for ``values`` values."""
    count = max(1, _CHUNK // max(1, values * rows[0].numel() if len(rows) else 1))
    return iter(rows.split(count))
