# SPDX-License-Identifier: MIT
"""Bursts, the scheduler's half: an engine step is K decode steps of the whole batch.

vLLM's engine schedules, launches and reads every decode step on the host, which takes longer than
the kernels of a small batch. In a burst the device goes on by itself: it samples a token, makes the
next step's inputs of it and replays the step's graph (burst_runner.py).

To vLLM a burst is a step of one token per request with slots for K: ``num_scheduled_tokens`` is 1,
``scheduler_output.burst`` is K, and the worker returns K ids per request. The counters that vLLM
keeps of computed, awaited and unread tokens all advance by K. A token beyond a request's end is
dropped by vLLM's own check of what ends a request.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from importlib.metadata import entry_points
from typing import Any

import vllm.envs as vllm_envs
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from oss_fused.plugin.options import serving_options
from oss_fused.quant.settings import LONGEST_BURST

# seconds of a burst with "auto": two are under way, so a request that arrives waits for 10 ms
SECONDS = 0.005
# tokens of a step that reads short prompts, at most
SHORT_PROMPTS = 4096
WORKER = "oss_fused.plugin.burst_runner.BurstWorker"

# vLLM shows what its own loggers say; of others it shows warnings
logger = init_logger(f"vllm.{__name__}")


class StepTimes:
    """Seconds of a decode step by batch size, as the worker measured them."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seen: dict[int, deque[float]] = {}

    def add(self, requests: int, seconds: float) -> None:
        """A step of ``requests`` took ``seconds``."""
        self._seen.setdefault((requests - 1).bit_length(), deque(maxlen=5)).append(seconds)

    def get(self, requests: int) -> float | None:
        """The usual time of a batch of about this size; None before the first such batch."""
        seen = self._seen.get((requests - 1).bit_length())
        # one slow step, as when another process had the device, changes nothing
        return statistics.median(seen) if seen else None


class BurstScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, whose steps take up to ``longest`` tokens of each request.

    Attributes:
        longest: tokens of a request in one step; 1 is vLLM's scheduler.
        auto: take as many as SECONDS hold.
        times: of decode steps.
        most_short: tokens of a step that reads short prompts, at most.
    """

    longest = 1
    auto = False
    num_lookahead_tokens: int
    num_spec_tokens: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **options: Any) -> None:
        """As AsyncScheduler."""
        super().__init__(*args, **options)
        self.times = StepTimes()
        self._burst = 1
        self._told = False
        # request -> what it needs the host for between two tokens
        self._host_bound: dict[str, str] = {}
        self.most_short = most_short_tokens(self.vllm_config)
        self._groups = self.kv_cache_manager.coordinator.single_type_managers

    def add_request(self, request: Request) -> None:
        """As AsyncScheduler; notes who needs the host between two tokens."""
        super().add_request(request)
        # the last message of a session that waits for it ends the session at once
        if self.longest > 1 and request.request_id in self.requests:
            reason = needs_host(request)
            if reason is not None:
                self._host_bound[request.request_id] = reason

    def _free_request(self, request: Request, **options: Any) -> Any:
        self._host_bound.pop(request.request_id, None)
        return super()._free_request(request, **options)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As AsyncScheduler; the output's ``burst`` is the number of tokens of each request."""
        self._burst = self._choose_burst()
        # with drafts, their slots; bursts are off then
        drafts = self.num_lookahead_tokens
        # allocate_slots makes room for the later tokens as it does for a drafter's
        self.num_lookahead_tokens = drafts + self._burst - 1
        most = self.max_num_scheduled_tokens
        if self.most_short < most and self._reads_short_prompts():
            self.max_num_scheduled_tokens = self.most_short
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.num_lookahead_tokens = drafts
            self.max_num_scheduled_tokens = most

    def _reads_short_prompts(self) -> bool:
        """Whether the next prompts have at most a quarter of ``most_short`` tokens.

        Where many arrive, the first of them decode while the others are read. A longer prompt would
        often be cut, and its first token wait for one step more. Where decoding requests fill more
        than half of these tokens, prompts would hardly be read.
        """
        if not self.waiting or 2 * len(self.running) * (1 + self.num_spec_tokens) > self.most_short:
            return False
        # vLLM reads prompts one after another: the last running request may be read in part
        under_way = [r for r in self.running[-1:] if r.num_computed_tokens < r.num_prompt_tokens]
        following = [*under_way, self.waiting.peek_request()]
        return all(4 * (r.num_tokens - r.num_computed_tokens) <= self.most_short for r in following)

    def _choose_burst(self) -> int:
        """K of the next step; sets aside requests whose last token is under way already."""
        if self.longest == 1 or not self.running:
            return 1
        most, wanted = self._allowed(), 0
        for request in self.running:
            awaited = request.num_output_placeholders
            length = request.num_tokens + awaited
            left = request.num_prompt_tokens + request.max_tokens - length
            room = self.max_model_len - 1 - request.num_computed_tokens
            if left <= 0:
                if awaited > 1:
                    # vLLM's own test counts on one of the awaited tokens only; schedule() first
                    # advances current_step, so this request is skipped in this call alone
                    request.next_decode_eligible_step = self.current_step + 2
                continue
            if request.request_id in self._host_bound:
                self._tell_why(self._host_bound[request.request_id])
                most = 1
            if length - request.num_computed_tokens != 1:
                most = 1  # a prompt is still being read
            elif room > 0:
                # a request that ends within the burst wastes a few tokens; the others gain more
                most, wanted = min(most, room), max(wanted, left)
        most = max(1, min(most, wanted))
        # no request is preempted for another's later tokens
        return most if most == 1 or self._has_blocks(most) else 1

    def _allowed(self) -> int:
        """Tokens of a burst by the setting and the time that a step takes."""
        if not self.auto:
            return self.longest
        requests = len(self.running)
        seconds = self.times.get(requests)
        if seconds is None:
            return 1
        tokens = max(1, min(self.longest, int(SECONDS / seconds)))
        if tokens > 1 and not self._told:
            self._told = True
            logger.info(
                "oss_fused: burst=auto decodes %d tokens of %d requests per engine step (%.2f ms "
                "each); other batches and times give other lengths, see /metrics",
                tokens,
                requests,
                seconds * 1e3,
            )
        return tokens

    def _has_blocks(self, burst: int) -> bool:
        """Whether free blocks suffice for ``burst`` tokens of every running request."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        at_most = sum((burst - 1) // group.block_size + 1 for group in self._groups)
        if len(self.running) * at_most <= free:
            return True
        missing = 0
        for group in self._groups:
            size, held = group.block_size, group.req_to_blocks
            for request in self.running:
                blocks = -(-(request.num_computed_tokens + burst) // size)
                missing += max(0, blocks - len(held.get(request.request_id, ())))
        return missing <= free

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.scheduled_new_reqs:
            # a request that waited was let in after K was chosen: its prompt comes first, and the
            # slots for later tokens stay for later steps
            self._burst = 1
        # read by the worker; survives pickling, as SchedulerOutput has no slots
        to_worker: Any = scheduler_output
        to_worker.burst = self._burst
        if self._burst > 1:
            for name in scheduler_output.num_scheduled_tokens:
                _advance(self.requests[name], self._burst - 1)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As AsyncScheduler, for a burst's tokens."""
        for requests, seconds in getattr(model_runner_output, "decode_times", ()):
            self.times.add(requests, seconds)
        more = getattr(scheduler_output, "burst", 1) - 1
        for name in scheduler_output.num_scheduled_tokens if more else ():
            request = self.requests.get(name)
            if request is not None:
                _settle(request, more)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _tell_why(self, reason: str) -> None:
        logger.info_once("oss_fused: single decode steps while a request has %s", reason)


