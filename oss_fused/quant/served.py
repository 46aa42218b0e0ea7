# SPDX-License-Identifier: MIT
"""A calibrated checkpoint read back as the values that it serves, and layers that compute so."""

from __future__ import annotations

import re
from typing import Any

import torch

from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.expert_stream import serve_in_fp8
from oss_fused.quant.experts import PARTS, read_fp8_experts
from oss_fused.quant.formats import dequantize
from oss_fused.quant.observers import CacheObserver
from oss_fused.quant.skeleton import ModelSkeleton

_STACKED = re.compile(r"^(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
_SHORT = dict(PARTS)


class ServedReader(CheckpointReader):
    """Reads a quantised checkpoint; FP8 tensors come dequantised, as float32.

    gpt-oss experts stored one by one in FP8 come under transformers' names, like others.
    """

    def __contains__(self, name: object) -> bool:
        """True if ``read`` knows the tensor; stacked FP8 weights are read by expert only."""
        bias = self._of_expert(str(name), 0)
        return name in self._files or (str(name).endswith("_bias") and bias is not None)

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Values of a tensor, or of its ``index``-th slice."""
        if name in self._files:
            value = super().read(name, index)
            scale = f"{name}_scale"
            return dequantize(value, super().read(scale)) if scale in self._files else value
        if index is None and name.endswith("_bias"):
            parts: list[torch.Tensor] = []
            while part := self._of_expert(name, len(parts)):
                parts.append(self.read(part))
            return torch.stack(parts)
        part = self._of_expert(name, index or 0)
        return super().read(name, index) if part is None else self.read(part).t()

    def stored_parts(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A tensor as stored, and its scale [N, 1] if it is FP8."""
        scale = f"{name}_scale"
        return super().read(name), super().read(scale) if scale in self._files else None

    def _of_expert(self, name: str, expert: int) -> str | None:
        """The stored tensor of one FP8 expert that a stacked name stands for, if there is one."""
        match = _STACKED.match(name)
        if match is None:
            return None
        own = f"{match[1]}.{expert}.{_SHORT[match[2]]}_{'bias' if match[3] else 'weight'}"
        return own if own in self._files else None


def serve_rest(
    stored: CheckpointReader, skeleton: ModelSkeleton, layer: Any, index: int
) -> CacheObserver | None:
    """Make the experts of a layer, and the cache returned, compute as ``stored`` has them."""
    attention = f"model.layers.{index}.self_attn"
    module = skeleton.experts_of(index)
    if module is not None:
        count = skeleton.expert_count
        if weights := read_fp8_experts(stored, module, count, skeleton.gated):
            serve_in_fp8(layer.mlp.experts, module, weights, mxfp4=False)
    if f"{attention}.k_scale" not in stored:
        return None
    cache = CacheObserver(attention)
    cache.scales = (stored.read(f"{attention}.k_scale"), stored.read(f"{attention}.v_scale"))
    return cache
