# SPDX-License-Identifier: MIT
"""Cases of decode attention: the native kernel and FlashAttention 3 on the same cache."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.bench.timing import copies_for, time_graph
from oss_fused.kernels.attention.launches import (
    Launch,
    Stream,
    launch_for,
    stream_for,
    streams,
    tokens_per_program,
)
from oss_fused.kernels.integers import cdiv

FP8 = torch.float8_e4m3fn
PAGE = 16
# vLLM's maximum number of splits in a CUDA graph
_FA3_SPLITS = 32
# of a case's graph
REPLAYS = 10
# positions of the largest case: more would not fit one pool
MAX_POSITIONS = 128 * 8192


@dataclass(frozen=True)
class Shape:
    """A layer: query and KV heads, their size, window (0: none), with sinks, FP8 cache."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    sinks: bool = False
    fp8: bool = False

    @property
    def position_bytes(self) -> int:
        """Bytes of one position's keys and values."""
        return 2 * self.kv_heads * self.head_dim * (1 if self.fp8 else 2)


SHAPES = (
    Shape("gpt-oss full", 64, 8, 64, sinks=True),
    Shape("gpt-oss sliding", 64, 8, 64, window=128, sinks=True),
    Shape("gpt-oss full, FP8", 64, 8, 64, sinks=True, fp8=True),
    Shape("Llama 8B", 32, 8, 128),
    Shape("Llama 8B, FP8", 32, 8, 128, fp8=True),
)


class Case:
    """Inputs of one shape, batch and context: several layers' caches, so that none stays in L2."""

    def __init__(
        self, shape: Shape, batch: int, context: int, pool: torch.Tensor, queries: int = 1
    ) -> None:
        """``pool``: random bytes that all caches are views of; see ``make_pool``.

        ``queries`` of each sequence are the last of its ``context`` positions.
        """
        self.shape, self.batch, self.context, self.queries = shape, batch, context, queries
        device, dim = pool.device, shape.head_dim
        pages = -(-context // PAGE)
        page_bytes = PAGE * shape.position_bytes
        layer_bytes = batch * pages * page_bytes
        seen = min(context, shape.window + queries - 1 if shape.window else context)
        seen *= batch * shape.position_bytes
        self.ideal_bytes = seen
        self.layers = max(1, min(copies_for(seen), pool.numel() // layer_bytes))
        cache_dtype = FP8 if shape.fp8 else torch.bfloat16
        self.caches = []
        for layer in range(self.layers):
            raw = pool[layer * layer_bytes : (layer + 1) * layer_bytes].view(cache_dtype)
            cache = raw.view(batch * pages, shape.kv_heads, PAGE, 2 * dim)
            self.caches.append(cache.transpose(1, 2).split(dim, dim=-1))
        self.table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        rows = batch * queries
        query = torch.randn(rows, shape.heads, dim, device=device)
        self.query = query.to(FP8 if shape.fp8 else torch.bfloat16)
        self.out = torch.empty(rows, shape.heads, dim, dtype=torch.bfloat16, device=device)
        self.sinks = torch.randn(shape.heads, device=device).bfloat16() if shape.sinks else None
        self.one = torch.ones(1, device=device)
        self.arrivals = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, rows + 1, queries, dtype=torch.int32, device=device)

    def native(self) -> list[Callable[[], Any]]:
        """This package's kernel, one call per layer."""
        scales = [self.one if self.shape.fp8 else None] * 3
        several = (self.starts, self.queries) if self.queries > 1 else ()

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            torch.ops.oss_fused.decode_attention(
                *(self.query, keys, values, self.table, self.lens, self.out, self.arrivals),
                *(self.shape.head_dim**-0.5, self.shape.window, self.sinks, *scales, True),
                *several,
            )

        return [functools.partial(call, *cache) for cache in self.caches]

    def flash(self) -> list[Callable[[], Any]]:
        """FlashAttention 3 as vLLM calls it under CUDA graphs, its schedule made beforehand.

        Raises:
            ImportError: vLLM for CUDA is not installed.
        """
        module = importlib.import_module("vllm.vllm_flash_attn")
        shape = self.shape
        window = [shape.window - 1, 0] if shape.window else [-1, -1]
        schedule = module.get_scheduler_metadata(
            batch_size=self.batch,
            max_seqlen_q=self.queries,
            max_seqlen_k=self.context,
            num_heads_q=shape.heads,
            num_heads_kv=shape.kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=self.lens,
            qkv_dtype=self.query.dtype,
            cu_seqlens_q=self.starts,
            page_size=PAGE,
            causal=True,
            window_size=tuple(window),
            num_splits=_FA3_SPLITS,
        )
        one = self.one.expand(self.batch, shape.kv_heads) if shape.fp8 else None

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            module.flash_attn_varlen_func(
                q=self.query,
                k=keys,
                v=values,
                out=self.out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=self.queries,
                seqused_k=self.lens,
                max_seqlen_k=self.context,
                softmax_scale=shape.head_dim**-0.5,
                causal=True,
                window_size=window,
                block_table=self.table,
                scheduler_metadata=schedule,
                fa_version=3,
                q_descale=one,
                k_descale=one,
                v_descale=one,
                num_splits=_FA3_SPLITS,
                s_aux=self.sinks,
            )

        return [functools.partial(call, *cache) for cache in self.caches]

    def launch(self) -> Launch | Stream:
        """Launch that the rule chooses for this case."""
        shape = self.shape
        heads, group = shape.kv_heads, shape.heads // shape.kv_heads
        streamed = streams(self.batch, heads, group, shape.head_dim, shape.window, PAGE)
        if streamed and self.queries == 1 and not shape.fp8:
            return stream_for(shape.head_dim, self.batch * heads)
        positions = self.table.shape[1] * PAGE
        tokens = tokens_per_program(self.queries, shape.heads // shape.kv_heads, shape.head_dim)
        return launch_for(
            self.batch * cdiv(self.queries, tokens),
            shape.kv_heads,
            shape.head_dim,
            shape.fp8,
            shape.window,
            positions,
        )


def make_pool(device: torch.device, nbytes: int) -> torch.Tensor:
    """Bytes that are moderate numbers both as bf16 and as e4m3: each pair is one bf16 value."""
    codes = torch.randint(0x38, 0x3F, (nbytes,), dtype=torch.uint8, device=device)
    signs = torch.randint(0, 2, (nbytes,), dtype=torch.uint8, device=device)
    return codes | (signs << 7)


def candidates(case: Case) -> Iterator[Launch]:
    """Launches worth trying for a case."""
    shape = case.shape
    seen = min(case.context, shape.window or case.context)
    for block_n, warps in ((64, 2), (64, 4), (128, 4), (128, 8)):
        splits = 1
        while splits <= 64 and splits <= -(-seen // block_n):
            # more programs than any GPU holds at once, or too few to fill one
            if case.batch * shape.kv_heads * splits <= 4096 or splits == 1:
                yield Launch(splits, block_n, warps, 1)
            splits *= 2


def time_case(calls: list[Callable[[], Any]]) -> float:
    """Median microseconds of one call."""
    calls[0]()
    return time_graph(calls, REPLAYS).median
