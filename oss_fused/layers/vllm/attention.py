# SPDX-License-Identifier: MIT
"""Attention in native kernels: decode batches, and prompts in layers with a short window.

A decode batch has one token per sequence, or up to 1 + d where a step verifies d drafts. It runs
``torch.ops.oss_fused.decode_attention``: one launch, where FlashAttention 3 takes three at short
context. Prompts run ``window_attention`` where a layer's window is short. Other batches run
FlashAttention, and so does what the kernels lack: soft cap, ALiBi, context parallelism, prefix-LM
masks. FlashAttention 3 reads the rows of a step in which all sequences begin (fresh_rows.py), and
else the cache. Metadata, cache layout and cache writes are vLLM's in all cases, so each batch can
choose.
The option attention_kernels="vllm" turns both native kernels off.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.attention import MOST_WINDOW
from oss_fused.layers.vllm.fresh_rows import is_fresh
from oss_fused.layers.vllm.sampled_rows import leave_graphs, noted_rows, take_rows
from oss_fused.layers.vllm.warmup import is_new, when_ready

FP8 = torch.float8_e4m3fn
# tokens of one sequence in a decode batch; steps that verify more drafts run FlashAttention
MOST_QUERIES = 8
# tokens of each sequence, on average, from which on window_attention runs a step
_PROMPT_TOKENS = 16
# tokens up to which qkv_rope_kv measured faster than projection and rope_kv; at 256 it is slower
FEW_TOKENS = 128

logger = init_logger(__name__)


class OssAttentionImpl(FlashAttentionImpl):
    """FlashAttention, but decode batches and prompts in short windows run native kernels."""

    arrivals: torch.Tensor
    max_rows: int
    # positions of a page of the cache
    page_size: int
    # tokens of one sequence up to which a batch is a decode batch
    max_queries: int = 1
    # rotary embedding and cache write as one kernel, where rope_attention.py set it up
    rope: Any = None
    # of the last decoder layer, which some steps need for sampled rows only (sampled_rows.py)
    is_last = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compile both kernels, for every number of splits, so that no request waits for them."""
        super().process_weights_after_loading(act_dtype)
        # after sleep the memory has arbitrary content until the reload
        self.arrivals.zero_()
        _warm_up(self, act_dtype)
        if self.rope is not None:
            when_ready(functools.partial(self.rope.warm_up, act_dtype, self.max_rows))

    def forward(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention into ``output``; arguments as in FlashAttentionImpl.forward."""
        native = _is_plain(attn_metadata) and output_scale is None and output_block_scale is None
        sampled = noted_rows(attn_metadata) if self.is_last else None
        if native and sampled is not None:
            attended = output.new_empty(sampled.shape[0], *output.shape[1:])
            self._decode(layer, take_rows(query, sampled), kv_cache, attn_metadata, attended, False)
            # the other rows go through the rest of the layer, and nothing reads what comes of them
            output.zero_().index_copy_(0, sampled, attended)
            leave_graphs()
        elif native and attn_metadata.max_query_len <= self.max_queries:
            rows, several = attn_metadata.num_actual_tokens, attn_metadata.max_query_len > 1
            self._decode(layer, query[:rows], kv_cache, attn_metadata, output[:rows], several)
        elif native and self._reads_windows(attn_metadata):
            self._attend_window(layer, query, kv_cache, attn_metadata, output)
        elif native and self.reads_rows(attn_metadata):
            self._attend_rows(query, key, value, attn_metadata, output)
        else:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale=output_scale,
                output_block_scale=output_block_scale,
            )
        return output

    def _reads_windows(self, attn_metadata: FlashAttentionMetadata) -> bool:
        """Whether window_attention runs a step with prompts, of which each has programs of its own.

        In a graph of a mixed batch all sequences count that it may hold: it runs FlashAttention
        unless --max-num-seqs is small.
        """
        least = _PROMPT_TOKENS * attn_metadata.seq_lens.shape[0]
        return _is_window_short(self) and attn_metadata.num_actual_tokens >= least

    def reads_rows(self, attn_metadata: Any) -> bool:
        """Whether a step may read keys and values from its rows, rotated, instead of the cache.

        An FP8 cache holds other values than the rows, and so does that of another layer. Few tokens
        gain nothing.
        """
        return (
            self.vllm_flash_attn_version == 3
            and self.kv_sharing_target_layer_name is None
            and not is_quantized_kv_cache(self.kv_cache_dtype)
            and not _is_window_short(self)
            and _is_plain(attn_metadata)
            and is_fresh(attn_metadata)
            and attn_metadata.num_actual_tokens > FEW_TOKENS
            and attn_metadata.max_query_len > self.max_queries
            # whatever the metadata says: replays of a graph have other sequences
            and not torch.cuda.is_current_stream_capturing()
        )

    def _attend_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attention of a step in which all sequences begin."""
        # only a vLLM for GPUs has it
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        rows, starts = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        longest = attn_metadata.max_query_len
        flash_attn_varlen_func(
            q=query[:rows],
            k=key[:rows],
            v=value[:rows],
            out=output[:rows],
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            cu_seqlens_k=starts,
            max_seqlen_k=longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=list(self.sliding_window),
            fa_version=3,
            s_aux=self.sinks,
        )

    def _attend_window(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attention of a step with prompts whose queries see a short window."""
        rows = attn_metadata.num_actual_tokens
        keys, values, scales = self._cache(layer, query, kv_cache)
        torch.ops.oss_fused.window_attention(
            query[:rows],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            output[:rows],
            self.scale,
            _window_of(self),
            self.sinks,
            *scales,
        )

    def _cache(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Keys, values [pages, positions, heads, D] and the scales of query, keys and values."""
        quantised = is_quantized_kv_cache(self.kv_cache_dtype)
        if quantised:
            kv_cache = kv_cache.view(FP8)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        q_scale = layer._q_scale if query.dtype == FP8 else None
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if quantised else (None, None)
        return keys, values, (q_scale, k_scale, v_scale)

    def _decode(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        several: bool,
    ) -> None:
        """Attention of the last token of each sequence, or of ``several``, up to max_queries."""
        keys, values, scales = self._cache(layer, query, kv_cache)
        torch.ops.oss_fused.decode_attention(
            query,
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            output,
            self.arrivals,
            self.scale,
            _window_of(self),
            self.sinks,
            *scales,
            # table, lengths and starts are made before the step's first kernel
            True,
            attn_metadata.query_start_loc if several else None,
            # not the batch's own number: every other one is another kernel to compile
            self.max_queries if several else 1,
        )


def adopt_attention(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Give the attention layers of ``model`` that can use them the native kernels.

    The implementation object changes its class, because vLLM has no hook between a backend and
    its implementation. A new backend would lose the special cases that vLLM has for this name.
    """
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        return
    queries = _queries(vllm_config)
    scheduler = vllm_config.scheduler_config
    # CUDA graphs pad a decode step, at most to so many tokens; a program takes one or more
    rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * queries)
    device = next(model.parameters()).device
    arrivals: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        if not isinstance(layer, Attention) or not _fits(layer.impl):
            continue
        layer.impl.__class__ = OssAttentionImpl
        layer.impl.max_rows = rows
        layer.impl.max_queries = queries
        layer.impl.page_size = vllm_config.cache_config.block_size
        # one buffer for all layers: their launches follow one another on one stream
        size = rows * layer.impl.num_kv_heads
        if size not in arrivals:
            arrivals[size] = torch.zeros(size, dtype=torch.int32, device=device)
        layer.impl.arrivals = arrivals[size]
        # sleep at level 2 keeps buffers alone
        layer.register_buffer("oss_arrivals", arrivals[size], persistent=False)


def _queries(vllm_config: VllmConfig) -> int:
    """Tokens per sequence up to which steps run decode_attention."""
    speculative = vllm_config.speculative_config
    queries = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    if queries <= MOST_QUERIES:
        return queries
    logger.warning_once(
        "oss_fused: num_speculative_tokens=%d: steps that verify more than %d drafts run "
        "FlashAttention",
        queries - 1,
        MOST_QUERIES - 1,
    )
    return 1


def _is_plain(attn_metadata: Any) -> bool:
    """Whether queries see what lies before them and nothing else, but for a window."""
    return (
        attn_metadata is not None
        and attn_metadata.causal is True
        and attn_metadata.rswa_prefix_lens is None
        and attn_metadata.mm_prefix_query_range_tensor is None
    )


def _window_of(impl: Any) -> int:
    """Positions that a query sees, itself included; 0 for all."""
    return int(impl.sliding_window[0]) + 1


def _is_window_short(impl: Any) -> bool:
    """Whether window_attention takes the window, and heads of the width that it is made for."""
    return 0 < _window_of(impl) <= MOST_WINDOW and impl.head_size <= 128


def _fits(impl: Any) -> bool:
    return (
        type(impl) is FlashAttentionImpl
        and impl.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and impl.dcp_world_size == 1
        and impl.head_size <= 256
    )


def _warm_up(impl: OssAttentionImpl, dtype: torch.dtype) -> None:
    heads, kv_heads, size = impl.num_heads, impl.num_kv_heads, impl.head_size
    quantised = is_quantized_kv_cache(impl.kv_cache_dtype)
    shape = heads, kv_heads, size, impl.sliding_window, impl.max_queries, impl.page_size
    key = ("attention", *shape, dtype, quantised, impl.sinks is None, impl.max_rows)
    if is_new(key):
        when_ready(functools.partial(_run_rows, impl, dtype))


def _batches_up_to(most: int) -> set[int]:
    """Powers of two and ``most``: the launch changes at most once between two of them."""
    return {1 << power for power in range(most.bit_length())} | {most} - {0}


def _run_rows(impl: OssAttentionImpl, dtype: torch.dtype) -> None:
    heads, kv_heads, size = impl.num_heads, impl.num_kv_heads, impl.head_size
    quantised = is_quantized_kv_cache(impl.kv_cache_dtype)
    device = impl.arrivals.device
    cache_dtype = FP8 if quantised else dtype
    # the kernel is compiled for the size of a page
    cache = torch.zeros(1, kv_heads, impl.page_size, 2 * size, dtype=cache_dtype, device=device)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    # named: weights load under the model's default dtype
    one = torch.ones(1, dtype=torch.float32, device=device) if quantised else None
    window = _window_of(impl)
    if _is_window_short(impl):
        query = torch.zeros(1, heads, size, dtype=cache_dtype, device=device)
        lens = torch.ones(1, dtype=torch.int32, device=device)
        torch.ops.oss_fused.window_attention(
            *(query, keys, values, torch.zeros_like(lens)[None], lens, lens.new_tensor([0, 1])),
            torch.empty(1, heads, size, dtype=dtype, device=device),
            *(impl.scale, window, impl.sinks, one, one, one),
        )
    singles = _batches_up_to(min(1024, impl.max_rows))
    drafted = set()
    if impl.max_queries > 1:
        drafted = _batches_up_to(min(1024, impl.max_rows // impl.max_queries))
    for rows in sorted(singles | drafted):
        query = torch.zeros(rows, heads, size, dtype=cache_dtype, device=device)
        out = torch.empty(rows, heads, size, dtype=dtype, device=device)
        table = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        lens = torch.ones(rows, dtype=torch.int32, device=device)
        batches: list[tuple[Any, ...]] = [()] if rows in singles else []
        if rows in drafted:
            starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
            batches.append((starts, impl.max_queries))
        for several in batches:
            torch.ops.oss_fused.decode_attention(
                *(query, keys, values, table, lens, out, impl.arrivals),
                *(impl.scale, window, impl.sinks, one, one, one, True),
                *several,
            )
