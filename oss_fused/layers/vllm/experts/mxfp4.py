# SPDX-License-Identifier: MIT
"""``OssMxfp4MoEMethod``: gpt-oss experts in MXFP4.

A GPU runs ``torch.ops.oss_fused.moe_mxfp4``, a CPU the reference's arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    RoutedExperts,
)
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.moe.config import ExpertShape, mxfp4_variant
from oss_fused.kernels.moe.reference import uses_fp8_activations
from oss_fused.layers.vllm.checks import check_mxfp4_scale
from oss_fused.layers.vllm.experts.loader import MXFP4_BLOCK, CheckedExperts, ExpertsLoader
from oss_fused.layers.vllm.experts.reference import route_and_run
from oss_fused.layers.vllm.sampled_rows import rows_of_step, take_rows
from oss_fused.layers.vllm.warmup import max_routed_tokens, warm_routed
from oss_fused.quant.mxfp4 import unpack_mxfp4

# rows of a weight are packed in groups of this many
_ROW_GROUP = 64
# option expert_activations -> smallest step, in tokens, with FP8 activations; -1: none.
# The step counts the tokens of all data-parallel ranks, prompt and decode alike, and the choice
# holds for all of them: a CUDA graph is recorded per number of tokens and cannot tell them apart.
# docs/moe.md shows the cost in quality and the gain in time
_FP8_MIN_TOKENS = {"auto": 512, "bf16": -1, "fp8": 256}


class OssMxfp4MoEMethod(CheckedExperts, FusedMoEMethodBase):
    """Routing, both products and the weighted sum of one gpt-oss layer, in native kernels."""

    # attention of the last decoder layer, if these experts are its own (sampled_rows.py)
    last_attention: str | None = None

    def __init__(self, moe: FusedMoEConfig, prefix: str, activations: str = "auto") -> None:
        """Make the method of one layer.

        Args:
            moe: vLLM's description of the layer.
            prefix: its name, for errors.
            activations: the option expert_activations.
        """
        super().__init__(moe)
        self.prefix = prefix
        self.on_cpu = current_platform.is_cpu()
        self.max_tokens = max_routed_tokens(moe)
        self.fp8_min_tokens = _FP8_MIN_TOKENS[activations]

    @property
    def is_monolithic(self) -> bool:
        """``apply_monolithic`` also routes."""
        return True

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Whole blocks of the rank's share of w13; for the kernels, whole row groups of w2."""
        hidden, intermediate = super().maybe_roundup_sizes(*args, **kwargs)
        rows = 1 if self.on_cpu else _ROW_GROUP
        return _round_up(hidden, rows), _round_up(intermediate, MXFP4_BLOCK)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register w13 and w2 as the checkpoint has them."""
        self.loader = ExpertsLoader(layer, "mxfp4")
        extra["weight_loader"] = self.loader.load
        inner = intermediate_size_per_partition
        for name, n, k in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            for suffix, shape, dtype in (
                ("weight", (n, k // 2), torch.uint8),
                ("weight_scale", (n, k // MXFP4_BLOCK), torch.uint8),
                ("bias", (n,), params_dtype),
            ):
                data = torch.zeros(num_experts, *shape, dtype=dtype)
                parameter = Parameter(data, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                set_weight_attrs(parameter, extra)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the weights as the kernels read them; on a CPU unpack them.

        Raises:
            CheckpointError: a tensor is missing, or a block scale is NaN.
        """
        self.check_loaded(layer)
        check_block_scales(layer, self.prefix)
        for name in ("w13", "w2"):
            weight, scale = f"{name}_weight", f"{name}_weight_scale"
            if self.on_cpu:
                blocks = getattr(layer, weight).data.unflatten(-1, (-1, MXFP4_BLOCK // 2))
                # in bf16 whatever the model's dtype: float16 does not hold every value
                dense = unpack_mxfp4(blocks, getattr(layer, scale).data)
                replace_parameter(layer, weight, dense)
                delattr(layer, scale)
                continue
            packed = torch.ops.oss_fused.moe_repack_mxfp4(
                getattr(layer, weight).data, getattr(layer, scale).data, name == "w13"
            )
            replace_parameter(layer, weight, packed[0])
            replace_parameter(layer, scale, packed[1])
        warm_routed(self, layer, layer.w13_bias.dtype, self.max_tokens)

    def variant(self, layer: RoutedExperts, tokens: int) -> tuple[object, ...]:
        """What the kernels are compiled for in a batch of ``tokens``."""
        experts, rows13, _ = layer.w13_weight.shape
        hidden, of_all = layer.w2_weight.shape[1], layer.global_num_experts
        shape = ExpertShape(layer.top_k, experts, of_all, hidden, rows13 // 2)
        return mxfp4_variant(tokens, shape, 0 <= self.fp8_min_tokens <= tokens)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """None: vLLM's kernels are not used."""
        return None

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, H], router_logits [T, E] -> [T, H], this rank's share of the sum.

        Where the step names sampled rows, the others hold anything.
        """
        sampled = None if self.last_attention is None else rows_of_step(self.last_attention)
        if sampled is None:
            return self._run(layer, x, router_logits)
        few = self._run(layer, take_rows(x, sampled), take_rows(router_logits, sampled))
        return torch.empty_like(x).index_copy_(0, sampled, few)

    def _run(
        self, layer: RoutedExperts, x: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        if self.on_cpu:
            activation = layer.activation.value
            fp8 = uses_fp8_activations(x.shape[0], activation, self.fp8_min_tokens)
            return route_and_run(layer, x, router_logits, "static" if fp8 else "keep")
        return torch.ops.oss_fused.moe_mxfp4(
            x,
            router_logits,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_bias,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_bias,
            layer.top_k,
            layer.renormalize,
            layer.expert_map,
            "swigluoai",
            self.fp8_min_tokens,
            True,
        )


def check_block_scales(layer: RoutedExperts, prefix: str) -> None:
    """Refuse NaN block scales of a layer as its checkpoint has them, whatever kernel runs it.

    Raises:
        CheckpointError: names the tensor of the checkpoint.
    """
    for name in ("w13_weight_scale", "w2_weight_scale"):
        check_mxfp4_scale(f"{prefix}.{name}", getattr(layer, name).data)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
