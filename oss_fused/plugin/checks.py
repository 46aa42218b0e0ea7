# SPDX-License-Identifier: MIT
"""Checks of loaded tensors: what is missing or no number is refused by the name of the tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from oss_fused.errors import CheckpointError
from oss_fused.plugin.patterns import spellings

# fills scales before loading: no scale has this value, so that what is left was not loaded
MISSING = torch.finfo(torch.float32).min

_E8M0_NAN = 255

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def tensor_name(name: str, part: int, parts: int) -> str:
    """Name in the checkpoint of part ``part`` of vLLM's fused tensor ``name``."""
    name = spellings(name)[-1]
    match = re.match(r"^(.*\.)(\w+)(\.\w+)$", name)
    if match and parts > 1 and len(_FUSED.get(match[2], ())) == parts:
        return f"{match[1]}{_FUSED[match[2]][part]}{match[3]}"
    return name


def check_scale(name: str, scale: torch.Tensor, widths: Sequence[int]) -> None:
    """Refuse a scale that is missing, zero, negative or not finite.

    Args:
        name: of the parameter in vLLM.
        scale: float32, one value a row.
        widths: rows of each tensor of the checkpoint that is fused into it.

    Raises:
        CheckpointError: names the tensor of the checkpoint, and one bad value.
    """
    if bool((scale.isfinite() & (scale > 0)).all()):
        return
    for part, rows in enumerate(scale.view(-1).split(list(widths))):
        bad = rows[~(rows.isfinite() & (rows > 0))]
        if not bad.numel():
            continue
        tensor = tensor_name(name, part, len(widths))
        if bool((bad == MISSING).any()):
            raise CheckpointError(
                f"{tensor!r} is missing from the checkpoint; expected a finite scale above 0"
            )
        raise CheckpointError(
            f"{tensor!r} holds {bad[0].item()} ({bad.numel()} of {rows.numel()} values are bad); "
            f"expected finite scales above 0: write the checkpoint again with scripts/calibrate.py"
        )


def check_weight(name: str, codes: torch.Tensor, widths: Sequence[int]) -> None:
    """Refuse FP8 codes that are NaN, which is also what a missing weight is left at.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    bad = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if not bool(bad.any()):
        return
    for part, rows in enumerate(bad.split(list(widths))):
        if bool(rows.any()):
            tensor = tensor_name(name, part, len(widths))
            raise CheckpointError(
                f"{tensor!r} is missing from the checkpoint, or holds NaN; expected FP8 codes of "
                f"finite numbers"
            )


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Refuse a weight with NaN or Inf before it is quantised.

    Raises:
        CheckpointError: names the tensor.
    """
    if not bool(weight.isfinite().all()):
        raise CheckpointError(
            f"{spellings(name)[-1]!r} is missing from the checkpoint, or holds NaN or Inf; "
            f"expected finite weights"
        )


def check_mxfp4_scale(name: str, scale: torch.Tensor) -> None:
    """Refuse e8m0 block scales that are NaN.

    Args:
        name: of vLLM's parameter, ``...experts.w13_weight_scale`` or ``...w2_weight_scale``.
        scale: uint8.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    if bool((scale == _E8M0_NAN).any()):
        parent, _, leaf = spellings(name)[-1].rpartition(".")
        part = "gate_up_proj" if leaf.startswith("w13") else "down_proj"
        raise CheckpointError(
            f"'{parent}.{part}_scales' holds {_E8M0_NAN}, the NaN of e8m0; expected finite block "
            f"scales"
        )
