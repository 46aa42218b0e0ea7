# SPDX-License-Identifier: MIT
"""MoE experts: which method runs them, and how each checkpoint layout is loaded.

MXFP4 and FP8 experts run in native kernels (of this package) or in vLLM's. The option
expert_kernels chooses; a ``--moe-backend`` selects vLLM's. bf16 experts run in vLLM's kernels.
ExpertsLoader loads the experts of gpt-oss. On a CPU, native means the reference twins: a checkpoint
computes the same result on every processor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    GateLinear,
    MoEActivation,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.platforms import current_platform

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.errors import BackendUnavailableError, UnsupportedModelError
from oss_fused.kernels.moe.config import router_variant
from oss_fused.layers.vllm.experts.fp8 import OssFp8MoEMethod
from oss_fused.layers.vllm.experts.loader import CheckedExperts, ExpertsLoader
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod, check_block_scales
from oss_fused.layers.vllm.unquantized import OssUnquantizedMoEMethod
from oss_fused.layers.vllm.warmup import warm_batches
from oss_fused.quant.settings import ServingOptions, Settings

# gated activations that FP8 experts may have
_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.SWIGLUOAI)


class VllmMxfp4MoEMethod(CheckedExperts, GptOssMxfp4MoEMethod):
    """vLLM's MXFP4 expert kernels, loaded by ExpertsLoader, with checked block scales."""

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors.

        Raises:
            BackendUnavailableError: vLLM has no kernel for this machine.
        """
        self.prefix = prefix
        try:
            super().__init__(moe)
        except (NotImplementedError, ValueError) as error:
            raise BackendUnavailableError(
                f"{prefix!r}: vLLM has no MXFP4 expert kernel that runs here with "
                f"--moe-backend {moe.moe_backend} ({error}); expected expert_kernels='auto' and "
                f"no --moe-backend"
            ) from error

    def create_weights(self, layer: RoutedExperts, *args: Any, **extra: Any) -> None:
        """Register the parameters of vLLM's method with our loader."""
        self.loader = ExpertsLoader(layer, "mxfp4")
        extra["weight_loader"] = self.loader.load
        super().create_weights(layer, *args, **extra)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Check the block scales, then bring the weights into vLLM's form.

        Raises:
            CheckpointError: a tensor is missing, or a block scale is NaN.
        """
        self.check_loaded(layer)
        check_block_scales(layer, self.prefix)
        super().process_weights_after_loading(layer)


class VllmBf16MoEMethod(CheckedExperts, UnquantizedFusedMoEMethod):
    """vLLM's bf16 expert kernels, loaded by ExpertsLoader."""

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        """Make the method of one layer; ``prefix`` is its name, for errors."""
        super().__init__(moe)
        self.prefix = prefix

    def create_weights(self, layer: RoutedExperts, *args: Any, **extra: Any) -> None:
        """Register the parameters of vLLM's method with our loader."""
        self.loader = ExpertsLoader(layer, "bf16")
        extra["weight_loader"] = self.loader.load
        super().create_weights(layer, *args, **extra)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the weights; on a CPU anew after a reload, where vLLM keeps its old packed copy.

        Raises:
            CheckpointError: a tensor is missing.
        """
        self.check_loaded(layer)
        if current_platform.is_cpu():
            self.moe_kernel = None
        super().process_weights_after_loading(layer)


def experts_method(layer: RoutedExperts, settings: Settings, prefix: str) -> FusedMoEMethodBase:
    """The method that runs the experts of ``layer``.

    Args:
        layer: the experts.
        settings: how the checkpoint stores them, and what becomes of them.
        prefix: the layer's name, for errors.

    Raises:
        BackendUnavailableError: the option expert_kernels asks for kernels that do not exist here.
        UnsupportedModelError: experts of this kind cannot be served.
    """
    moe, layout = layer.moe_config, settings.experts
    if layout == "fp8" or settings.quantize_experts:
        kernels = settings.serving.expert_kernels
        return _fp8_method(layer, prefix, online=layout == "bf16", kernels=kernels)
    if not isinstance(layer, GptOssRoutedExperts):
        if layout != "bf16":
            raise UnsupportedModelError(
                f"{prefix!r} ({type(layer).__name__}): experts={layout!r} is supported for "
                f"gpt-oss only; expected bf16 or FP8 experts"
            )
        return OssUnquantizedMoEMethod(moe, prefix)
    if layout == "bf16":
        return VllmBf16MoEMethod(moe, prefix)
    return _mxfp4_method(moe, prefix, settings.serving)


def _fp8_method(
    layer: RoutedExperts, prefix: str, online: bool, kernels: str
) -> FusedMoEMethodBase:
    moe = layer.moe_config
    plain = layer.swiglu_limit is None and layer.swiglu_alpha is None and layer.swiglu_beta is None
    if layer.activation not in _ACTIVATIONS or not plain:
        raise UnsupportedModelError(
            f"{prefix!r}: experts='fp8' with activation {layer.activation.value!r} (swiglu_limit="
            f"{layer.swiglu_limit}, swiglu_alpha={layer.swiglu_alpha}, swiglu_beta="
            f"{layer.swiglu_beta}); expected silu, or gpt-oss"
        )
    refusal = _kernel_refusal(moe) or _shape_refusal(moe)
    routes = _routes_by_softmax(layer)
    if not routes:
        refusal = refusal or "a routing other than softmax and top-k"
    native = _runs_native("FP8", moe, refusal, kernels)
    if current_platform.is_cpu():
        if not native:
            raise BackendUnavailableError(
                f"{prefix!r}: vLLM has no kernel on a CPU for FP8 experts with a scale per row; "
                f"expected expert_kernels='auto' and no --moe-backend"
            )
        _refuse_lora(moe, "fp8", prefix)
    return OssFp8MoEMethod(moe, prefix, online, routes, native)


def _routes_by_softmax(layer: RoutedExperts) -> bool:
    """Whether the layer's routing is a softmax over the experts and the largest top_k."""
    return (
        layer.scoring_func == "softmax"
        and not layer.use_grouped_topk
        and layer.custom_routing_function is None
        and layer.e_score_correction_bias is None
        and not layer.apply_router_weight_on_input
        and layer.expert_map_manager.num_fused_shared_experts == 0
    )


