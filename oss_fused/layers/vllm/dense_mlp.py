# SPDX-License-Identifier: MIT
"""Llama's MLP on quantised activations, alone or with the next layer's norm as ``mlp_norm``.

The norm behind the MLP is the next layer's, so a layer hands that one its quantised input, but for
the last layer of a rank. A layer whose MLP ranks share ends with the MLP's result, as in vLLM: the
sum over ranks lies between both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.op import direct
from oss_fused.kernels.tiles import has_two_parts, row_bucket
from oss_fused.layers.vllm.following import tell_following
from oss_fused.layers.vllm.linear import (
    FP8,
    LevelledActivation,
    MlpInput,
    OssFp8LinearMethod,
    bf16_rows_of,
)
from oss_fused.layers.vllm.warmup import bias_of, warm_batches
from oss_fused.quant.settings import ServingOptions

_act_mul_quant = direct("act_mul_quant")


def join_mlps(
    model: Any, kinds: tuple[type[nn.Module], ...], vllm_config: VllmConfig, options: ServingOptions
) -> None:
    """Tell each layer of classes ``kinds`` which norm follows it, where its MLP may run that norm.

    Not with the monitor, which looks at the MLP's input, and not with speculation: some draft
    models read hidden states between layers.
    """
    if not options.monitor_every and vllm_config.speculative_config is None:
        tell_following(model.layers, kinds, "self_attn")


def gated_mlp(mlp: Any, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
    """Llama's MLP: ``down(silu(gate) * up)``; what the down projection reads is quantised."""
    projection = mlp.gate_up_proj
    key = get_input_quant_key(mlp.down_proj)
    if key != kFp8DynamicTokenSym or not isinstance(mlp.act_fn, SiluAndMul):
        return mlp.down_proj(mlp.act_fn(projection(x)[0]))[0]
    if isinstance(x, QuantizedActivation) and _is_one_operator(mlp, x):
        weights = (projection.weight, projection.weight_scale)
        joined = MlpInput(x.data, x.scale, x.orig_dtype, x.orig_shape, key, *weights)
        return mlp.down_proj(joined)[0]
    gate_up, _ = projection(x)
    codes, scale = _act_mul_quant(gate_up, "silu", None)
    quantised = QuantizedActivation(
        data=codes, scale=scale, orig_dtype=gate_up.dtype, orig_shape=codes.shape, quant_key=key
    )
    return mlp.down_proj(quantised)[0]


def _is_one_operator(mlp: Any, x: QuantizedActivation) -> bool:
    """Whether one operator may run the MLP: SiLU, no bias of gate_up, scales per token, a GPU."""
    projection, down = mlp.gate_up_proj, mlp.down_proj
    return (
        x.quant_key == get_input_quant_key(down) == kFp8DynamicTokenSym
        and isinstance(mlp.act_fn, SiluAndMul)
        and type(projection.quant_method) is OssFp8LinearMethod
        and type(down.quant_method) is OssFp8LinearMethod
        and projection.weight.is_cuda
        and projection.bias is None
    )


def runs_next_norm(layer: Any, x: torch.Tensor | QuantizedActivation) -> bool:
    """Whether ``mlp_norm`` runs the MLP of ``layer`` on ``x``, and the norm behind it."""
    following, mlp = layer.following, layer.mlp
    return (
        following is not None
        and isinstance(x, QuantizedActivation)
        and _is_one_operator(mlp, x)
        and mlp.down_proj.tp_size == 1
        and get_input_quant_key(following.reader) is not None
    )


def mlp_and_next_norm(
    layer: Any, x: QuantizedActivation, residual: torch.Tensor
) -> tuple[QuantizedActivation, torch.Tensor]:
    """The next layer's normed and quantised input, and the new residual.

    Args:
        layer: for which ``runs_next_norm`` holds.
        x: the normed and quantised input of its MLP, [T, H].
        residual: [T, H].
    """
    projection, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
    norm, reader = layer.following.norm, layer.following.reader
    key = get_input_quant_key(reader)
    codes, scale, residual, levels = torch.ops.oss_fused.mlp_norm(
        x.data,
        projection.weight,
        x.scale,
        projection.weight_scale,
        down.weight,
        down.weight_scale,
        bias_of(down),
        residual,
        norm.weight,
        norm.variance_epsilon,
        None if key == kFp8DynamicTokenSym else reader.input_scale,
        "silu",
        True,
        bf16_rows_of(reader),
    )
    return LevelledActivation(codes, scale, x.orig_dtype, x.orig_shape, key, levels), residual


def warm_mlp(layer: Any, limit: int) -> None:
    """Compile what ``mlp_and_next_norm`` runs and its parts do not, for up to ``limit`` tokens."""
    norm, weight = layer.post_attention_layernorm.weight, layer.mlp.down_proj.weight
    hidden, dtype, device = norm.shape[0], norm.dtype, norm.device

    def codes(tokens: int) -> QuantizedActivation:
        x = torch.zeros(tokens, hidden, dtype=FP8, device=device)
        scale = torch.ones(tokens, 1, dtype=torch.float32, device=device)
        return QuantizedActivation(x, scale, dtype, x.shape, kFp8DynamicTokenSym)

    def run(tokens: int) -> None:
        residual = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        mlp_and_next_norm(layer, codes(tokens), residual)

    def variant(tokens: int) -> int:
        return row_bucket(tokens) if has_two_parts(tokens, *weight.shape) else 0

    if not runs_next_norm(layer, codes(0)):
        return
    reader = layer.following.reader
    key = ("mlp", tuple(weight.shape), get_input_quant_key(reader), bf16_rows_of(reader))
    warm_batches((*key, bias_of(layer.mlp.down_proj) is None, dtype, device), limit, variant, run)
