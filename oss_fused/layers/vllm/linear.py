# SPDX-License-Identifier: MIT
"""FP8 linear layers and FP8 lm_head of a served model.

Weights are [N, K] float8_e4m3fn with a scale per output row. A CPU holds them as bf16, which
represents every code, in the order that its bf16 instructions read. Both happen once, after
loading: at every call they would take longer than the product of few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import replace_parameter

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.gemm import packed
from oss_fused.kernels.levels import BF16_ROWS
from oss_fused.kernels.op import direct
from oss_fused.layers.vllm.checks import (
    FLOATS,
    MISSING,
    check_bias,
    check_scale,
    check_unquantised,
    check_weight,
    checked_loader,
)
from oss_fused.layers.vllm.loaded import CheckedMethod
from oss_fused.layers.vllm.warmup import max_tokens, warm_linear
from oss_fused.quant.scheme import QuantizationScheme

logger = init_logger(__name__)

_fp8_gemm, _fp8_linear = direct("fp8_gemm"), direct("fp8_linear")
_weight_only_linear, _mlp_fp8 = direct("weight_only_linear"), direct("mlp_fp8")

FP8 = torch.float8_e4m3fn


# what --load-format dummy fills scales with: codes of random weights then stay small
_DUMMY_SCALE = 1.0


@dataclass
class LevelledActivation(QuantizedActivation):
    """A quantised activation whose few rows have two levels (kernels/levels.py)."""

    levels: torch.Tensor | None = None


@dataclass
class MlpInput(QuantizedActivation):
    """What a dense MLP reads, for its down projection: that runs the gate_up projection as well.

    The activation is SiLU; ``weight`` and ``weight_scale`` are those of the gate_up projection.
    """

    weight: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None


@register_weight_loader_v2_supported_method
class OssFp8LinearMethod(CheckedMethod, LinearMethodBase):
    """A linear layer, or lm_head, with FP8 weights."""

    def __init__(self, scheme: QuantizationScheme, calibrated: bool, prefix: str) -> None:
        """Make the method of one layer.

        Args:
            scheme: of weights and activations.
            calibrated: the checkpoint holds codes and scales; else its weights are quantised
                after loading.
            prefix: the layer's name, for errors.
        """
        self.scheme = scheme
        self.calibrated = calibrated
        self.prefix = prefix
        self.tied = False
        self.head_is_fed = False
        # a draft's head: where its checkpoint has none, vLLM puts the served model's in its place
        self.may_be_absent = False
        # by the monitor's policy: activations stay in 16 bits whatever the scheme says
        self.bits16_inputs = False
        # rows up to which activations have two levels (kernels/levels.py), where the kernels of
        # the layer's device take them and ``bf16_if_few`` asks for it
        self.bf16_if_few = False
        self.bf16_rows = 0

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register ``weight`` and, of a calibrated checkpoint, its scales."""
        loader = extra["weight_loader"]
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.oss_max_tokens = max_tokens()
        self.dtype = params_dtype
        weight = torch.empty(
            rows, input_size_per_partition, dtype=FP8 if self.calibrated else params_dtype
        )
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=weight,
                input_dim=1,
                output_dim=0,
                weight_loader=self._loader(loader, "weight", FP8 if self.calibrated else None),
            ),
        )
        if self.calibrated:
            scale = ChannelQuantScaleParameter(
                data=torch.empty(rows, 1, dtype=torch.float32),
                output_dim=0,
                weight_loader=self._loader(loader, "weight_scale", torch.float32),
            )
            scale.dummy_weight_value = _DUMMY_SCALE
            layer.register_parameter("weight_scale", scale)
            if self.scheme.needs_data:
                parts = torch.empty(len(output_partition_sizes), dtype=torch.float32)
                scale = PerTensorScaleParameter(
                    data=parts, weight_loader=self._loader(loader, "input_scale", torch.float32)
                )
                scale.dummy_weight_value = _DUMMY_SCALE
                layer.register_parameter("input_scale", scale)
        self.mark_missing(layer)

    def mark_missing(self, layer: Any) -> None:
        """NaN in the weight, MISSING in the scales: neither comes from a good checkpoint."""
        layer.weight.data.fill_(float("nan"))
        for name in ("weight_scale", "input_scale"):
            if name in layer._parameters:
                layer._parameters[name].data.fill_(MISSING)

    def _loader(self, loader: Any, leaf: str, dtype: torch.dtype | None) -> Any:
        """``loader`` of that parameter, for tensors of ``dtype`` (None: of any floating point)."""
        return checked_loader(
            loader, f"{self.prefix}.{leaf}", FLOATS if dtype is None else (dtype,)
        )

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Tie a head to the embedding, which itself stays as it is.

        A head that is quantised while loading has a tensor of its own: our model classes load
        the embedding into both, others share it until it is quantised.
        """
        self.tied = True
        if self.calibrated:
            # vLLM ties only where the checkpoint has no head of its own: it stays unquantised
            for name in ("weight_scale", "input_scale"):
                if name in layer._parameters:
                    delattr(layer, name)
            layer.quant_method = UnquantizedEmbeddingMethod()
        elif self.head_is_fed:
            return layer
        return super().tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise or check the weights, and bring them into the form that the kernels take.

        Raises:
            CheckpointError: a weight, scale or bias is missing, or not finite.
        """
        if self.may_be_absent and bool(layer.weight.isnan().all()):
            return
        check_bias(layer, self.prefix)
        if self.calibrated:
            _check_loaded(layer, self.prefix)
            codes, scale = layer.weight.data, layer.weight_scale.data
        else:
            check_unquantised(layer, self.prefix)
            codes, scale = torch.ops.oss_fused.quantize_fp8(layer.weight.data, None, "channel")
        if not codes.is_cuda:
            codes = _numbers(codes, self.dtype)
        replace_parameter(layer, "weight", codes)
        if self.calibrated:
            replace_parameter(layer, "weight_scale", scale)
        else:
            layer.register_parameter("weight_scale", Parameter(scale, requires_grad=False))
        if self.scheme.needs_data:
            # the linears fused into one share their input, and so one scale
            replace_parameter(layer, "input_scale", layer.input_scale.data.amax().view(1))
        self._advertise(layer)
        warm_linear(layer, self.apply, self.dtype, self.weight_only, self.bf16_rows)

    @property
    def weight_only(self) -> bool:
        """Whether activations keep their 16 bits."""
        return self.bits16_inputs or self.scheme.input_activations is None

    def _advertise(self, layer: Any) -> None:
        """Tell producers of activations which quantised form this layer takes."""
        inputs = self.scheme.input_activations
        if self.weight_only or inputs is None:
            return
        if inputs.dynamic:
            layer._input_quant_key = kFp8DynamicTokenSym
            if self.bf16_if_few and _takes_levels(layer):
                self.bf16_rows = BF16_ROWS
        elif isinstance(layer, (QKVParallelLinear, MergedColumnParallelLinear)):
            # not for down_proj: vLLM would fuse its own SiLU kernel, which rounds differently
            layer._input_quant_key = kFp8StaticTensorSym

    def apply(
        self,
        layer: Any,
        x: torch.Tensor | QuantizedActivation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x @ weight.T + bias``; x [..., K] in the model's dtype, or quantised already."""
        if isinstance(x, QuantizedActivation):
            rows = x.data.view(-1, x.data.shape[-1])
            scale = x.scale if self.scheme.needs_data else x.scale.view(-1, 1)
            if isinstance(x, MlpInput):
                gate_up = (rows, x.weight, scale, x.weight_scale)
                down = (layer.weight, layer.weight_scale, bias)
                out = _mlp_fp8(*gate_up, *down, x.orig_dtype, "silu", True)
                return out.view(*x.orig_shape[:-1], -1)
            levels = getattr(x, "levels", None)
            operands = (rows, layer.weight, scale, layer.weight_scale, bias, x.orig_dtype, True)
            return _fp8_gemm(*operands, levels).view(*x.orig_shape[:-1], -1)
        if self.weight_only:
            return _weight_only_linear(x, layer.weight, layer.weight_scale, bias, True)
        input_scale = layer.input_scale if self.scheme.needs_data else None
        weight = (layer.weight, layer.weight_scale, input_scale, bias)
        return _fp8_linear(x, *weight, True, self.bf16_rows)


def _takes_levels(layer: Any) -> bool:
    """Whether few rows take two levels in the time of one: on Hopper, in rows of whole words."""
    if not layer.weight.is_cuda:
        return False
    from oss_fused.kernels.launch import runs_gluon

    # the codes of a dense layer's MLP have one level
    dense = isinstance(layer, MergedColumnParallelLinear)
    return runs_gluon(layer.weight.device) and layer.weight.shape[1] % 16 == 0 and not dense


def bf16_rows_of(reader: Any) -> int:
    """Rows up to which the linear layer ``reader`` takes two levels from a norm."""
    method = getattr(reader, "quant_method", None)
    return method.bf16_rows if isinstance(method, OssFp8LinearMethod) else 0


def _numbers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes' numbers in bf16 [N, K], two bytes each, for a CPU and a model of ``dtype``.

    Packed for its bf16 instructions where vLLM has operations for that and the shape fits;
    elsewhere wide layers have N innermost: oneDNN multiplies one row by a wide weight faster in
    that order, and by others in this.
    """
    n, k = codes.shape
    numbers = codes.to(torch.bfloat16)
    # other activations may need more bits than a packed product takes
    if dtype == torch.bfloat16:
        if packed.available():
            return packed.pack(numbers) if packed.fits(n, k) else numbers
        if packed.HAS_INSTRUCTIONS:
            logger.warning_once(
                "oss_fused: this vLLM has no product of packed bf16 weights for this CPU; linear "
                "layers take PyTorch's, which packs the weight at every call"
            )
    return numbers.t().contiguous().t() if n > 2 * k else numbers


def _check_loaded(layer: Any, prefix: str) -> None:
    scale = layer.weight_scale.data
    if isinstance(layer, ParallelLMHead):
        # rows that pad the vocabulary come from no checkpoint
        used = layer.num_org_embeddings_per_partition
        scale[used:] = 1.0
    check_weight(f"{prefix}.weight", layer.weight.data, layer.logical_widths)
    check_scale(f"{prefix}.weight_scale", scale, layer.logical_widths)
    if "input_scale" in layer._parameters:
        check_scale(
            f"{prefix}.input_scale", layer.input_scale.data, [1] * len(layer.logical_widths)
        )
