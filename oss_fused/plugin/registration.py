# SPDX-License-Identifier: MIT
"""What vLLM learns from this package: a quantisation method and classes for some models."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oss_fused.errors import BackendUnavailableError, OssFusedError
from oss_fused.plugin.compat import check_load_format, check_vllm
from oss_fused.plugin.options import is_draft, serving_options
from oss_fused.quant.settings import QUANT_METHOD

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# architecture -> class of plugin/models.py; each behaves as vLLM's own for other quantisations
MODEL_CLASSES = {
    "GptOssForCausalLM": "OssGptOssForCausalLM",
    "LlamaForCausalLM": "OssLlamaForCausalLM",
    "MistralForCausalLM": "OssMistralForCausalLM",
    "Qwen2ForCausalLM": "OssQwen2ForCausalLM",
    "Qwen3ForCausalLM": "OssQwen3ForCausalLM",
}

SCHEDULER = "oss_fused.plugin.scheduler.make_scheduler"

# Python's own, which needs nothing of vLLM
logger = logging.getLogger(__name__)

# variable of vLLM's API server, and what this package wrote there
_AT_ONCE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
_written: str | None = None

_registered = False
_monitored = False


def register_all() -> None:
    """Register with vLLM, once a process; models load on first use.

    Nothing is raised: servers of other models load this plugin too. Where vLLM lacks a hook, none
    of its classes changes, one line is logged, and a model that asks for oss_fp8 gets the error.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        check_vllm()
        _register()
    except Exception as error:
        reason = str(error) if isinstance(error, OssFusedError) else f"vLLM changed: {error!r}"
        logger.warning("oss_fused is not active: %s", reason)
        _register_refusal(reason)


def _register() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from oss_fused.plugin.config import OssFp8Config
    from oss_fused.plugin.model_entry import register_model

    # imports that can fail stand above: registration is complete or does not happen
    register_quantization_config(QUANT_METHOD)(OssFp8Config)
    for architecture, name in MODEL_CLASSES.items():
        register_model(architecture, "oss_fused.plugin.models", name)
        _add_to_settings(MODELS_CONFIG_MAP, architecture, prepare_server)
    _or_warn(_register_metrics)


def _or_warn(start_metrics: Callable[[], None]) -> None:
    try:
        start_metrics()
    except Exception as error:
        # a folder that cannot be created or a name that is taken must not stop the server
        logger.warning("oss_fused shows no metrics: %r", error)


def _register_metrics() -> None:
    from oss_fused.plugin.build_info import ServerCollector, register_collectors

    register_collectors(ServerCollector())


def _register_monitor() -> None:
    """Show the monitor's figures, once a process; its workers are started after this."""
    from oss_fused.plugin.build_info import register_collectors
    from oss_fused.plugin.monitor.metrics import Collector, share_folder

    global _monitored
    if not _monitored:
        _monitored = True
        share_folder()
        register_collectors(Collector())


