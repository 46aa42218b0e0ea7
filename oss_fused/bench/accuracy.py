# SPDX-License-Identifier: MIT
"""How far a result is from its reference, and whether that is close enough.

``measure_error`` gives max absolute, max relative, relative L2 error, cosine similarity and, for
equal dtypes, the distance in ULP (for FP8: in codes). ``check_accuracy`` decides by a tolerance
per dtype. NaN and infinities must stand at the same places with the same sign; they take no part
in the other measures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError

_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ErrorMetrics:
    """Error of a result; ``max_scaled`` is ``|a - e| / max(rms(e), |e|)``, robust near zero."""

    max_absolute: float
    max_relative: float
    max_scaled: float
    relative_l2: float
    cosine: float
    max_ulp: int | None
    nonfinite_mismatches: int

    def to_dict(self) -> dict[str, float | int | None]:
        """The fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted ``relative_l2`` and ``max_scaled``, with the reason for the figures."""

    relative_l2: float
    max_scaled: float
    reason: str


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-12, 1e-11, "sums of a few thousand terms in float64"),
    torch.float32: Tolerance(1e-5, 1e-4, "float32 sums in another order; TF32 would not pass"),
    torch.float16: Tolerance(1e-3, 8e-3, "two roundings of 2**-11, four in the worst element"),
    torch.bfloat16: Tolerance(6e-3, 4e-2, "two roundings of 2**-8, four in the worst element"),
}
# FP8 operands: both factors carry up to 2**-4 of relative error, which averages out over k
FP8_TOLERANCE = Tolerance(5e-2, 5e-1, "e4m3 operands: 3 mantissa bits, random signs over k")


@dataclass(frozen=True)
class AccuracyResult:
    """Verdict, measured error and, when rejected, why."""

    passed: bool
    metrics: ErrorMetrics | None
    reason: str = ""


def ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Number of representable values between the two, element by element, as int64.

    Both zeros count as one value. Meaningless where an element is NaN.

    Raises:
        ShapeMismatchError: the shapes differ.
        UnsupportedDtypeError: the dtypes differ, or are not floating.
    """
    if actual.shape != expected.shape:
        raise ShapeMismatchError(
            f"actual.shape={tuple(actual.shape)}: expected {tuple(expected.shape)}"
        )
    if actual.dtype != expected.dtype or not actual.dtype.is_floating_point:
        raise UnsupportedDtypeError(
            f"actual.dtype={actual.dtype}: expected a floating dtype, {expected.dtype}"
        )
    return (_ordered(actual) - _ordered(expected)).abs()


def _ordered(t: torch.Tensor) -> torch.Tensor:
    # sign and magnitude -> integers in the order of the values
    bits = 8 * t.dtype.itemsize
    raw = t.contiguous().view(_INTEGER_VIEW[t.dtype.itemsize]).to(torch.int64)
    magnitude = raw & ((1 << (bits - 1)) - 1)
    negative = raw < 0 if bits > 8 else raw >= 128
    return torch.where(negative, -magnitude, magnitude)


def measure_error(actual: torch.Tensor, expected: torch.Tensor) -> ErrorMetrics:
    """Error of ``actual`` against ``expected``, computed in float64 on the reference's device.

    Raises:
        ShapeMismatchError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ShapeMismatchError(
            f"actual.shape={tuple(actual.shape)}: expected {tuple(expected.shape)}"
        )
    expected = expected.detach()
    actual = actual.detach().to(expected.device)
    a, e = actual.double(), expected.double()
    finite = a.isfinite() & e.isfinite()
    same_special = (a.isnan() & e.isnan()) | (a.isinf() & (a == e))
    mismatches = int((~finite & ~same_special).sum())
    max_ulp = None
    if actual.dtype == expected.dtype and actual.dtype.is_floating_point and bool(finite.any()):
        max_ulp = int(ulp_distance(actual, expected)[finite].max())
    a, e = a[finite], e[finite]
    if not a.numel():
        return ErrorMetrics(0.0, 0.0, 0.0, 0.0, 1.0, max_ulp, mismatches)
    difference = (a - e).abs()
    norm_a, norm_e = float(a.norm()), float(e.norm())
    rms = norm_e / e.numel() ** 0.5
    error_norm = float(difference.norm())
    nonzero = e != 0
    relative = (difference[nonzero] / e[nonzero].abs()).max() if bool(nonzero.any()) else 0.0
    both = norm_a * norm_e
    return ErrorMetrics(
        max_absolute=float(difference.max()),
        max_relative=float(relative),
        max_scaled=_ratio(difference, e.abs().clamp(min=rms)),
        relative_l2=error_norm / norm_e if norm_e else (float("inf") if error_norm else 0.0),
        cosine=float(a @ e) / both if both else float(norm_a == norm_e),
        max_ulp=max_ulp,
        nonfinite_mismatches=mismatches,
    )


def _ratio(difference: torch.Tensor, size: torch.Tensor) -> float:
    # 0 / 0 is no error; a difference where the reference is all zero is an infinite one
    ratio = torch.where(difference == 0, torch.zeros_like(difference), difference / size)
    return float(ratio.max())


def check_accuracy(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance | None = None
) -> AccuracyResult:
    """Accept or reject ``actual``; never raises for a wrong result, so a run continues.

    Args:
        actual: result under test.
        expected: reference, of the same shape; a higher precision is welcome.
        tolerance: default: the line of TOLERANCES for ``actual``'s dtype.

    Raises:
        UnsupportedDtypeError: no tolerance is known for ``actual``'s dtype.
    """
    if tolerance is None:
        if actual.dtype not in TOLERANCES:
            raise UnsupportedDtypeError(
                f"actual.dtype={actual.dtype}: pass a tolerance, or one of "
                f"{', '.join(str(dtype) for dtype in TOLERANCES)}"
            )
        tolerance = TOLERANCES[actual.dtype]
    if actual.shape != expected.shape:
        return AccuracyResult(
            False, None, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    metrics = measure_error(actual, expected)
    problems = []
    if metrics.nonfinite_mismatches:
        problems.append(f"{metrics.nonfinite_mismatches} NaN or Inf elements differ")
    for name in ("relative_l2", "max_scaled"):
        value, limit = getattr(metrics, name), getattr(tolerance, name)
        if not value <= limit:
            problems.append(f"{name} {value:.3g} above {limit:.3g}")
    return AccuracyResult(not problems, metrics, "; ".join(problems))
