# SPDX-License-Identifier: MIT
"""Which format, and which size of groups, keeps given tensors best."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oss_fused.errors import SchemeError
from oss_fused.quant.formats import (
    E4M3,
    E5M2,
    FORMATS,
    FP8Format,
    dequantize,
    quantize,
    relative_error,
)
from oss_fused.quant.scalers import GroupScaler


def choose_format(x: torch.Tensor, strategy: str = "channel") -> tuple[FP8Format, float]:
    """E4M3 or E5M2, whichever keeps ``x`` better, with its relative RMS error; ties take E4M3."""
    errors = {
        fmt.name: relative_error(x, dequantize(*quantize(x, strategy, fmt=fmt)))
        for fmt in (E4M3, E5M2)
    }
    best = min(errors, key=lambda name: errors[name])
    return FORMATS[best], errors[best]


def choose_group_size(
    samples: Iterable[torch.Tensor],
    clip_target: float,
    candidates: Iterable[int],
    margin: float = 1.0,
    fmt: FP8Format = E4M3,
) -> tuple[int, float, float]:
    """The group size with the least error among those that clip at most ``clip_target``.

    Scales are learnt from the first sample and judged on the others.

    Returns:
        Group size, relative RMS error and clip ratio.

    Raises:
        SchemeError: no candidate keeps the target; says what the best one clips.
    """
    first, *others = samples
    judged = others or [first]
    results = []
    for size in candidates:
        scaler = GroupScaler(fmt, margin, size)
        scaler.update(first)
        clipped = sum(scaler.clip_ratio(x) for x in judged) / len(judged)
        errors = [relative_error(x, scaler.dequantize(scaler.quantize(x))) for x in judged]
        results.append((sum(errors) / len(errors), size, clipped))
    within = [result for result in results if result[2] <= clip_target]
    if not within:
        least = min(results, key=lambda result: result[2])
        raise SchemeError(
            f"--clip-target={clip_target}: not met by any of --group-candidates; the best, "
            f"{least[1]}, clips {least[2]:.2%}"
        )
    error, size, clipped = min(within)
    return size, error, clipped