def _shape_refusal(moe: FusedMoEConfig) -> str | None:
    hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
    if hidden % 16 or inner % 16:
        return f"hidden size {hidden} and {inner} intermediate columns a rank"
    return None


def _runs_native(kind: str, moe: FusedMoEConfig, refusal: str | None, kernels: str) -> bool:
    """Whether a layer runs in the native kernel of that kind; ``refusal``: why it cannot, or None.

    On a CPU it does unless the user asks for vLLM's kernel.

    Raises:
        BackendUnavailableError: expert_kernels="native" asks for a kernel that cannot run it.
    """
    if kernels == "native" and refusal:
        raise BackendUnavailableError(
            f"expert_kernels='native': the native {kind} expert kernel does not run with "
            f"{refusal}; expected 'auto' or 'vllm'"
        )
    if current_platform.is_cpu():
        return kernels != "vllm" and moe.moe_backend == "auto"
    return kernels == "native" or (kernels == "auto" and _native_is_faster() and not refusal)


def _mxfp4_method(moe: FusedMoEConfig, prefix: str, options: ServingOptions) -> FusedMoEMethodBase:
    native = _runs_native("MXFP4", moe, _kernel_refusal(moe), options.expert_kernels)
    if current_platform.is_cpu():
        _refuse_lora(moe, "mxfp4", prefix)
    if native:
        return OssMxfp4MoEMethod(moe, prefix, options.expert_activations)
    return VllmMxfp4MoEMethod(moe, prefix)


def _native_is_faster() -> bool:
    # on an H200, decode is faster at every batch size (docs/results/h200/moe.json), and on an H100
    # at 1, 8, 32 and 128 (docs/results/h100/decode_gpt_oss_20b). Prefill with bf16 activations is
    # slower on an H200, by less than decode gains. No other GPU was measured
    return current_platform.is_cuda() and current_platform.is_device_capability(90)


def _kernel_refusal(moe: FusedMoEConfig) -> str | None:
    """Why the native kernels cannot run this layer; None if they can."""
    parallel = moe.moe_parallel_config
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend}"
    if moe.is_lora_enabled:
        return "LoRA"
    if parallel.enable_eplb:
        return "expert load balancing"
    if get_current_vllm_config().aux_output_config.enable_return_routed_experts:
        # vLLM takes the choice between its router and its kernels, which these have joined
        return "--enable-return-routed-experts"
    # vLLM's default gathers all ranks' tokens before the kernel and sums the shares after it
    gathered = parallel.use_ag_rs_all2all_kernels and parallel.pcp_size == 1
    if parallel.use_all2all_kernels and not gathered:
        return f"all2all backend {parallel.all2all_backend}"
    return None


def _refuse_lora(moe: FusedMoEConfig, layout: str, prefix: str) -> None:
    if moe.is_lora_enabled:
        raise UnsupportedModelError(
            f"{prefix!r}: LoRA with experts={layout!r} does not run on a CPU; serve it on a GPU, "
            f"or serve a bf16 checkpoint"
        )


def norm_and_experts(
    norm: RMSNorm, mlp: Any, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``mlp(norm(x + residual))`` of gpt-oss, and the new residual.

    On a GPU the norm and the router's product are one operator, one launch in decode; a router
    that is not a plain matrix of x's dtype, or that sees a part of the tokens, runs as in vLLM.

    Args:
        norm: the RMSNorm before the experts.
        mlp: vLLM's MLPBlock.
        x: [T, H].
        residual: [T, H].
    """
    router = mlp.router
    if not (x.is_cuda and router_joins_norm(mlp, x.dtype)):
        x, residual = norm(x, residual)
        return mlp(x), residual
    x, residual, logits = torch.ops.oss_fused.add_rms_norm_router(
        x, residual, norm.weight, norm.variance_epsilon, router.weight, router.bias, True
    )
    out = mlp.experts(hidden_states=x, router_logits=logits)
    return out[:, : mlp.hidden_size], residual


def router_joins_norm(mlp: Any, dtype: torch.dtype) -> bool:
    """Whether the router's product is the norm's: a plain matrix of ``dtype`` for all tokens."""
    router = mlp.router
    plain = type(router) is GateLinear and router.is_unquantized
    return plain and router.weight.dtype == dtype and not mlp.is_sequence_parallel


def warm_router(norm: RMSNorm, mlp: Any, limit: int) -> None:
    """Compile what ``norm_and_experts`` runs before the experts, for up to ``limit`` tokens."""
    gain, router = norm.weight, mlp.router
    if not (gain.is_cuda and router_joins_norm(mlp, gain.dtype)):
        return

    def run(tokens: int) -> None:
        x = torch.zeros(tokens, gain.shape[0], dtype=gain.dtype, device=gain.device)
        torch.ops.oss_fused.add_rms_norm_router(
            x, x, gain, norm.variance_epsilon, router.weight, router.bias, True
        )

    shape, bias = tuple(router.weight.shape), router.bias is None
    variant = functools.partial(router_variant, experts=len(router.weight))
    warm_batches(("router", shape, bias, gain.dtype, gain.device), limit, variant, run)
