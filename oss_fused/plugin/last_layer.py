# SPDX-License-Identifier: MIT
"""Which steps compute nothing but the sampled rows in the last decoder layer.

layers/vllm/sampled_rows.py says why that is enough. Log-probabilities of a prompt, draft models and
what exports hidden states read all rows. A CUDA graph computes what it has recorded: where a step
is graphs in pieces, the piece behind the last attention runs without one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode

from oss_fused.layers.vllm.attention import OssAttentionImpl
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.quant.settings import ServingOptions

# tokens above which that piece runs without its graph: in short steps the host would be the slower
_PIECE_TOKENS = 4096


def mark_last_layer(model: Any, vllm_config: VllmConfig, options: ServingOptions) -> str | None:
    """Let the last decoder layer of ``model`` compute sampled rows; returns its attention's name.

    None where that layer has no native attention, or where something else reads its rows: other
    ranks, a draft model, the monitor, and what returns the experts of each token.
    """
    parallel = vllm_config.parallel_config
    block: Any = model.layers[-1]
    attention = getattr(block, "attn", None) or getattr(block, "self_attn", None)
    layer: Any = getattr(attention, "attn", None)
    if (
        type(getattr(layer, "impl", None)) is not OssAttentionImpl
        or parallel.world_size > 1
        or parallel.data_parallel_size > 1
        or vllm_config.speculative_config is not None
        or options.monitor_every
        or vllm_config.aux_output_config.enable_return_routed_experts
    ):
        return None
    layer.impl.is_last = True
    experts = getattr(getattr(block, "mlp", None), "experts", None)
    method = getattr(getattr(experts, "routed_experts", None), "quant_method", None)
    if type(method) is OssMxfp4MoEMethod:
        method.last_attention = layer.layer_name
    return str(layer.layer_name)


def sampled_rows(runner: Any, batch: Any, mode: CUDAGraphMode) -> torch.Tensor | None:
    """Rows int64 [requests] that a step with prompts samples from; None: all are computed.

    Args:
        runner: vLLM's GPUModelRunner.
        batch: its InputBatch of the step.
        mode: CUDA graphs that the step replays.
    """
    logprobs = runner.prompt_logprobs_worker
    if (
        getattr(runner.model, "last_attention", None) is None
        or mode == CUDAGraphMode.FULL
        or (mode == CUDAGraphMode.PIECEWISE and batch.num_tokens <= _PIECE_TOKENS)
        or not batch.has_prefill
        or batch.num_draft_tokens
        or runner.use_aux_hidden_state_outputs
        or runner.aux_output_connector is not None
        or logprobs is None
        or (logprobs.uses_prompt_logprobs[batch.idx_mapping_np] & batch.is_prefilling_np).any()
        or logprobs.token_id_scores
        # most of the rows may be sampled
        or batch.num_tokens < 2 * batch.num_reqs
    ):
        return None
    rows: torch.Tensor = batch.logits_indices
    return rows
