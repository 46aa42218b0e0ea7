# SPDX-License-Identifier: MIT
"""Number formats and the arithmetic from amax to scale to codes.

The rounding points are those of the kernels: ``scale = max(amax / max, 2**-126)`` (1 where amax
is 0), ``inv = 1 / scale``, ``q = round(clamp(x * inv))``, all in float32. Scales are
dequantisation multipliers: ``x ~= q * scale``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import check_arguments
from oss_fused.kernels.quantize import reference


@dataclass(frozen=True)
class FP8Format:
    """An 8-bit float: its torch dtype, largest finite value and smallest subnormal."""

    name: str
    dtype: torch.dtype
    max: float
    smallest: float
    mantissa_bits: int


E4M3 = FP8Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9, 3)
E5M2 = FP8Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16, 2)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

MXFP4_BLOCK = 32
MXFP4_MAX = 6.0
E8M0_BIAS = 127
# value of each e2m1 code: sign, two exponent bits, one mantissa bit
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def amax_to_scale(amax: torch.Tensor, fmt: FP8Format = E4M3) -> torch.Tensor:
    """Scale of a float32 ``amax`` of any shape; 1 where amax is 0, non-finite where amax is."""
    amax = amax.float()
    scale = (amax / torch.full_like(amax, fmt.max)).clamp_(min=reference.MIN_SCALE)
    return scale.masked_fill_(amax == 0, 1.0)


def quantize(
    x: torch.Tensor,
    strategy: str = "channel",
    scale: torch.Tensor | None = None,
    fmt: FP8Format = E4M3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` [..., K] to FP8.

    Args:
        x: bfloat16, float16 or float32 tensor.
        strategy: "tensor" (one scale), "channel" or "token" (a scale per row along the last dim).
        scale: static scale, one element or [rows, 1] float32; None takes it from ``x``.
        fmt: E4M3 or E5M2.

    Returns:
        Codes of x's shape and the scale: [1] for "tensor", [..., 1] else.

    Raises:
        UnsupportedDtypeError: x or scale has another dtype.
        SchemeError: unknown strategy.
        ShapeMismatchError: scale does not fit.
    """
    check_arguments("quantize_fp8", x, scale, strategy)
    if fmt is E4M3:
        return reference.quantize_fp8(x, scale, strategy)
    x32 = x.float()
    if scale is None:
        amax = x32.abs().amax().view(1) if strategy == "tensor" else x32.abs().amax(-1, True)
        scale = amax_to_scale(amax, fmt)
    scaled = (x32 * scale.reciprocal()).clamp_(-fmt.max, fmt.max)
    return scaled.masked_fill_(x32.isinf(), float("nan")).to(fmt.dtype), scale


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``q * scale`` in float32, rounded once to ``dtype``; scale of one element or one per row."""
    if q.dtype not in {fmt.dtype for fmt in FORMATS.values()}:
        raise UnsupportedDtypeError(f"q.dtype={q.dtype}: expected float8_e4m3fn or float8_e5m2")
    if scale.numel() not in (1, q.shape[:-1].numel()):
        raise ShapeMismatchError(
            f"scale.shape={tuple(scale.shape)}: expected one element or one per row of "
            f"q {tuple(q.shape)}"
        )
    per_row = scale if scale.numel() == 1 else scale.reshape(*q.shape[:-1], 1)
    return (q.float() * per_row.float()).to(dtype)


def fake_quantize(
    x: torch.Tensor,
    strategy: str = "token",
    scale: torch.Tensor | None = None,
    fmt: FP8Format = E4M3,
) -> torch.Tensor:
    """Quantise and dequantise in ``x``'s dtype: what an FP8 kernel sees of ``x``."""
    return dequantize(*quantize(x, strategy, scale, fmt), x.dtype)


def relative_error(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Relative RMS error ``|a - e| / |e|`` in float32; 0 for two zero tensors."""
    exact32 = exact.float()
    norm = exact32.norm()
    difference = (approximate.float() - exact32).norm()
    return float(difference / norm) if norm > 0 else float(difference)