def most_short_tokens(config: VllmConfig) -> int:
    """Tokens of a step that reads short prompts, at most; sys.maxsize without a limit.

    Each smaller step reads all weights for fewer tokens, and without graphs the host takes longer.
    A prompt or an input of an encoder that vLLM may not cut could not follow a short one that is
    blocked.
    """
    graphs, scheduler = config.compilation_config, config.scheduler_config
    sizes, mode = graphs.cudagraph_capture_sizes or [0], graphs.cudagraph_mode
    recorded = mode is not None and mode.mixed_mode() != CUDAGraphMode.NONE
    cut = scheduler.enable_chunked_prefill and not scheduler.disable_chunked_mm_input
    return SHORT_PROMPTS if recorded and cut and max(sizes) >= SHORT_PROMPTS else sys.maxsize


def _advance(request: Request, more: int) -> None:
    """Count a burst's later tokens as scheduled."""
    request.num_computed_tokens += more
    request.num_output_placeholders += more
    request.num_in_flight_tokens += more


def _settle(request: Request, more: int) -> None:
    """A burst came back; vLLM takes off its first token itself, and the placeholders."""
    request.num_in_flight_tokens -= more
    if request.num_stale_output_tokens > 0:
        request.num_stale_output_tokens -= more


# parameters that are worked out on the host, or by kernels that read what the host counts, with the
# value that asks for nothing. The sampler knows min_tokens, biases and allowed ids by position
_NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "num_logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
}
_EMPTY = ("bad_words", "watermarking", "extra_args")


def needs_host(request: Request) -> str | None:
    """What ``request`` needs the host for between two tokens; None if nothing."""
    params = request.sampling_params
    if params is None:
        return "a pooling task"
    if request.use_structured_output:
        return "structured output"
    if request.resumable:
        return "streamed input"
    if request.has_encoder_inputs:
        return "encoder inputs"
    for name, value in _NEUTRAL.items():
        if getattr(params, name) != value:
            return name
    return next((name for name in _EMPTY if getattr(params, name)), None)


def why_single(config: VllmConfig, scheduler: BurstScheduler) -> str | None:
    """The feature of this configuration that needs single steps (K = 1); None if none does."""
    model, parallel = config.model_config, config.parallel_config
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    connectors = scheduler.connector, scheduler.ec_connector, scheduler.aux_output_connector
    reasons = {
        "vLLM's V1 model runner": not scheduler.use_v2_model_runner,
        "another worker class": parallel.worker_cls != WORKER,
        "drafts": config.speculative_config is not None,
        "a model without one new token per step": scheduler.num_sampled_tokens_per_step != 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
        "expert load balancing": parallel.enable_eplb,
        "a connector": any(connector is not None for connector in connectors),
        "an encoder": scheduler.is_encoder_decoder or model.is_multimodal_model,
        "prompt embeddings": model.enable_prompt_embeds,
        "custom logits processors": model.logits_processors
        or entry_points(group="vllm.logits_processors"),
        "sampling masks": scheduler.return_sampling_mask,
        "trace replay": model.enable_trace_replay,
        "VLLM_COMPUTE_NANS_IN_LOGITS": vllm_envs.VLLM_COMPUTE_NANS_IN_LOGITS,
        "the monitor, which samples steps": serving_options(config).monitor_every,
        "a cache of other than attention layers": not all(
            type(group) in (FullAttentionManager, SlidingWindowManager) for group in groups
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def say_single(reason: str) -> None:
    """Tell the user why bursts that were asked for stay off."""
    logger.info(
        "oss_fused: each engine step is one decode step, because of %s. "
        "Bursts of several need a server without it.",
        reason,
    )


def start_bursts(scheduler: BurstScheduler, config: VllmConfig) -> None:
    """Let ``scheduler`` use bursts as configured, where nothing forbids it; logs the choice."""
    setting = serving_options(config).burst
    reason = why_single(config, scheduler)
    if reason is not None:
        say_single(reason)
        return
    scheduler.auto = setting == "auto"
    scheduler.longest = LONGEST_BURST if isinstance(setting, str) else setting
    logger.info(
        "oss_fused: burst=%s: up to %d decode steps per engine step", setting, scheduler.longest
    )
