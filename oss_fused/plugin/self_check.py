# SPDX-License-Identifier: MIT
"""The start-up self-check: the loaded model against the log-probabilities in its checkpoint.

Each worker runs the prompts of self_check.json after vLLM's warm-up, through its own model runner,
as vLLM's warm-up of kernels does. The scheduler is made later. Of what requests see, only contents
of KV-cache blocks change, and requests write those before they read them. The last pipeline stage
has the log-probabilities; its error ends the start of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.plugin.options import serving_options
from oss_fused.quant.self_check import FILE, SelfCheck, parse_self_check
from oss_fused.quant.settings import QUANT_METHOD

# vLLM shows what its own loggers say; of others it shows warnings
logger = init_logger(f"vllm.{__name__}")

_installed: set[type] = set()


def check_possible(vllm_config: Any) -> None:
    """Refuse a server that cannot check itself, before it loads anything.

    Raises:
        SchemeError: names the option that stands against it.
        CheckpointError: the checkpoint has no self_check.json, or a malformed one.
    """
    model = vllm_config.model_config
    reason = None
    if model.runner_type == "pooling":
        reason = "a pooling model, which gives no log-probabilities"
    elif vllm_config.kv_transfer_config is not None:
        reason = "--kv-transfer-config, whose connector would store the prompts"
    elif model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        reason = f"--logprobs-mode {model.logprobs_mode}"
    if reason is not None:
        raise SchemeError(
            f"additional_config['oss_fused']: self_check=True with {reason}; expected a generating "
            f"model with log-probabilities and without a KV connector, or self_check=False"
        )
    check = load(vllm_config)
    longest = max(len(prompt.token_ids) for prompt in check.prompts)
    limits = {
        "max_model_len": model.max_model_len - 1,
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
    }
    for name, limit in limits.items():
        if limit < longest:
            raise SchemeError(
                f"{name}: self_check=True runs prompts of {longest} tokens; expected more than "
                f"{longest}"
            )


def load(vllm_config: Any) -> SelfCheck:
    """self_check.json of the served model.

    Raises:
        CheckpointError: it is missing or malformed.
    """
    model = vllm_config.model_config
    raw = get_hf_file_to_dict(FILE, model.model, model.revision)
    if raw is None:
        raise CheckpointError(
            f"{model.model}: has no {FILE}, which self_check=True compares with; expected a "
            f"checkpoint that scripts/calibrate.py made with --dataset or --self-check on"
        )
    return parse_self_check(raw, f"{model.model}/{FILE}")


def install() -> None:
    """Have this process's workers check themselves where their options ask for it."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    kinds: list[Any] = [Worker]
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        kinds.append(CPUWorker)
    for kind in kinds:
        if kind not in _installed:
            _installed.add(kind)
            kind.compile_or_warm_up_model = _wrap(kind.compile_or_warm_up_model)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def warm_up(self: Any) -> Any:
        return _warm_up(original, self)

    return warm_up


def _warm_up(original: Callable[..., Any], self: Any) -> Any:
    """vLLM's warm-up of a worker, then the self-check."""
    config = self.vllm_config
    checked = (
        config.model_config.quantization == QUANT_METHOD and serving_options(config).self_check
    )
    if checked:
        # of a model whose class is vLLM's own nothing has asked before
        check_possible(config)
    result = original(self)
    if checked:
        run(self, load(config))
    return result


def run(worker: Any, check: SelfCheck) -> None:
    """Run the prompts on a worker; on the rank that has log-probabilities, compare them.

    Raises:
        CheckpointError: names prompt, position, expected and found.
    """
    found = [_logprobs(worker, list(prompt.token_ids)) for prompt in check.prompts]
    rows = [row for row in found if row is not None]
    if rows:
        logger.info("oss_fused: self-check passed: %s", check.compare(rows))


def _logprobs(worker: Any, tokens: list[int]) -> list[float] | None:
    """Log-probabilities of a prompt's tokens after the first; None on ranks without logits."""
    request = "oss_fused-self-check"
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=request,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            pooling_params=None,
            block_ids=_blocks(worker, len(tokens)),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=tokens,
        )
    ]
    step.num_scheduled_tokens = {request: len(tokens)}
    step.total_num_scheduled_tokens = len(tokens)
    drafts = worker.vllm_config.speculative_config
    step.num_spec_tokens_to_schedule = 0 if drafts is None else drafts.num_speculative_tokens
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = {request}
    try:
        output = worker.execute_model(step)
        if output is None:
            output = worker.sample_tokens(None)
        # where the copy to the host is asynchronous
        output = output.get_output() if hasattr(output, "get_output") else output
    finally:
        worker.execute_model(end)
    tensors = (getattr(output, "prompt_logprobs_dict", None) or {}).get(request)
    # the prompt's own token stands first in each row
    return None if tensors is None else tensors.logprobs[:, 0].tolist()


def _blocks(worker: Any, tokens: int) -> tuple[list[int], ...]:
    """Blocks for a prompt and one token more, of each KV-cache group; 0 is vLLM's null block."""
    groups, start = [], 1
    slots = tokens + 1 + worker.vllm_config.num_lookahead_tokens
    for group in worker.model_runner.kv_cache_config.kv_cache_groups:
        count = -(-slots // group.kv_cache_spec.block_size)
        groups.append(list(range(start, start + count)))
        start += count
    return tuple(groups)
