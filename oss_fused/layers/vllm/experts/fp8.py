# SPDX-License-Identifier: MIT
"""``OssFp8MoEMethod``: experts with FP8 weights.

On a GPU they run in ``torch.ops.oss_fused.moe_fp8``, or in vLLM's Triton grouped GEMM (a scale per
output row and per token) where that does not apply. A CPU runs the reference's arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    FusedMoeWeightScaleSupported,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.errors import CheckpointError
from oss_fused.kernels.moe.config import fp8_variant
from oss_fused.layers.vllm.checks import (
    FLOATS,
    MISSING,
    checked_loader,
    expert_tensor,
)
from oss_fused.layers.vllm.experts.loader import CheckedExperts, ExpertsLoader
from oss_fused.layers.vllm.experts.reference import route_and_run, run_routed
from oss_fused.layers.vllm.warmup import max_routed_tokens, warm_routed

FP8 = torch.float8_e4m3fn


class OssFp8MoEMethod(CheckedExperts, FusedMoEMethodBase):
    """Experts of one layer: gpt-oss's, or gated by SiLU without biases (Mixtral, Qwen-MoE)."""

    def __init__(
        self,
        moe: FusedMoEConfig,
        prefix: str,
        online: bool = False,
        routes: bool = True,
        native: bool = True,
    ) -> None:
        """Make the method of one layer.

        Args:
            moe: vLLM's description of the layer.
            prefix: the layer's name, for errors.
            online: the checkpoint has bf16 weights, to be quantised to FP8 after loading.
            routes: the layer routes by softmax and top_k, as moe_fp8 does.
            native: run in moe_fp8 on a GPU; needs ``routes``.
        """
        super().__init__(moe)
        self.prefix = prefix
        self.online = online
        self.on_cpu = current_platform.is_cpu()
        self.routes = routes
        self.native = native and not self.on_cpu
        self.max_tokens = max_routed_tokens(moe)

    @property
    def is_monolithic(self) -> bool:
        """Whether routing happens in here; vLLM's kernel takes routed tokens."""
        return self.native or (self.on_cpu and self.routes)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register w13 and w2 with scales and biases."""
        rows = {"w13": 2 * intermediate_size_per_partition, "w2": hidden_size}
        columns = {"w13": hidden_size, "w2": intermediate_size_per_partition}
        if isinstance(layer, GptOssRoutedExperts):
            self.loader = ExpertsLoader(layer, "bf16" if self.online else "fp8")
            extra["weight_loader"] = self.loader.load
        else:
            # vLLM's loader loads gates and ups separately, and needs the scope of a scale
            extra["quant_method"] = FusedMoeWeightScaleSupported.CHANNEL.value

        def register(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
            data = torch.zeros(num_experts, *shape, dtype=dtype)
            parameter = Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            own = extra
            if not isinstance(layer, GptOssRoutedExperts):
                stored = FLOATS if dtype == params_dtype else (dtype,)
                own = extra | {
                    "weight_loader": checked_loader(
                        extra["weight_loader"], f"{self.prefix}.{name}", stored
                    )
                }
            set_weight_attrs(parameter, own)
            return parameter

        for name in ("w13", "w2"):
            n, k = rows[name], columns[name]
            if self.online:
                register(f"{name}_weight", (n, k), params_dtype)
            else:
                register(f"{name}_weight", (n, k), FP8)
                scale = register(f"{name}_weight_scale", (n, 1), torch.float32)
                scale.dummy_weight_value = 1.0
            if self.moe.has_bias:
                register(f"{name}_bias", (n,), params_dtype)
        self.mark_missing(layer)

    def mark_missing(self, layer: RoutedExperts) -> None:
        """NaN in weights and biases, MISSING in scales; gpt-oss's loader keeps count instead."""
        super().mark_missing(layer)
        if self.loader is not None:
            return
        for name, parameter in layer._parameters.items():
            if name.startswith("w"):
                parameter.data.fill_(MISSING if name.endswith("_scale") else float("nan"))
        # vLLM's loader leaves out what some of its all-to-all kernels pad
        hidden = self.moe.hidden_dim_unpadded
        layer.w13_weight.data[:, :, hidden:].zero_()
        layer.w2_weight.data[:, hidden:].zero_()
        if "w2_weight_scale" in layer._parameters:
            layer.w2_weight_scale.data[:, hidden:].fill_(1.0)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Check the weights and bring them into the form that runs.

        Raises:
            CheckpointError: a tensor is missing, or a scale is zero, negative or not finite.
        """
        self.check_loaded(layer)
        for name in ("w13", "w2"):
            weight, scale = f"{name}_weight", f"{name}_weight_scale"
            if self.online:
                self._quantize(layer, weight, scale)
            self._check(layer, scale)
            self._check_codes(layer, weight)
            if name == "w13" and not isinstance(layer, GptOssRoutedExperts):
                self._interleave(layer, weight, scale)
            if self.on_cpu:
                dense = getattr(layer, weight).data.float().mul_(getattr(layer, scale).data)
                replace_parameter(layer, weight, dense)
                delattr(layer, scale)
        if self.native:
            warm_routed(self, layer, self.moe.in_dtype, self.max_tokens)
        # a reload writes into the tensors that the kernel already has
        elif not self.on_cpu and self.moe_kernel is None:
            self._build_kernel(layer)

    def variant(self, layer: RoutedExperts, tokens: int) -> tuple[object, ...]:
        """What the kernels of moe_fp8 are compiled for in a batch of ``tokens``."""
        experts = layer.w13_weight.shape[0]
        return fp8_variant(tokens, layer.top_k, experts, layer.global_num_experts)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """Description of the weights for vLLM's kernel; None where that kernel is not used."""
        if self.on_cpu or self.native:
            return None
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            per_act_token_quant=True,
            per_out_ch_quant=True,
        )

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route and run the experts; x [T, H], router_logits [T, E] -> [T, H]."""
        if self.on_cpu:
            return route_and_run(layer, x, router_logits, "rows")
        return torch.ops.oss_fused.moe_fp8(
            x,
            router_logits,
            layer.w13_weight,
            layer.w13_weight_scale,
            getattr(layer, "w13_bias", None),
            layer.w2_weight,
            layer.w2_weight_scale,
            getattr(layer, "w2_bias", None),
            layer.top_k,
            layer.renormalize,
            layer.expert_map,
            layer.activation.value,
        )

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run tokens that vLLM routed: in its grouped GEMM, on a CPU in the reference."""
        if self.on_cpu:
            return run_routed(layer, x, topk_weights, topk_ids, "rows")
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def _build_kernel(self, layer: RoutedExperts) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=False,
        )
        experts = TritonExperts(moe_config=self.moe, quant_config=self.moe_quant_config)
        self.moe_kernel = mk.FusedMoEKernel(prepare, experts)

    def _interleave(self, layer: RoutedExperts, *names: str) -> None:
        """[gates; ups] -> gate, up, gate, up, ...: the order of every kernel except vLLM's."""
        if not (self.native or self.on_cpu):
            return
        for name in names:
            halves = getattr(layer, name).data.unflatten(1, (2, -1))
            replace_parameter(layer, name, halves.transpose(1, 2).flatten(1, 2).contiguous())

    def _quantize(self, layer: RoutedExperts, weight: str, scale: str) -> None:
        dense = getattr(layer, weight).data
        codes = torch.empty(dense.shape, dtype=FP8, device=dense.device)
        scales = torch.empty(*dense.shape[:2], 1, dtype=torch.float32, device=dense.device)
        for expert, rows in enumerate(dense):
            codes[expert], scales[expert] = torch.ops.oss_fused.quantize_fp8(rows, None, "channel")
        replace_parameter(layer, weight, codes)
        layer.register_parameter(scale, Parameter(scales, requires_grad=False))

    def _check(self, layer: RoutedExperts, name: str) -> None:
        scale = getattr(layer, name).data.flatten(1)
        good = scale.isfinite() & (scale > 0)
        if bool(good.all()):
            return
        local, row = (~good).nonzero()[0].tolist()
        value = scale[local, row].item()
        problem = "is missing from the checkpoint" if value == MISSING else f"holds {value}"
        tensor = expert_tensor(layer, self.prefix, name, local, row)
        raise CheckpointError(f"{tensor} {problem}; expected finite scales above 0")

    def _check_codes(self, layer: RoutedExperts, name: str) -> None:
        for local, codes in enumerate(getattr(layer, name).data):
            bad = ((codes.view(torch.uint8) & 0x7F) == 0x7F).any(-1)
            if bool(bad.any()):
                tensor = expert_tensor(layer, self.prefix, name, local, int(bad.nonzero()[0]))
                raise CheckpointError(
                    f"{tensor} is missing from the checkpoint, or holds NaN; expected FP8 codes of "
                    f"finite numbers"
                )
