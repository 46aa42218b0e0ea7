# SPDX-License-Identifier: MIT
"""What modules with FP8 weights share: casts, copies and loads that leave the codes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oss_fused.errors import UnsupportedDtypeError
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.scale_values import check_scale_values


class HoldsCodes(nn.Module):
    """A module with FP8 codes and their float32 scales, which keep their dtype in every cast.

    ``half()``, ``to(dtype)`` and their like move codes and scales, and cast the rest. A state dict
    whose codes are no FP8, or whose scales are unusable, is refused: copying it would round
    weights as if they were codes.
    """

    # names of tensors that may be codes, and of their scales
    _codes: tuple[str, ...] = ()
    _scales: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept = {id(t) for name in self._scales if (t := getattr(self, name)) is not None}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            held = tensor.dtype == FP8 or id(tensor) in kept
            if not held or moved.dtype == tensor.dtype:
                return moved
            return tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """The state with codes as bytes: ``pickle`` cannot read FP8 tensors back (torch 2.13)."""
        return self._with_codes_as(torch.uint8, self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo what ``__getstate__`` did."""
        super().__setstate__(self._with_codes_as(FP8, state))

    def _with_codes_as(self, dtype: torch.dtype, state: dict[str, Any]) -> dict[str, Any]:
        stored, state = (FP8, torch.uint8), dict(state)
        for kind in ("_parameters", "_buffers"):
            state[kind] = dict(state[kind])
            for name in self._codes:
                codes = state[kind].get(name)
                if codes is not None and codes.dtype in stored:
                    codes = codes.detach().view(dtype)
                    as_parameter = kind == "_parameters"
                    state[kind][name] = nn.Parameter(codes, False) if as_parameter else codes
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self._codes:
            own, given = getattr(self, name), state_dict.get(prefix + name)
            if given is not None and (own.dtype == FP8) != (given.dtype == FP8):
                raise UnsupportedDtypeError(
                    f"{prefix}{name}.dtype={given.dtype}: expected {own.dtype}, as the module's"
                )
        for name in self._scales:
            given = state_dict.get(prefix + name)
            if given is not None and given.dtype != torch.float32:
                raise UnsupportedDtypeError(
                    f"{prefix}{name}.dtype={given.dtype}: expected torch.float32"
                )
            check_scale_values(prefix + name, given)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
