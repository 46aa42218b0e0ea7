# SPDX-License-Identifier: MIT
"""Bursts, the worker's half: decode steps that follow one another on the device.

The first step of a burst is vLLM's own: inputs, block tables, slots and forward pass. For each
later token ``BurstRunner`` makes the next inputs from the sampled ids in one launch, replays the
same CUDA graph (or runs the model, where the step has none) and samples with vLLM's sampler, which
draws by seed and position. So a burst's tokens are those of single steps. Nothing of it waits for
the device, and the ids go to the host once.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, cast

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu_worker import Worker

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.plugin.draft_graphs import draft_in_one_graph
from oss_fused.plugin.drafts import adopt_head_attention, pick_from_own_vocabulary
from oss_fused.plugin.last_layer import sampled_rows
from oss_fused.plugin.options import serving_options
from oss_fused.plugin.rejection import shorten_verification
from oss_fused.plugin.step_graphs import use_whole_graphs
from oss_fused.quant.settings import LONGEST_BURST

Sampled = tuple[SamplerOutput, torch.Tensor, torch.Tensor]


class BurstRunner(GPUModelRunner):
    """vLLM's model runner (V2), whose decode steps may be bursts."""

    def __init__(self, *args: Any) -> None:
        """As GPUModelRunner."""
        super().__init__(*args)
        self.burst = 1
        config = self.vllm_config
        # other settings do not depend on times, and drafts leave no room for bursts
        self.timed = serving_options(config).burst == "auto" and config.speculative_config is None
        self.timer = StepTimer()
        # K -> of a burst's sampled and rejected tokens: K and 1 - K [max_num_reqs]
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def initialize_kv_cache(self, *args: Any, **options: Any) -> None:
        """As GPUModelRunner; compiles what bursts launch, before a request waits for it.

        It also decides which CUDA graphs are recorded (step_graphs.py), before they are.
        """
        adopt_head_attention(self)
        super().initialize_kv_cache(*args, **options)
        if self.cudagraph_manager is not None:
            # vLLM drops the manager with which it has estimated the graphs' memory
            self.model_state.graphs = weakref.ref(self.cudagraph_manager)
        use_whole_graphs(self)
        pick_from_own_vocabulary(self.speculator)
        draft_in_one_graph(self)
        shorten_verification(self)
        self._warm_up()

    def execute_model(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        """As GPUModelRunner; remembers how many tokens each request decodes."""
        self.burst = getattr(scheduler_output, "burst", 1)
        # of a dummy step, which has no inputs to prepare, nothing is known
        self.model_state.decodes, self.model_state.sampled = False, None
        return super().execute_model(scheduler_output, *args, **options)

    def prepare_inputs(
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, num_active_loras: int
    ) -> Any:
        """As GPUModelRunner; remembers the graph, and tells the model state what the step needs.

        Where each request has one token, the rows to sample from are the first ones in order. As a
        slice they index hidden states without a copy.
        """
        self._desc = batch_desc
        self.model_state.decodes = batch_desc.uniform_token_count is not None
        batch = super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, num_active_loras
        )
        self.model_state.sampled = sampled_rows(self, batch, batch_desc.cg_mode)
        if len(batch.logits_indices) == batch.num_tokens == batch.num_reqs:
            batch.logits_indices = slice(batch.num_reqs)
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """As GPUModelRunner; remembers tables and slots, and starts the clock."""
        self._tables, self._slots = super().prepare_attn(input_batch)
        if self.timed:
            self.timer.start()
        return self._tables, self._slots

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> Sampled:
        """As GPUModelRunner; in a burst, all its ids [requests, K] in place of [requests, 1]."""
        burst = self.burst
        result = super().sample(hidden_states, input_batch, grammar_output)
        if burst > 1:
            result = self._continue(result[0].sampled_token_ids, input_batch)
        if not input_batch.has_prefill:
            self.timer.stop(input_batch.num_reqs)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As GPUModelRunner; the output tells how long decode steps took."""
        output = super().sample_tokens(grammar_output)
        to_scheduler = getattr(output, "model_runner_output", None)
        if to_scheduler is not None:
            # survives pickling, as ModelRunnerOutput has no slots
            to_scheduler.decode_times = self.timer.finished()
        return output

    def _continue(self, ids: torch.Tensor, batch: InputBatch) -> Sampled:
        """The later steps of a burst, whose first one sampled ``ids`` [requests, 1]."""
        requests, burst = batch.num_reqs, self.burst
        # not a buffer: the copy to the host runs on another stream, beside the next burst
        tokens = torch.empty(requests, burst, dtype=torch.int64, device=self.device)
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[:requests]
        for step in range(burst - 1):
            torch.ops.oss_fused.advance_decode(
                ids.view(-1), tokens, step, *self._step_buffers(batch.seq_lens)
            )
            lengths += 1
            # the last step alone is timed: the host has got ahead of the device by then, while
            # the first ones wait for their launches, the more so the shorter the burst is
            last = step == burst - 2
            output, _, _ = super().sample(self._forward(batch, last), batch, None)
            ids = output.sampled_token_ids
        tokens[:, -1] = ids.view(-1)
        sampled, rejected = (count[:requests] for count in self._count(burst))
        return SamplerOutput(tokens, None, None, sampled, rejected), sampled, rejected

    def _step_buffers(self, seq_lens: torch.Tensor) -> tuple[Any, ...]:
        """What a step's graph reads, as ``advance_decode`` takes it."""
        buffers, tables = self.input_buffers, self.block_tables
        return (
            buffers.input_ids,
            buffers.positions,
            seq_lens,
            tables.slot_mappings,
            tables.input_block_tables,
            tables.block_sizes,
        )

    def _forward(self, batch: InputBatch, timed: bool) -> torch.Tensor:
        """Hidden states [tokens with padding, H] of the step whose inputs are in the buffers."""
        desc = self._desc
        metadata = self.model_state.prepare_attn(
            batch, desc.cg_mode, self._tables, self._slots, self.attn_groups, self.kv_cache_config
        )
        if timed and self.timed:
            self.timer.start()
        if desc.cg_mode == CUDAGraphMode.FULL:
            return cast(torch.Tensor, self.cudagraph_manager.run_fullgraph(desc))
        tokens = batch.num_tokens_after_padding
        descriptor = BatchDescriptor(
            num_tokens=tokens,
            has_lora=self.lora_config is not None,
            num_active_loras=desc.num_active_loras,
        )
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=desc.cg_mode,
            batch_descriptor=descriptor,
            slot_mapping=build_slot_mappings_by_layer(self._slots, self.kv_cache_config),
            is_padding=batch.is_padding,
        ):
            if desc.cg_mode == CUDAGraphMode.PIECEWISE:
                return cast(torch.Tensor, self.cudagraph_manager.run_pw_graph(self.model, inputs))
            return cast(torch.Tensor, self.model(**inputs))

    def _count(self, burst: int) -> tuple[torch.Tensor, torch.Tensor]:
        # vLLM takes off the rejected tokens of the one that was scheduled: 1 - (1 - K) is K
        if burst not in self._counts:
            sampled = torch.full((self.max_num_reqs,), burst, dtype=torch.int32, device=self.device)
            self._counts[burst] = sampled, 1 - sampled
        return self._counts[burst]

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile ``advance_decode``, the sampler of greedy batches, and vLLM's update of its
        request states for K ids."""
        logits = torch.zeros(1, self.vocab_size, dtype=self.dtype, device=self.device)
        torch.ops.oss_fused.greedy_tokens(
            logits, torch.zeros_like(logits[0, :1], dtype=torch.int32)
        )
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        # Triton compiles once for numbers that 16 divides and once for the others
        for burst in (LONGEST_BURST - 1, LONGEST_BURST):
            torch.ops.oss_fused.advance_decode(
                none,
                none.new_empty(0, burst),
                0,
                *self._step_buffers(self.input_buffers.seq_lens),
            )
            ids = torch.zeros(1, burst, dtype=torch.int64, device=self.device)
            sampled, rejected = (count[:1] for count in self._count(burst))
            # a request of number -1 is left alone
            start = self.input_buffers.query_start_loc[:2]
            self.postprocess_sampled(ids[:, 0] - 1, ids, sampled, rejected, start)
        # made anew with the first burst: a sleeping engine may give memory of this moment back
        self._counts.clear()


class StepTimer:
    """Seconds of decode steps on the device, without waiting for them."""

    def __init__(self) -> None:
        """No step has run."""
        self._started: torch.cuda.Event | None = None
        # start, end and requests of a step
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def start(self) -> None:
        """The forward pass of a step comes next; one that began before is not timed."""
        self._started = torch.cuda.Event(enable_timing=True)
        self._started.record()

    def stop(self, requests: int) -> None:
        """All of a decode step is launched."""
        if self._started is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._under_way.append((self._started, end, requests))
            self._started = None

    def finished(self) -> list[tuple[int, float]]:
        """Requests and seconds of steps that have ended since the last call."""
        times = []
        while self._under_way and self._under_way[0][1].query():
            start, end, requests = self._under_way.popleft()
            times.append((requests, start.elapsed_time(end) * 1e-3))
        return times


class BurstWorker(Worker):
    """vLLM's worker, with a BurstRunner where vLLM takes its model runner V2."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner and not self.vllm_config.is_mm_encoder_only:
            return BurstRunner(self.vllm_config, self.device)
        return super()._make_model_runner()
