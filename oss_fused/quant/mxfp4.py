# SPDX-License-Identifier: MIT
"""MXFP4 as gpt-oss checkpoints store it: e2m1 codes two per byte, one e8m0 scale per 32 values.

``blocks`` [..., K/32, 16] uint8 (low nibble = even position), ``scales`` [..., K/32] uint8 with
bias 127, along the last (input) dimension K. Format: OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant.formats import E2M1_VALUES, E8M0_BIAS, MXFP4_BLOCK, MXFP4_MAX

_EMAX = 2  # exponent of the largest e2m1 value, 6 = 1.5 * 2**2


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


def pack_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``values`` [..., K] to MXFP4 (MX v1.0: shared exponent floor(log2 amax) - 2).

    Returns:
        blocks [..., K/32, 16] uint8 and scales [..., K/32] uint8.

    Raises:
        ShapeMismatchError: K is not a multiple of 32.
        NumericalOverflowError: values hold NaN or Inf, which e2m1 cannot express.
    """
    if values.dim() == 0 or values.shape[-1] % MXFP4_BLOCK:
        raise ShapeMismatchError(
            f"values.shape={tuple(values.shape)}: expected a last dimension that is a multiple "
            f"of {MXFP4_BLOCK}"
        )
    x = values.float().unflatten(-1, (-1, MXFP4_BLOCK))
    amax = x.abs().amax(-1)
    if not amax.isfinite().all():
        raise NumericalOverflowError("values: expected finite numbers, found NaN or Inf")
    # frexp gives m in [0.5, 1): floor(log2 amax) is its exponent minus one
    exponent = (torch.frexp(amax).exponent - 1 - _EMAX).clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent)
    scaled = torch.ldexp(x, -exponent.unsqueeze(-1))
    magnitude = _round_e2m1(scaled.abs().clamp(max=MXFP4_MAX))
    codes = magnitude | (torch.signbit(scaled).to(torch.uint8) << 3)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + E8M0_BIAS).to(torch.uint8)


def _round_e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code of a magnitude in [0, 6], ties to the even code."""
    grid = torch.tensor(E2M1_VALUES, device=magnitude.device)
    middle = (grid[1:] + grid[:-1]) / 2
    low = torch.bucketize(magnitude, middle, right=False)  # a tie stays at the lower code
    high = torch.bucketize(magnitude, middle, right=True)  # a tie goes to the upper code
    return torch.where(low % 2 == 0, low, high).to(torch.uint8)
