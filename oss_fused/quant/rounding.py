# SPDX-License-Identifier: MIT
"""Rounding of weights that looks at the inputs: scale search and error feedback.

Error feedback is GPTQ (Frantar et al., 2022, arXiv:2210.17323) on the FP8 grid: columns are
rounded one after the other, most active input first, and what rounding a column adds to the
output is taken back by the columns still to come. Inputs enter as ``H = sum of x x^T``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant.formats import E4M3, FP8Format, amax_to_scale, dequantize, quantize

# share of the mean diagonal that is added to H: inputs that calibration did not see still count
DAMPING = 0.001
# share taken from what H holds off its diagonal: correlations of the calibration text that other
# text may not have. Shrinking is relative to each input's power; damping is not.
SHRINKAGE = 0.2
# rounds of ``refine``
SWEEPS = 3
_BLOCK = 32
# scales tried per row, within the binade below amax / max: an 8-bit float has the same relative
# step everywhere, so only the phase of the grid against the row's values is left to choose
_SCALE_STEPS = 8
# place in the order of columns, the column [N] -> its codes, and the values they stand for
RoundColumn = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class InputMoments:
    """Sum of ``x x^T`` over the inputs of a linear, in float32."""

    def __init__(self, features: int, device: torch.device) -> None:
        """Start at zero for inputs of ``features`` values."""
        self.total = torch.zeros(features, features, device=device)
        self.count = 0

    def see(self, x: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Add inputs [..., K]; with ``other`` [..., K] the products of the two."""
        rows = x.reshape(-1, x.shape[-1]).float()
        left = rows if other is None else other.reshape(rows.shape).float()
        self.total.addmm_(left.t(), rows)
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


