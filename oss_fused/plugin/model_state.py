# SPDX-License-Identifier: MIT
"""Host work that a decode step can skip.

A step of gpt-oss-20b at batch 1 takes 1.3 ms on an H200, less than vLLM takes to prepare the next
one. In vLLM's model runner V2 a model can bring its own ``ModelState``. ``OssModelState`` skips
work whose result is not read, or is known before:

- attention metadata of a step that replays a CUDA graph: the decode kernel reads block table,
  lengths and slots, which the runner has written to their buffers before. An EAGLE draft model
  gets it where it asks for it: its own graphs do not;
- the last decoder layer of a prompt's tokens that are not sampled from (last_layer.py);
- reads of the cache in a step in which all sequences begin (layers/vllm/fresh_rows.py);
- positions and counts of a batch in which every request takes one token;
- three of the four launches that find the likeliest tokens of a greedy batch;
- launching the head operator by operator (lm_head.py).

The option short_step=false keeps vLLM's ModelState.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.op import direct
from oss_fused.layers.vllm.attention import MOST_QUERIES, OssAttentionImpl
from oss_fused.layers.vllm.fresh_rows import note_fresh
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.sampled_rows import note_rows

# drafts whose model takes a step's metadata for its first pass alone
EAGLE = ("eagle", "eagle3")

# vLLM shows what its own loggers say; of others it shows warnings
logger = init_logger(f"vllm.{__name__}")

_greedy_tokens = direct("greedy_tokens")


class LazyMetadata(dict[str, Any]):
    """Attention metadata by layer, made when a layer first asks for its own."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        """``make`` gives all of it."""
        super().__init__()
        self._make = make

    def __missing__(self, layer: str) -> Any:
        """The metadata of ``layer``, which asks first."""
        self.update(self._make())
        return self.get(layer)


class OssModelState(DefaultModelState):
    """vLLM's state of a decoder, with fewer host operations per decode step.

    Attributes:
        metadata_is_read: something besides decode attention reads a decode step's metadata.
        draft_may_ask: only an EAGLE draft model may, where it runs without a graph.
        decodes: a graph that is replayed holds decode steps only.
        sampled: the rows that the last decoder layer of the step computes; None: all.
        graphs: gives vLLM's manager of the model's CUDA graphs, None where there is none.
    """

    decodes = True
    sampled: torch.Tensor | None = None
    graphs: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        """As DefaultModelState."""
        super().__init__(vllm_config, *args)
        model, drafts = vllm_config.model_config, vllm_config.speculative_config
        eagle = drafts is not None and drafts.method in EAGLE
        self.metadata_is_read = (
            # a connector or a draft model reads the metadata of every step
            vllm_config.kv_transfer_config is not None
            or (drafts is not None and not drafts.use_ngram() and not eagle)
            # decode steps that OssAttentionImpl leaves to FlashAttention, which plans each step
            or (drafts is not None and drafts.num_speculative_tokens >= MOST_QUERIES)
            or model.rswa_window is not None
            or model.is_mm_prefix_lm
        )
        self.draft_may_ask = eagle
        if drafts is not None and self.metadata_is_read:
            logger.info_once(
                "oss_fused: a step that verifies drafts makes attention metadata, which the draft "
                "model or FlashAttention reads"
            )

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Metadata of each layer; none where a graph of decode steps is replayed."""
        replayed = cudagraph_mode == CUDAGraphMode.FULL and not kwargs.get("for_capture")
        # attention in a graph of a mixed batch reads its metadata
        mode = self.vllm_config.compilation_config.cudagraph_mode
        decodes = self.decodes and mode.mixed_mode() != CUDAGraphMode.FULL
        make = functools.partial(super().prepare_attn, input_batch, cudagraph_mode, *args, **kwargs)
        if not replayed or not decodes or self.metadata_is_read:
            metadata = make()
            # a graph that is recorded will run other steps; vLLM says NONE while it records, and
            # breakable graphs, which call attention between their pieces, have recorded its inputs
            breakable = is_breakable_cudagraph_enabled() and cudagraph_mode != CUDAGraphMode.NONE
            whole = cudagraph_mode == CUDAGraphMode.FULL
            in_graph = whole or breakable or kwargs.get("for_capture")
            if not in_graph and self.sampled is not None:
                note_rows(metadata[self.model.last_attention], self.sampled)
            if not in_graph and not input_batch.num_computed_tokens_np.any():
                for of_layer in metadata.values():
                    note_fresh(of_layer)
            return metadata
        if not self.draft_may_ask:
            return {}
        written = any(_writes_metadata(group) for groups in args[2] for group in groups)
        return make() if written else LazyMetadata(make)

    def custom_sampler(self, sampler: Any) -> None:
        """Shorten vLLM's sampler; one of another class stays as it is."""
        if type(sampler) is Sampler:
            sampler.__class__ = OssSampler
            sampler.counts = None
            sampler.arrivals = None
            sampler.max_num_reqs = self.max_num_reqs

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        """Record the head for small batches, if it is FP8 and on one device."""
        super().capture_inner_cudagraphs(*args, **kwargs)
        model = self.model
        head = getattr(model, "lm_head", None)
        if (
            not isinstance(getattr(head, "quant_method", None), OssFp8LinearMethod)
            or get_tensor_model_parallel_world_size() > 1
            or self.vllm_config.lora_config is not None
        ):
            return
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        like = torch.empty(0, self.model_config.get_hidden_size(), dtype=self.dtype)
        try:
            written = getattr(self.graphs(), "hidden_states", None)
            model.head_graphs.capture(model.run_head, sizes, like.to(self.device), written)
        except RuntimeError as error:
            # slower, not wrong: batches without a graph run the head itself
            logger.warning("oss_fused: the head runs without CUDA graphs: %s", error)


