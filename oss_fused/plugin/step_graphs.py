# SPDX-License-Identifier: MIT
"""CUDA graphs of steps that read prompts.

vLLM records decode steps as one graph, and steps with prompts in pieces: attention is launched from
Python between the graphs of two layers' other operators. In steps of up to about 1000 tokens the
host then takes longer than the device. Steps above the largest recorded size launch all operators
from Python: on a slow host that takes longer than the device even at 8192 tokens. So:

- steps of up to WHOLE_TOKENS are recorded as one graph, attention included (``record_whole``);
- steps of up to GRAPH_TOKENS are recorded in pieces (``graph_sizes``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger

from oss_fused.kernels.integers import next_power_of_2

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

# tokens of the largest step that replays graphs
GRAPH_TOKENS = 8192
# and where larger graphs cost more than they save (registration.py)
CAUTIOUS_TOKENS = 4096
# tokens of the largest step that is one graph: with more, the device takes longer than the host
WHOLE_TOKENS = 1024
# tokens of the smallest one: more than decode attention takes of a sequence, so that a recorded
# batch runs a kernel that takes any mix of prompts and decoding sequences
LEAST_TOKENS = 16

# methods of speculative decoding
DRAFTS = ("ngram", "ngram_gpu", "eagle", "eagle3")

logger = init_logger(f"vllm.{__name__}")


def graph_sizes(most_tokens: int, most_requests: int, queries: int = 1) -> list[int]:
    """Tokens of the steps to record, ascending, for steps of up to ``most_tokens``.

    Decode steps: vLLM's own numbers of requests up to ``most_requests``, with one token for each (a
    draft model's steps with drafts), and with ``queries`` (steps that verify drafts). Steps with
    prompts: multiples of 16, and above 256 of a sixteenth of the next power of two, at most 256, so
    that padding adds at most an eighth, and a sixteenth above 4096 tokens.
    """
    decode = {1, 2, 4, *range(8, 257, 8), *range(272, WHOLE_TOKENS + 1, 16), most_requests}
    largest = min(GRAPH_TOKENS, most_tokens)
    requests = {number for number in decode if number <= most_requests}
    sizes = requests | {number * queries for number in requests}
    sizes.update(
        size for size in range(LEAST_TOKENS, largest + 1, 16) if size % _spacing(size) == 0
    )
    return sorted({size for size in sizes if size <= largest} | {largest})


def _spacing(size: int) -> int:
    return min(max(16, next_power_of_2(size) // 16), 256)


def use_whole_graphs(runner: GPUModelRunner) -> None:
    """Have ``runner``, whose caches are set up, record steps with prompts as one graph.

    Where they stay in pieces, attention of steps above the largest decode graph may take the number
    of splits that it chooses.
    """
    reason, manager = why_pieces(runner), runner.cudagraph_manager
    if reason is None:
        record_whole(manager)
    else:
        logger.info_once("oss_fused: steps with prompts are recorded in pieces: %s", reason)
    if manager is None:
        return
    # attention is in a graph where all of a step is: steps that verify drafts may be the largest
    sizes = [each.num_tokens for each in manager._capture_descs.get(CUDAGraphMode.FULL, ())]
    for groups in runner.attn_groups:
        for group in groups:
            for builder in group.metadata_builders:
                if hasattr(builder, "max_cudagraph_size"):
                    # up to this size FlashAttention gets memory for 32 splits: 4 GiB at
                    # GRAPH_TOKENS
                    builder.max_cudagraph_size = max(sizes, default=0)


def why_pieces(runner: GPUModelRunner) -> str | None:
    """What a step with prompts needs from the host between two layers; None if nothing."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support

    from oss_fused.plugin.model_state import OssModelState

    config: Any = runner.vllm_config
    parallel, manager = config.parallel_config, runner.cudagraph_manager
    drafts = config.speculative_config
    reasons = {
        "the model state is vLLM's": type(runner.model_state) is not OssModelState,
        "cudagraph_mode is not FULL_AND_PIECEWISE": (
            manager is None or manager.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE
        ),
        "LoRA": config.lora_config is not None,
        # they take a step's tables, lengths and hidden states with padding
        "drafts other than n-grams and EAGLE": (
            drafts is not None
            and (drafts.method not in DRAFTS or drafts.enable_adaptive_verification)
        ),
        "a KV connector": config.kv_transfer_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": (
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1
        ),
        "microbatches": parallel.use_ubatching,
        "the attention backend": (
            get_attn_cg_support(runner.attn_groups, config).min_cg_support
            != AttentionCGSupport.ALWAYS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def record_whole(manager: Any) -> None:
    """Change what ``manager``, a CudaGraphManager, records and dispatches to.

    A decode step still takes the graph of decode steps: it is asked first.
    """
    descs, pieces = manager._capture_descs, CUDAGraphMode.PIECEWISE
    small = [each for each in descs.get(pieces, ()) if each.num_tokens <= WHOLE_TOKENS]
    whole: list[Any] = []
    for each in sorted(small, key=lambda each: each.num_tokens, reverse=True):
        # of sizes for decode steps some are too close to be worth a second graph
        close = whole and whole[-1].num_tokens - each.num_tokens < _spacing(whole[-1].num_tokens)
        if each.num_tokens >= LEAST_TOKENS and not close:
            requests = min(each.num_tokens, manager.max_num_reqs)
            whole.append(replace(each, cg_mode=CUDAGraphMode.FULL, num_reqs=requests))
    if not whole:
        return
    descs[pieces] = [each for each in descs[pieces] if each not in small]
    full = [*descs.get(CUDAGraphMode.FULL, ()), *whole]
    # the largest first: the others then take their memory from it
    descs[CUDAGraphMode.FULL] = sorted(full, key=lambda each: each.num_tokens, reverse=True)
    for tokens in range(whole[0].num_tokens + 1):
        candidates = manager._candidates.setdefault((tokens, 0), [])
        smallest = next(each for each in reversed(whole) if each.num_tokens >= tokens)
        decode = [each for each in candidates if each.cg_mode == CUDAGraphMode.FULL]
        candidates[:] = [*decode, smallest]
