# SPDX-License-Identifier: MIT
"""All passes of an EAGLE-3 head in one CUDA graph, for steps that verify drafts.

For d drafts vLLM replays two graphs, the head's first pass and the other d - 1, and launches ten
kernels around them: it joins and combines the target's hidden states, and copies them,
temperatures and seeds. One graph holds all that depends on no host value. Before the graph, vLLM's
kernel writes the ids and positions of the first pass. Steps with prompts draft as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, prepare_inputs_to_capture
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    prepare_decode_inputs,
    prepare_prefill_inputs,
)

logger = init_logger(f"vllm.{__name__}")


class OssEagleSpeculator(EagleSpeculator):
    """vLLM's EAGLE-3 drafts, with fewer launches in a step that verifies drafts.

    Attributes:
        target_graphs: the target's, whose replays leave its hidden states in place.
        passes: graphs of all passes of the head, by number of requests.
        rejected: [max_num_reqs] int32, tokens of each request that a step rejects.
    """

    target_graphs: Any
    passes: CudaGraphManager
    rejected: torch.Tensor

    def capture(self) -> None:
        """Record vLLM's graphs, then those of all passes."""
        super().capture()
        self.passes.capture(self._prepare_passes, "Capturing CUDA graphs of all drafts")

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        *sampling: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Drafts [requests, d] of a step; arguments as in vLLM."""
        desc = self._graph_of(input_batch, aux_hidden_states, options)
        if desc is None:
            return super().propose(
                *(input_batch, attn_metadata, slot_mappings, last_hidden_states),
                *(aux_hidden_states, num_sampled, num_rejected, last_sampled),
                *(next_prefill_tokens, *sampling),
                **options,
            )
        requests, padded = input_batch.num_reqs, desc.num_reqs
        self.idx_mapping[:requests].copy_(input_batch.idx_mapping)
        self.rejected[:requests].copy_(num_rejected)
        if requests < padded:
            self.idx_mapping[requests:padded].fill_(-1)
            self.rejected[requests:padded].zero_()
        prepare_prefill_inputs(
            self.last_token_indices,
            self.current_draft_step,
            self.input_buffers,
            input_batch,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            self.max_num_reqs,
        )
        self.passes.run_fullgraph(desc)
        return self.draft_tokens[:requests]

    def _graph_of(
        self, batch: InputBatch, seen: list[torch.Tensor] | None, options: dict[str, Any]
    ) -> Any:
        """The graph for a step in which every request verifies d drafts; None where vLLM drafts."""
        drafts, kept = self.num_speculative_steps, self._seen(1)
        if (
            not (seen and kept)
            or not batch.decode_graph_eligible
            or batch.num_tokens != batch.num_reqs * (drafts + 1)
            or batch.num_scheduled_tokens.max() != drafts + 1
            or options.get("dummy_run")
            or options.get("is_profile")
            or options.get("mm_inputs") is not None
            or options.get("num_speculative_tokens") not in (None, drafts)
            # not where a graph left them
            or seen[0].data_ptr() != kept[0].data_ptr()
        ):
            return None
        desc = self.passes.dispatch(batch.num_reqs, batch.num_tokens, drafts + 1, 0)
        return desc if desc.cg_mode == CUDAGraphMode.FULL else None

    def _seen(self, tokens: int) -> list[torch.Tensor]:
        """The target's hidden states [tokens, H] that the head reads."""
        return [states[:tokens] for states in self.target_graphs.aux_hidden_states]

    def _prepare_passes(self, desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        """Attention metadata of both kinds of passes, and what a graph of ``desc`` records."""
        first = prepare_inputs_to_capture(
            *(desc.num_reqs, desc.num_tokens, self.model_state, self.target_input_buffers),
            *(self.block_tables, self.target_attn_groups, self.kv_cache_config),
            full_cudagraph=True,
            max_query_len=desc.uniform_token_count,
        )
        later = prepare_inputs_to_capture(
            *(desc.num_reqs, desc.num_reqs, self.model_state, self.input_buffers),
            *(self.block_tables, self.attn_groups, self.kv_cache_config),
            full_cudagraph=True,
            max_query_len=1,
        )
        return lambda mode: self._run_passes(desc.num_reqs, desc.num_tokens, first, later)

    def _run_passes(self, requests: int, tokens: int, first: Any, later: Any) -> None:
        """All passes; ``first`` and ``later`` are (attention metadata, slots) of vLLM's."""
        seen = torch.cat(self._seen(tokens), dim=-1)
        self.hidden_states[:tokens].copy_(self.model.combine_hidden_states(seen))
        self._prefill(requests, tokens, *first, None)
        # of padding: one token of length 1, whose slot is none
        prepare_decode_inputs(
            self.draft_tokens[:requests, 0],
            self.target_input_buffers.seq_lens,
            self.rejected,
            self.input_buffers,
            self.sample_src_positions,
            self.max_model_len,
            self.max_num_reqs,
        )
        self._generate_fused_drafts(
            requests,
            requests,
            *later,
            None,
            CUDAGraphMode.NONE,
            self.num_speculative_steps,
        )


def draft_in_one_graph(runner: Any) -> None:
    """Have ``runner``, a GPUModelRunner whose caches are set up, record all passes as one graph."""
    speculator = runner.speculator
    if type(speculator) not in (EagleSpeculator, OssEagleSpeculator) or _why_apart(runner):
        return
    speculator.__class__ = OssEagleSpeculator
    speculator.target_graphs = runner.cudagraph_manager
    speculator.rejected = torch.zeros(
        speculator.max_num_reqs, dtype=torch.int32, device=speculator.device
    )
    speculator.passes = CudaGraphManager(
        runner.vllm_config,
        speculator.device,
        CUDAGraphMode.FULL_DECODE_ONLY,
        speculator.num_speculative_steps + 1,
    )
    logger.info_once("oss_fused: a step that verifies drafts makes the next ones in one CUDA graph")


def _why_apart(runner: Any) -> bool:
    """Whether drafts need what only the host knows, or a value that changes from step to step."""
    speculator, config = runner.speculator, runner.vllm_config
    parallel, manager = config.parallel_config, runner.cudagraph_manager
    groups = [*speculator.attn_groups, *speculator.target_attn_groups]
    return bool(
        speculator.method != "eagle3"
        # a head that reads the target's last hidden states alone
        or not runner.use_aux_hidden_state_outputs
        # one draft has no later pass, and some attention is planned by the host before each
        or not speculator.supports_decode_metadata_update
        # sampled drafts read temperatures and seeds
        or speculator.draft_logits is not None
        or speculator.acceptance_estimator is not None
        or speculator.draft_watermarker is not None
        or speculator.supports_mm_inputs
        or config.speculative_config.uses_dynamic_speculative_decoding()
        or config.lora_config is not None
        or manager is None
        or manager.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL
        or parallel.data_parallel_size > 1
        or parallel.pipeline_parallel_size > 1
        or parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1
        or parallel.use_ubatching
        or any(group.kernel_block_size is not None for each in groups for group in each)
    )