@dataclass(frozen=True)
class InputBasis:
    """What rounding needs of a linear's inputs; linears that read the same input share it.

    Attributes:
        moments: [K, K], symmetric, finite: the mean of ``x x^T``.
        order: columns, most active input first.
        damped: the moments in that order, shrunk and damped.
        factor: upper Cholesky factor of the inverse of ``damped``; None where no input was ever
            active.
    """

    moments: torch.Tensor
    order: torch.Tensor
    damped: torch.Tensor
    factor: torch.Tensor | None

    def compensate(self, weight: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """The weight [N, K] whose outputs come nearest to what ``weight`` gives without losses.

        Linear regression (GPTAQ, Li et al., 2025, arXiv:2504.02692): these inputs ``x`` have lost
        ``d`` to the rounding of layers before, and the lost outputs are made up for where ``x``
        tells of them.

        Args:
            weight: [N, K].
            lost: mean of ``d x^T`` [K, K].
        """
        if self.factor is None:
            return weight
        share = (weight @ lost).index_select(1, self.order) @ self.factor.t() @ self.factor
        return weight + share.index_select(1, self.order.argsort())


def input_basis(moments: torch.Tensor) -> InputBasis:
    """The basis for inputs with second moments ``moments`` [K, K]."""
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    damped = moments.index_select(0, order).index_select(1, order).double() * (1 - SHRINKAGE)
    power = diagonal.index_select(0, order).double()
    damped.diagonal().add_(SHRINKAGE * power + DAMPING * power.mean())
    if not bool((diagonal > 0).any()):
        return InputBasis(moments, order, damped.float(), None)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    return InputBasis(moments, order, damped.float(), factor)


def round_with_feedback(
    weight: torch.Tensor, basis: InputBasis, fmt: FP8Format = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scale [N, 1] of ``weight`` that keep the outputs.

    No row is worse than plain rounding for inputs with these moments: where feedback does not
    help, the row is rounded plainly.

    Args:
        weight: [N, K].
        basis: of the inputs [K].
        fmt: E4M3 or E5M2.

    Raises:
        ShapeMismatchError: the basis does not belong to the weight.
    """
    moments = basis.moments
    if tuple(moments.shape) != (weight.shape[1],) * 2:
        raise ShapeMismatchError(
            f"moments.shape={tuple(moments.shape)}: expected {(weight.shape[1],) * 2}"
        )
    weight = weight.float()
    plain, plain_scale = quantize(weight, "channel", fmt=fmt)
    if basis.factor is None:
        return plain, plain_scale
    scale = search_scale(weight, moments, fmt)
    rest = weight.t().index_select(0, basis.order)
    codes = feedback(rest, basis.factor, _fp8_columns(scale, fmt), fmt.dtype)
    # torch indexes no float8: move the bytes
    codes = codes.view(torch.uint8).index_select(0, basis.order.argsort()).t().contiguous()
    better = output_error(weight, dequantize(codes.view(fmt.dtype), scale), moments) < output_error(
        weight, dequantize(plain, plain_scale), moments
    )
    chosen = better.unsqueeze(-1)
    picked = torch.where(chosen, codes, plain.view(torch.uint8))
    return picked.view(fmt.dtype), torch.where(chosen, scale, plain_scale)


def _fp8_columns(scale: torch.Tensor, fmt: FP8Format) -> RoundColumn:
    """Rounds columns [N] of a weight whose rows have the scales [N, 1]."""
    flat, inverse_scale = scale.squeeze(-1), scale.reciprocal().squeeze(-1)

    def round_column(_: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = (column * inverse_scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
        return code, code.float() * flat

    return round_column


def feedback(
    rest: torch.Tensor, factor: torch.Tensor, round_column: RoundColumn, dtype: torch.dtype
) -> torch.Tensor:
    """Round ``rest`` [K, N] column after column; each takes the errors of those before it.

    Args:
        rest: columns of a weight as rows, which are contiguous, in an InputBasis' order; changed.
        factor: of the InputBasis.
        round_column: rounds one.
        dtype: of the codes.

    Returns:
        Codes [K, N] in the same order.
    """
    columns, rows = rest.shape
    codes = torch.empty(columns, rows, dtype=dtype, device=rest.device)
    with _one_thread():
        for start in range(0, columns, _BLOCK):
            stop = min(start + _BLOCK, columns)
            block, local = rest[start:stop], factor[start:stop, start:stop]
            errors = torch.empty_like(block)
            for j, pivot in enumerate(local.diagonal().tolist()):
                codes[start + j], rounded = round_column(start + j, block[j])
                errors[j] = (block[j] - rounded) / pivot
                block[j + 1 :].addr_(local[j, j + 1 :], errors[j], alpha=-1)
            # the errors of a block reach all later columns in one GEMM
            rest[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return codes


def refine(
    codes: torch.Tensor,
    rounded: torch.Tensor,
    weight: torch.Tensor,
    damped: torch.Tensor,
    round_column: RoundColumn,
) -> None:
    """Round every column again, with the others as they are: coordinate descent on the error.

    Feedback rounds a column before it knows what later ones will be. QuantEase (Behdin et al.,
    2023, arXiv:2309.01885).

    Args:
        codes: [K, N] in an InputBasis' order, as ``feedback`` returns them; changed.
        rounded: [K, N], the values they stand for; changed.
        weight: [K, N] before rounding, in that order.
        damped: of the InputBasis.
        round_column: as for ``feedback``.
    """
    columns, pivots = len(weight), damped.diagonal().tolist()
    rest = damped @ (weight - rounded)
    with _one_thread():
        for start in [*range(0, columns, _BLOCK)] * SWEEPS:
            stop = min(start + _BLOCK, columns)
            block, local = rest[start:stop], damped[start:stop, start:stop]
            changes = torch.empty_like(block)
            for j in range(stop - start):
                at = start + j
                codes[at], values = round_column(at, rounded[at] + block[j] / pivots[at])
                changes[j] = values - rounded[at]
                rounded[at] = values
                block.addr_(local[j], changes[j], alpha=-1)
            rest[:start].addmm_(damped[:start, start:stop], changes, alpha=-1)
            rest[stop:].addmm_(damped[stop:, start:stop], changes, alpha=-1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For thousands of small operations synchronising threads costs more than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
