# SPDX-License-Identifier: MIT
"""Which rows of a step's hidden states are read, for the last decoder layer.

Of each request vLLM samples from the last token of a step. Log-probabilities of a prompt, draft
models and what exports hidden states read all of them, and a graph computes what it has recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode

from oss_fused.layers.vllm.rope_attention import FEW_TOKENS

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def reads_last_rows(runner: GPUModelRunner) -> bool:
    """Whether ``runner``, whose model is loaded, reads nothing but the rows that it samples."""
    if getattr(runner.model, "last_block", None) is None:
        return False
    config: Any = runner.vllm_config
    model = config.model_config
    return (
        config.speculative_config is None
        # a connector waits for the attention operator of every layer
        and config.kv_transfer_config is None
        and not config.parallel_config.use_ubatching
        and model.runner_type != "pooling"
        # attention of these is not causal everywhere
        and model.rswa_window is None
        and not model.is_mm_prefix_lm
        # what exports the hidden states of a step
        and getattr(runner, "aux_output_connector", None) is None
        and not runner.use_aux_hidden_state_outputs
    )


def sampled_rows(runner: Any, batch: Any, mode: CUDAGraphMode) -> torch.Tensor | None:
    """Rows of hidden states that are sampled from in a step with prompts; None: all are computed.

    Args:
        runner: for which reads_last_rows holds.
        batch: vLLM's InputBatch of the step.
        mode: CUDA graphs that the step replays.
    """
    rows: torch.Tensor = batch.logits_indices
    logprobs = runner.prompt_logprobs_worker
    if (
        mode != CUDAGraphMode.NONE
        or not batch.has_prefill
        or batch.num_draft_tokens
        or rows.shape[0] != batch.num_reqs
        # taking rows out and putting them back is worth it for a part of them
        or batch.num_tokens < max(2 * batch.num_reqs, FEW_TOKENS + 1)
        or logprobs is None
        or logprobs.in_progress_prompt_logprobs
        or logprobs.token_id_scores
    ):
        return None
    return rows
