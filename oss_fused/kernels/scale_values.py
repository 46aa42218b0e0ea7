# SPDX-License-Identifier: MIT
"""Checks of the values of scales that a caller gives: finite, and large enough to divide by.

Looking at a value makes the host wait for the device. A tensor is therefore looked at once, and
again after it was written in place; scales that the library computed itself are not looked at. No
check happens while a CUDA graph is captured or a function is compiled: there is no value to see.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oss_fused.errors import NumericalOverflowError

# below this the reciprocal of a scale would overflow float32
MIN_SCALE = 2.0**-126

# scale -> its version when it was found good
_good = WeakTensorKeyDictionary()


def values_visible(scale: torch.Tensor) -> bool:
    """Whether the host may look at values now."""
    if torch.compiler.is_compiling() or scale.is_meta:
        return False
    # fake tensors and other subclasses have no values, or values of their own
    if type(scale) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not (scale.is_cuda and torch.cuda.is_current_stream_capturing())


def _version(scale: torch.Tensor) -> int | None:
    # inference tensors count no versions: they are looked at every time
    return None if scale.is_inference() else scale._version


def trust_scale(scale: torch.Tensor) -> torch.Tensor:
    """Mark a scale that the library computed: a NaN in it comes from NaN values, as it should."""
    if values_visible(scale) and (version := _version(scale)) is not None:
        _good[scale] = version
    return scale


def check_scale_values(name: str, scale: torch.Tensor | None) -> None:
    """Raise NumericalOverflowError unless every element of ``scale`` is a usable multiplier.

    Usable means finite and at least 2**-126. ``scale`` None passes. See this module's docstring
    for when values are looked at.
    """
    if scale is None or not scale.numel() or not values_visible(scale):
        return
    version = _version(scale)
    if version is not None and _good.get(scale) == version:
        return
    flat = scale.detach().flatten()
    bad = ~((flat >= MIN_SCALE) & flat.isfinite())
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise NumericalOverflowError(
            f"{name}[{at}]={flat[at].item()!r}: expected finite scales of at least 2**-126"
        )
    if version is not None:
        _good[scale] = version
