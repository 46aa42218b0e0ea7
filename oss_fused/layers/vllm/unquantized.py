# SPDX-License-Identifier: MIT
"""vLLM's methods of layers that stay unquantised, with a check of what is loaded.

FP8 codes without their scale would be cast to bf16 and served.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from oss_fused.layers.vllm.checks import (
    FLOATS,
    check_bias,
    check_experts,
    check_unquantised,
    checked_loader,
)
from oss_fused.layers.vllm.loaded import CheckedMethod


@register_weight_loader_v2_supported_method
class OssUnquantizedLinearMethod(CheckedMethod, UnquantizedLinearMethod):
    """A linear layer in the model's dtype that refuses missing weights."""

    def __init__(self, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors."""
        super().__init__()
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **extra: Any,
    ) -> None:
        """Register vLLM's parameters with a loader that refuses codes."""
        layer.logical_widths = output_partition_sizes
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            *sizes,
            **_checked(extra, f"{self.prefix}.weight"),
        )
        self.mark_missing(layer)

    def mark_missing(self, layer: Any) -> None:
        """NaN in the weight."""
        layer.weight.data.fill_(float("nan"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the weights; vLLM packs them on a CPU.

        Raises:
            CheckpointError: a weight or bias is missing, or not finite.
        """
        check_bias(layer, self.prefix)
        check_unquantised(layer, self.prefix)
        super().process_weights_after_loading(layer)


class OssUnquantizedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """An embedding, or a head, in the model's dtype."""

    def __init__(self, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors."""
        super().__init__()
        self.prefix = prefix

    def create_weights(self, layer: Any, *sizes: Any, **extra: Any) -> None:
        """Register vLLM's parameters with a loader that refuses codes."""
        super().create_weights(layer, *sizes, **_checked(extra, f"{self.prefix}.weight"))


class OssUnquantizedMoEMethod(CheckedMethod, UnquantizedFusedMoEMethod):
    """Experts in the model's dtype; for gpt-oss see VllmBf16MoEMethod."""

    def __init__(self, moe: Any, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors."""
        super().__init__(moe)
        self.prefix = prefix

    def create_weights(self, layer: Any, *sizes: Any, **extra: Any) -> None:
        """Register vLLM's parameters with a loader that refuses codes."""
        name = f"{self.prefix}.weight"
        super().create_weights(layer, *sizes, **_checked(extra, name))
        self.mark_missing(layer)

    def mark_missing(self, layer: Any) -> None:
        """NaN in the weights, zero in what pads them for some kernels."""
        hidden, inner = (
            self.moe.hidden_dim_unpadded,
            self.moe.intermediate_size_per_partition_unpadded,
        )
        for parameter in layer._parameters.values():
            parameter.data.zero_()
        parts = 2 if self.moe.is_act_and_mul else 1
        w13 = layer.w13_weight.data.unflatten(1, (parts, -1))
        w13[:, :, :inner, :hidden].fill_(float("nan"))
        layer.w2_weight.data[:, :hidden, :inner].fill_(float("nan"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the weights; vLLM packs them on a CPU, anew after a reload.

        Raises:
            CheckpointError: a tensor is missing, or not finite.
        """
        check_experts(layer, self.prefix)
        if current_platform.is_cpu():
            self.moe_kernel = None
        super().process_weights_after_loading(layer)


def _checked(extra: dict[str, Any], name: str) -> dict[str, Any]:
    return extra | {"weight_loader": checked_loader(extra["weight_loader"], name, FLOATS)}
