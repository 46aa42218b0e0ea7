# SPDX-License-Identifier: MIT
"""Rounding of weights that looks at the inputs: scale search and error feedback.

Error feedback is GPTQ (Frantar et al., 2022, arXiv:2210.17323) on the FP8 grid: columns are
rounded one after the other, most active input first, and what rounding a column adds to the
output is taken back by the columns still to come. Inputs enter as ``H = sum of x x^T``.
"""

from __future__ import annotations

import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant.formats import E4M3, FP8Format, amax_to_scale, dequantize, quantize

# share of H's mean diagonal added to it: inputs that calibration did not show still count
DAMPING = 0.01
_BLOCK = 128
# scales tried per row, within the binade below amax / max: an 8-bit float has the same relative
# step everywhere, so only the phase of the grid against the row's values is left to choose
_SCALE_STEPS = 8


class InputMoments:
    """Sum of ``x x^T`` over the inputs of a linear, in float32."""

    def __init__(self, features: int, device: torch.device) -> None:
        """Start at zero for inputs of ``features`` values."""
        self.total = torch.zeros(features, features, device=device)
        self.count = 0

    def see(self, x: torch.Tensor) -> None:
        """Add inputs [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.total.addmm_(rows.t(), rows)
        self.count += rows.shape[0]

    def mean(self, what: str) -> torch.Tensor:
        """``H`` [K, K] per input row.

        Raises:
            NumericalOverflowError: NaN or Inf was seen, or nothing; names ``what``.
        """
        if not self.count:
            raise NumericalOverflowError(f"{what}: no calibration sample reached it")
        moments = self.total / self.count
        if not bool(moments.isfinite().all()):
            raise NumericalOverflowError(f"{what}: NaN or Inf in its input on calibration data")
        return moments


def output_error(
    weight: torch.Tensor, rounded: torch.Tensor, moments: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of each output [N] for inputs with second moments ``moments``."""
    difference = rounded - weight
    return ((difference @ moments) * difference).sum(-1)


def search_scale(
    weight: torch.Tensor, moments: torch.Tensor, fmt: FP8Format = E4M3
) -> torch.Tensor:
    """Scale per row [N, 1] with the least squared error, each input weighed by its power."""
    base = amax_to_scale(weight.abs().amax(-1, keepdim=True), fmt)
    power = moments.diagonal()
    best, least = base, torch.full_like(base, float("inf"))
    for step in range(_SCALE_STEPS):
        # larger than amax / max, never smaller: the largest weight is not clipped
        scale = base * 2.0 ** (step / _SCALE_STEPS)
        rounded = dequantize(*quantize(weight, "channel", scale, fmt))
        error = ((rounded - weight).square() * power).sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def round_with_feedback(
    weight: torch.Tensor, moments: torch.Tensor, fmt: FP8Format = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scale [N, 1] of ``weight`` that keep the outputs.

    No row is worse than plain rounding for inputs with these moments: where feedback does not
    help, the row is rounded plainly.

    Args:
        weight: [N, K].
        moments: [K, K], symmetric, finite.
        fmt: E4M3 or E5M2.

    Raises:
        ShapeMismatchError: moments do not belong to the weight.
    """
    if tuple(moments.shape) != (weight.shape[1],) * 2:
        raise ShapeMismatchError(
            f"moments.shape={tuple(moments.shape)}: expected {(weight.shape[1],) * 2}"
        )
    weight = weight.float()
    plain, plain_scale = quantize(weight, "channel", fmt=fmt)
    if not bool((moments.diagonal() > 0).any()):
        return plain, plain_scale
    scale = search_scale(weight, moments, fmt)
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(moments[order][:, order])
    codes = torch.empty_like(plain)
    codes[:, order] = _feedback(weight[:, order], scale, factor, fmt)
    better = output_error(weight, dequantize(codes, scale), moments) < output_error(
        weight, dequantize(plain, plain_scale), moments
    )
    chosen = better.unsqueeze(-1)
    # where() knows no float8: choose among the bytes
    picked = torch.where(chosen, codes.view(torch.uint8), plain.view(torch.uint8))
    return picked.view(fmt.dtype), torch.where(chosen, scale, plain_scale)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the damped inverse of ``moments``."""
    damped = moments.double()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _feedback(
    weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, fmt: FP8Format
) -> torch.Tensor:
    """Round column by column; blocks of columns pass their errors on with one GEMM."""
    rows, columns = weight.shape
    rest = weight.clone()
    codes = torch.empty(rows, columns, dtype=fmt.dtype, device=weight.device)
    flat, inverse_scale = scale.squeeze(-1), scale.reciprocal().squeeze(-1)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, local = rest[:, start:stop].clone(), factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for j in range(stop - start):
            column = block[:, j]
            code = (column * inverse_scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
            error = (column - code.float() * flat) / local[j, j]
            block[:, j + 1 :].addr_(error, local[j, j + 1 :], alpha=-1)
            errors[:, j] = error
            codes[:, start + j] = code
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return codes
