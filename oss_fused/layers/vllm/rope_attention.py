# SPDX-License-Identifier: MIT
"""Attention from the fused projection: one kernel rotates q and k and writes the cache.

vLLM runs rotary embedding, the quantisation of q (FP8 cache) and the cache write as separate
kernels. ``torch.ops.oss_fused.rope_attention`` replaces them and the attention operator. Like that
operator it reads cache and slots from vLLM's forward context, and the graph is split at it for
piecewise CUDA graphs. The kernel includes norms per head (Qwen3). A layer with another kind of
embedding, cache or scaling keeps vLLM's operators.

Up to FEW_TOKENS the kernel can include the projection too (``qkv_rope_kv``). A compiled graph
cannot choose by batch size, so both operators look at the number of tokens: for few tokens,
``project_unless_fused`` returns memory that is never read, and rope_attention takes the codes
instead.
"""
# no postponed annotations: the operator's schema is read from them

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import (
    get_attention_context,
    unified_attention_with_output,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.gpt_oss import OAIAttention
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.mistral import MistralAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from oss_fused.kernels.op import LIBRARY
from oss_fused.kernels.tiles import ROW_BUCKETS
from oss_fused.layers.vllm.attention import FEW_TOKENS, FP8, OssAttentionImpl
from oss_fused.layers.vllm.linear import bf16_rows_of

_OP = "oss_fused::rope_attention"
# for which its kernels are compiled
_BUCKETS = tuple(bucket for bucket in ROW_BUCKETS if 16 <= bucket <= FEW_TOKENS)
# tokens for which rope_kv compiles its kernels
ROPE_COUNTS = (1, 128, 512)


def project_unless_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """fp8_gemm of more than FEW_TOKENS rows; for fewer, memory of the result's shape."""
    if x.shape[0] <= FEW_TOKENS:
        return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    return torch.ops.oss_fused.fp8_gemm(x, weight, x_scale, weight_scale, bias, out_dtype, True)


def _project_unless_fused_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def rope_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    layer_name: LayerNameType,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    levels: torch.Tensor | None = None,
) -> None:
    """Rotate q and k of ``qkv``, write k and v to the cache, attend into ``output``.

    Args:
        qkv: [T, (heads + 2 kv_heads) * head_dim] as the projection leaves it.
        positions: [T].
        output: [T, heads, head_dim].
        layer_name: of vLLM's attention layer.
        codes: [T, K], input of the projection where ``qkv`` is project_unless_fused's.
        scale: [T, 1] of the codes.
        levels: both levels of few rows of codes (kernels/levels.py).
    """
    metadata, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    rows, heads, size = output.shape
    keys, values = qkv[:, heads * size :].view(rows, 2, layer.num_kv_heads, size).unbind(1)
    if slots is None:
        # a profiling run has no cache, and attention only fills its output
        query = torch.empty_like(output)
    elif layer.impl.reads_rows(metadata):
        # more than few tokens
        rotated = layer.impl.rope(layer, (qkv,), positions, cache, slots, True)
        query, keys = rotated.view(rows, -1, size).split([heads, layer.num_kv_heads], 1)
    else:
        few = codes is not None and rows <= FEW_TOKENS
        projected = (codes, scale, levels) if few else (qkv,)
        query = layer.impl.rope(layer, projected, positions, cache, slots)
        query = query.view(rows, heads, size)
        # keys and values are in the cache: attention reads only the shape of these
    unified_attention_with_output(query, keys, values, output, layer_name)


def _rope_attention_fake(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    layer_name: LayerNameType,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    levels: torch.Tensor | None = None,
) -> None:
    return None


direct_register_custom_op(
    "project_unless_fused",
    project_unless_fused,
    fake_impl=_project_unless_fused_fake,
    target_lib=LIBRARY,
)
direct_register_custom_op(
    "rope_attention",
    rope_attention,
    mutates_args=["output"],
    fake_impl=_rope_attention_fake,
    target_lib=LIBRARY,
)


