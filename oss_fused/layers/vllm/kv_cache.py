# SPDX-License-Identifier: MIT
"""FP8 KV cache with scales from the checkpoint.

vLLM's own method creates the scale parameters in the model's dtype, which rounds them to
bfloat16; and it takes 1.0 where a calibrated scale is missing. Here scales are float32 and a
missing one is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import (
    BaseKVCacheMethod,
    KVCacheScaleParameter,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.checks import checked_loader
from oss_fused.layers.vllm.loaded import CheckedMethod
from oss_fused.quant.patterns import spellings

# vLLM's sentinel of a scale that the checkpoint did not have
_NOT_LOADED = -1.0


class OssFp8KVCacheMethod(CheckedMethod, BaseKVCacheMethod):
    """Scales of one attention layer's KV cache."""

    def __init__(self, quant_config: Any, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors."""
        super().__init__(quant_config)
        self.prefix = prefix

    def create_weights(self, layer: Any) -> None:
        """Register q/k/v/prob scales, float32 whatever the model's dtype."""
        super().create_weights(layer)
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            parameter = KVCacheScaleParameter()
            parameter.data = torch.tensor(_NOT_LOADED, dtype=torch.float32)
            parameter.dummy_weight_value = 1.0
            parameter.weight_loader = checked_loader(
                KVCacheScaleParameter.weight_loader, self._tensor(name), (torch.float32,)
            )
            setattr(layer, name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the scales and move them to where the attention kernels read them.

        Raises:
            CheckpointError: a scale is zero, negative or not finite, or missing although the
                checkpoint says that it has FP8 KV scales, or has the other one.
        """
        if hasattr(layer, "k_scale") and is_quantized_kv_cache(layer.kv_cache_dtype):
            q, k, v = (getattr(layer, f"{name}_scale").item() for name in "qkv")
            # vLLM would take one for the other, and 1.0 for a bad scale of the query
            alone = _NOT_LOADED in (k, v) and k != v
            self._check("k_scale", k, alone)
            self._check("v_scale", v, alone)
            if q != _NOT_LOADED:
                self._check("q_scale", q)
        super().process_weights_after_loading(layer)

    def check_session(self, layer: Any, loaded: set[str]) -> None:
        """Refuse a load without the scales that the checkpoint promises.

        Raises:
            CheckpointError: names the scale.
        """
        # vLLM would keep the old ones
        if is_quantized_kv_cache(layer.kv_cache_dtype):
            for name in sorted({"k_scale", "v_scale"} - loaded):
                self._check(name, _NOT_LOADED)

    def _check(self, name: str, value: float, other_came: bool = False) -> None:
        tensor = self._tensor(name)
        if value == _NOT_LOADED:
            if other_came or self.quant_config.kv_cache_scheme is not None:
                raise CheckpointError(
                    f"{tensor!r} is missing from the checkpoint, which has "
                    f"{'the other scale of this layer' if other_came else 'a kv_cache_scheme'}; "
                    f"expected a finite scale above 0"
                )
            return
        if not (0 < value < float("inf")):
            raise CheckpointError(f"{tensor!r} is {value}; expected a finite scale above 0")

    def _tensor(self, name: str) -> str:
        # model.layers.0.self_attn.attn -> model.layers.0.self_attn.k_scale
        return f"{spellings(self.prefix.removesuffix('.attn'))[-1]}.{name}"