def _register_refusal(reason: str) -> None:
    """Register a quantisation method that raises ``reason`` where a model asks for it."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

        class Refused(QuantizationConfig):
            """Stands for oss_fp8 where it cannot run."""

            def __new__(cls, *arguments: Any, **options: Any) -> Any:
                raise BackendUnavailableError(f"quantization {QUANT_METHOD}: {reason}")

            @classmethod
            def from_config(cls, config: dict[str, Any]) -> Any:
                return cls()

            @staticmethod
            def get_config_filenames() -> list[str]:
                return []

            @classmethod
            def override_quantization_method(
                cls, hf_quant_cfg: Any, user_quant: str | None, *more: Any, **options: Any
            ) -> None:
                if user_quant == QUANT_METHOD:
                    cls()

        register_quantization_config(QUANT_METHOD)(Refused)
    except Exception as error:
        logger.warning("oss_fused: vLLM has no place for a quantisation method: %r", error)


def prepare_server(vllm_config: VllmConfig) -> None:
    """Apply the options of an oss_fp8 model that hold for the server; vLLM calls it at start.

    Raises:
        SchemeError: names an unknown option, an option with a bad value, or a load format.
    """
    if vllm_config.model_config.quantization != QUANT_METHOD or is_draft(vllm_config):
        return
    from oss_fused.plugin.build_info import show_options

    # before the checkpoint's files are checked, which have other names then
    check_load_format(vllm_config)
    options = serving_options(vllm_config)
    show_options(options)
    if options.self_check:
        from oss_fused.plugin.self_check import check_possible

        check_possible(vllm_config)
    if options.monitor_every:
        _or_warn(_register_monitor)
    if options.short_step:
        shorten_steps(vllm_config)
        choose_worker(vllm_config, options.burst)


def shorten_steps(vllm_config: VllmConfig) -> None:
    """Reduce the host work per step, unless the user chose otherwise.

    Selects the scheduler of plugin/scheduler.py, and the CUDA graphs of plugin/step_graphs.py.
    """
    from vllm import envs as vllm_envs

    from oss_fused.plugin.step_graphs import graph_sizes

    scheduler, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
    # vLLM's API server takes a step's outputs 128 at a time, and in between sends what it has. With
    # more requests it so sends each token by itself, which takes longer than a step, and steps pile
    # up. With all outputs of a step at once, tokens of steps that have piled up leave together
    global _written
    set_by_user = os.environ.get(_AT_ONCE) not in (None, _written)
    if not set_by_user and scheduler.max_num_seqs > vllm_envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE:
        os.environ[_AT_ONCE] = _written = str(scheduler.max_num_seqs)
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULER
    chosen = graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size
    drafts = vllm_config.speculative_config
    # the number of drafts may depend on the batch: vLLM has a set of sizes for each
    changing = drafts is not None and drafts.uses_dynamic_speculative_decoding()
    if chosen == (None, None) and not changing:
        graphs.cudagraph_capture_sizes = graph_sizes(
            min(scheduler.max_num_batched_tokens, _most_graph_tokens(vllm_config)),
            scheduler.max_num_seqs,
            1 if drafts is None else 1 + drafts.num_speculative_tokens,
        )


def _most_graph_tokens(config: VllmConfig) -> int:
    """Tokens of the largest step that replays graphs.

    Fewer with another scheduler or worker and with vLLM's older model runner: nothing keeps
    FlashAttention there from taking memory for 32 splits of every step that has a graph. Graphs
    that hold attention need that memory. LoRA has a set of graphs for each number of adapters. Data
    parallel ranks all compute as many tokens as the largest of their graphs has. Larger steps with
    drafts were not measured.
    """
    from vllm import envs
    from vllm.config.compilation import CUDAGraphMode

    from oss_fused.plugin.burst import WORKER
    from oss_fused.plugin.step_graphs import CAUTIOUS_TOKENS, GRAPH_TOKENS

    parallel, mode = config.parallel_config, config.compilation_config.cudagraph_mode
    cautious = (
        config.scheduler_config.scheduler_cls != SCHEDULER
        or parallel.worker_cls not in ("auto", WORKER)
        or envs.VLLM_USE_V2_MODEL_RUNNER is False
        or (mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL)
        or config.lora_config is not None
        or parallel.data_parallel_size > 1
        or config.speculative_config is not None
    )
    return CAUTIOUS_TOKENS if cautious else GRAPH_TOKENS


def choose_worker(vllm_config: VllmConfig, burst: int | str) -> None:
    """Select the worker of plugin/burst_runner.py, unless the user chose another one."""
    from vllm.platforms import current_platform

    from oss_fused.plugin.burst import WORKER, say_single
    from oss_fused.plugin.burst_metrics import count_bursts

    parallel = vllm_config.parallel_config
    if vllm_config.scheduler_config.scheduler_cls != SCHEDULER:
        if burst != 1:
            say_single("--scheduler-cls")
    elif (
        parallel.worker_cls == "auto"
        and current_platform.is_cuda()
        and vllm_config.model_config.runner_type != "pooling"
    ):
        parallel.worker_cls = WORKER
        if burst != 1:
            count_bursts()


def _add_to_settings(
    settings: dict[str, Any], architecture: str, change: Callable[[VllmConfig], None]
) -> None:
    """Have vLLM call ``change`` before its own settings for models of ``architecture``.

    Its own do not overwrite what is set: those of gpt-oss end CUDA graphs at 1024 tokens.
    """
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    theirs = settings.get(architecture, VerifyAndUpdateConfig)

    class Changed(theirs):  # type: ignore[misc, valid-type]
        """``change``, then vLLM's settings of a model."""

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            change(vllm_config)
            theirs.verify_and_update_config(vllm_config)

    settings[architecture] = Changed