class RopeAndCache:
    """The first half of rope_attention for one attention module; see ``kernels/rope``."""

    def __init__(self, attention: Any) -> None:
        """Bind to ``attention``; every call reads its weights, which a reload may change."""
        self.attention = attention
        self.quantise_query = attention.attn.query_quant is not None
        # a norm per head needs whole heads, and the joined kernel splits heads
        self.joins = not hasattr(attention, "q_norm") and _joined_kernel_takes(attention)

    def __call__(
        self,
        layer: Any,
        projected: tuple[Any, ...],
        positions: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        with_keys: bool = False,
    ) -> torch.Tensor:
        """Write k and v; returns rotated q [T, heads * head_dim], FP8 where attention wants it.

        ``projected`` is (qkv,), or (codes, scale, levels or None) of what the projection
        has still to read. ``with_keys``, for (qkv,): k follows q in each row.
        """
        quantised = is_quantized_kv_cache(layer.kv_cache_dtype)
        if quantised:
            cache = cache.view(FP8)
        attention, rope = self.attention, self.attention.rotary_emb
        q_norm = getattr(attention, "q_norm", None)
        k_norm = getattr(attention, "k_norm", None)
        arguments = (
            positions,
            rope.cos_sin_cache,
            layer.num_heads,
            rope.is_neox_style,
            *cache.transpose(1, 2).split(layer.head_size, dim=-1),
            slots,
            layer._k_scale if quantised else None,
            layer._v_scale if quantised else None,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.variance_epsilon,
            layer._q_scale if self.quantise_query else None,
        )
        if len(projected) == 1:
            return torch.ops.oss_fused.rope_kv(*projected, *arguments, with_keys)
        (codes, scale, levels), linear = projected, attention.qkv_proj
        return torch.ops.oss_fused.qkv_rope_kv(
            codes,
            linear.weight,
            scale,
            linear.weight_scale,
            linear.bias,
            rope.cos_sin_cache.dtype,
            *arguments,
            True,
            levels,
        )

    def warm_up(self, dtype: torch.dtype, max_rows: int) -> None:
        """Compile for few, for more and for many tokens."""
        layer = self.attention.attn
        heads, size = layer.num_kv_heads, layer.head_size
        device = self.attention.rotary_emb.cos_sin_cache.device
        quantised = is_quantized_kv_cache(layer.kv_cache_dtype)
        cache_dtype = torch.uint8 if quantised else dtype
        # the kernel is compiled for the size of a page
        page = layer.impl.page_size
        cache = torch.zeros(1, heads, page, 2 * size, dtype=cache_dtype, device=device)
        for rows in sorted({min(max_rows, count) for count in ROPE_COUNTS}):
            qkv = torch.zeros(
                rows, (layer.num_heads + 2 * heads) * size, dtype=dtype, device=device
            )
            index = torch.zeros(rows, dtype=torch.int64, device=device)
            for with_keys in (False,) if quantised else (False, True):
                self(layer, (qkv,), index, cache, index - 1, with_keys)
        linear = self.attention.qkv_proj
        if not self.joins or getattr(linear, "_input_quant_key", None) != kFp8DynamicTokenSym:
            return
        most = bf16_rows_of(linear)
        levels = torch.zeros(2 * most, linear.weight.shape[1], dtype=FP8, device=device)
        # few and many rows of two levels, and each bucket of one
        counts = (1, *((most // 2, most, most + 1) if most else ()), *_BUCKETS)
        for rows in sorted({min(max_rows, count) for count in counts}):
            codes = torch.zeros(rows, linear.weight.shape[1], dtype=FP8, device=device)
            index = torch.zeros(rows, dtype=torch.int64, device=device)
            # named: weights load under the model's default dtype
            scale = torch.ones(rows, 1, dtype=torch.float32, device=device)
            self(layer, (codes, scale, levels), index, cache, index - 1)


def _is_token_wise(x: torch.Tensor | QuantizedActivation) -> bool:
    return isinstance(x, QuantizedActivation) and x.quant_key == kFp8DynamicTokenSym


def attend(attention: Any, positions: torch.Tensor, hidden_states: Any) -> torch.Tensor:
    """``o_proj(attention(rope(qkv_proj(hidden_states))))`` of a module that fits."""
    layer, linear = attention.attn, attention.qkv_proj
    codes, scale, levels = None, None, None
    if layer.impl.rope.joins and _is_token_wise(hidden_states):
        codes, scale = hidden_states.data, hidden_states.scale
        levels = getattr(hidden_states, "levels", None)
        qkv = torch.ops.oss_fused.project_unless_fused(
            codes,
            linear.weight,
            scale,
            linear.weight_scale,
            linear.bias,
            hidden_states.orig_dtype,
        )
    else:
        qkv, _ = linear(hidden_states)
    output = torch.empty(
        (qkv.shape[0], layer.num_heads, layer.head_size), dtype=qkv.dtype, device=qkv.device
    )
    name = _encode_layer_name(layer.layer_name)
    torch.ops.oss_fused.rope_attention(qkv, positions, output, name, codes, scale, levels)
    return attention.o_proj(output.view(qkv.shape[0], -1))[0]


class _FromProjection:
    """``forward`` of Llama-style attention."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return attend(self, positions, hidden_states)


class OssLlamaAttention(_FromProjection, LlamaAttention):
    """Llama's attention."""


class OssMistralAttention(_FromProjection, MistralAttention):
    """Mistral's attention."""


class OssQwen2Attention(_FromProjection, Qwen2Attention):
    """Qwen2's attention."""


class OssQwen3Attention(_FromProjection, Qwen3Attention):
    """Qwen3's attention; its norms per head are part of the kernel."""


class OssOAIAttention(OAIAttention):
    """gpt-oss's attention."""

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Projections and attention."""
        return attend(self, positions, hidden_states)


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    LlamaAttention: OssLlamaAttention,
    MistralAttention: OssMistralAttention,
    OAIAttention: OssOAIAttention,
    Qwen2Attention: OssQwen2Attention,
    Qwen3Attention: OssQwen3Attention,
}


def fuse_rope(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Use one kernel before attention in the attention modules of ``model`` that allow it.

    Call ``adopt_attention`` first: only modules with an OssAttentionImpl allow it.
    """
    dtype = vllm_config.model_config.dtype
    found = False
    modules: list[Any] = [m for m in model.modules() if type(m) in _FUSED]
    for module in modules:
        if not _fits(module, dtype):
            continue
        rope = module.rotary_emb
        # vLLM's kernels convert to this dtype at every call
        rope.cos_sin_cache = rope.cos_sin_cache.to(dtype)
        module.attn.impl.rope = RopeAndCache(module)
        module.__class__ = _FUSED[type(module)]
        found = True
    splits = vllm_config.compilation_config.splitting_ops
    if found and splits and _OP not in splits:
        splits.append(_OP)


def _joined_kernel_takes(attention: Any) -> bool:
    rope = attention.rotary_emb
    device = rope.cos_sin_cache.device
    if device.type != "cuda":
        return False
    from oss_fused.kernels.launch import runs_gluon

    if not runs_gluon(device):
        return False
    from oss_fused.kernels.qkv.stream import joins

    return joins(device, attention.attn.head_size, rope.rotary_dim, rope.is_neox_style)


def _fits(attention: Any, dtype: torch.dtype) -> bool:
    layer, rope = attention.attn, attention.rotary_emb
    kind: Any = type(rope)
    return (
        type(layer.impl) is OssAttentionImpl
        and isinstance(rope, RotaryEmbedding)
        and kind.forward_cuda is RotaryEmbedding.forward_cuda
        and kind.forward_native is RotaryEmbedding.forward_native
        and not rope.use_flashinfer
        and layer.head_size == layer.head_size_v == rope.head_size
        and layer.kv_sharing_target_layer_name is None
        and (layer.kv_cache_dtype in ("fp8", "fp8_e4m3") or layer.kv_cache_torch_dtype == dtype)
        # one scale per tensor
        and (layer.query_quant is None or layer.query_quant.group_shape.is_per_tensor())
        and not getattr(attention, "do_llama_4_scaling", False)
    )
