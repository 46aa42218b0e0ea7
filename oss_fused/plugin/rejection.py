# SPDX-License-Identifier: MIT
"""Greedy requests with drafts: which drafts are right, in two launches.

vLLM's rejection sampler launches seven kernels, six of them for requests with a temperature. A
draft of a greedy request is right if it and all drafts before it are the likeliest tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

import oss_fused.kernels  # noqa: F401  registers torch.ops.oss_fused
from oss_fused.kernels.op import direct
from oss_fused.plugin.model_state import OssSampler

logger = init_logger(f"vllm.{__name__}")

_greedy_tokens = direct("greedy_tokens")
_verify_drafts = direct("verify_drafts")


class OssRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, with fewer launches where every request is greedy."""

    # scratch of greedy_tokens: zeros, one for each row of logits
    arrivals: torch.Tensor | None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """The right drafts of a batch and one token more, from its logits [rows, vocabulary]."""
        if invalid_drafts is not None or not self._only_right_drafts(input_batch):
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        sampler, most = self.sampler, self.num_speculative_steps + 1
        if self.arrivals is None:
            # not while the model loads: sleep at level 2 discards what is allocated then
            rows = sampler.max_num_reqs * most
            self.arrivals = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        sampled, taken, rejected = _verify_drafts(
            _greedy_tokens(logits, self.arrivals),
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            input_batch.seq_lens,
            sampler.req_states.prefill_len.gpu,
            most,
            *self._synthetic(),
        )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=taken,
            num_rejected=rejected,
        )

    def _synthetic(self) -> tuple[torch.Tensor, ...]:
        """Rates of vLLM's synthetic acceptance, and the seeds of its draws; nothing without it."""
        rates = self.synthetic_conditional_rates
        return () if rates is None else (rates, self.sampler.sampling_states.seeds.gpu)

    @torch.inference_mode()
    def warm_up(self, device: torch.device) -> None:
        """Compile ``verify_drafts``, before a request waits for it."""
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        short = ids.to(torch.int32)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        most = self.num_speculative_steps + 1
        prompts = self.sampler.req_states.prefill_len.gpu
        _verify_drafts(
            *(ids, short, ids, ids, starts, ids, short, prompts, most), *self._synthetic()
        )

    def _only_right_drafts(self, batch: InputBatch) -> bool:
        """Whether the likeliest tokens decide, and nothing else is asked for."""
        sampler = self.sampler
        return bool(
            not sampler.compute_nans
            and not sampler.return_sampling_mask
            and sampler.trace_replay_state is None
            and sampler.get_logprobs_dims(batch.idx_mapping_np) is None
            and sampler._is_greedy(batch)
        )


def shorten_verification(runner: Any) -> None:
    """Give ``runner`` an OssRejectionSampler in place of vLLM's, if its sampler is ours.

    ``verify_drafts`` also does vLLM's synthetic acceptance, so that a benchmark with it runs the
    kernels of a server. Other methods keep vLLM's sampler, and so do batches whose rows only the
    device knows.
    """
    found, drafts = runner.rejection_sampler, runner.vllm_config.speculative_config
    if (
        type(found) is RejectionSampler
        and type(runner.sampler) is OssSampler
        and drafts.rejection_sample_method in ("standard", "block", "synthetic")
        and not drafts.enable_adaptive_verification
    ):
        found.__class__ = OssRejectionSampler
        found.arrivals = None
        found.warm_up(runner.device)
        logger.info_once("oss_fused: drafts of greedy requests are verified in two launches")