class OssSampler(Sampler):
    """vLLM's sampler, with fewer host operations where each request takes one token."""

    # of sampled and of rejected tokens: ones and zeros [max_num_reqs]
    counts: tuple[torch.Tensor, torch.Tensor] | None
    # scratch of greedy_tokens: zeros [max_num_reqs]
    arrivals: torch.Tensor | None
    max_num_reqs: int

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """The tokens of a batch, from its logits [requests, vocabulary]."""
        if not self._only_tokens(input_batch):
            return super().__call__(logits, input_batch)
        if self.counts is None:
            # not while the model loads: sleep at level 2 discards what is allocated then
            one = torch.ones(self.max_num_reqs, dtype=torch.int32, device=logits.device)
            self.counts = one, torch.zeros_like(one)
            self.arrivals = torch.zeros_like(one)
        requests = input_batch.num_reqs
        if self._is_greedy(input_batch):
            sampled = _greedy_tokens(logits, self.arrivals)
        else:
            sampled, _ = self.sample(
                logits,
                input_batch.expanded_idx_mapping,
                input_batch.idx_mapping,
                input_batch.idx_mapping_np,
                input_batch.positions[:requests],
                input_batch.input_ids[:requests],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
            )
        return SamplerOutput(
            sampled_token_ids=sampled.view(-1, 1),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=self.counts[0][:requests],
            num_rejected=self.counts[1][:requests],
        )

    def _is_greedy(self, batch: InputBatch) -> bool:
        """Whether every request takes its likeliest token, and nothing changes its logits."""
        rows = batch.idx_mapping_np
        return not (
            np.any(self.sampling_states.temperature.np[rows] != 0.0)
            or np.any(self.needs_logits_processing[rows])
        )

    def _only_tokens(self, batch: InputBatch) -> bool:
        return (
            # a prompt that is not at its end yields no token, and takes more than one
            not batch.has_prefill
            and batch.num_tokens == batch.num_reqs
            and not batch.num_draft_tokens
            and not self.compute_nans
            and not self.return_sampling_mask
            and self.trace_replay_state is None
            and self.get_logprobs_dims(batch.idx_mapping_np) is None
        )


def _writes_metadata(group: Any) -> bool:
    """Whether a step's metadata of ``group``, an AttentionGroup, fills memory that graphs read.

    FlashAttention plans steps, but not where layers have different windows; a block table is
    rewritten where the kernel takes smaller blocks than the cache has.
    """
    planned = getattr(group.get_metadata_builder(0), "aot_schedule", True)
    return bool(planned) or group.kernel_block_size is not None


def brings_state(model: torch.nn.Module) -> bool:
    """Whether OssAttentionImpl runs all attention of ``model``, as OssModelState needs."""
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    return bool(layers) and all(type(layer.impl) is OssAttentionImpl for layer in layers)
