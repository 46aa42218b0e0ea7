# SPDX-License-Identifier: MIT
"""What vLLM learns from this package: a quantisation method and classes for some models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oss_fused import envs
from oss_fused.plugin.compat import check_vllm
from oss_fused.plugin.settings import QUANT_METHOD

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

# tokens of the largest step that is replayed as CUDA graphs, as vLLM itself has it for gpt-oss.
# With graphs up to 512 only, Llama's first token comes later at 8 requests at once (docs/decode.md)
GRAPH_TOKENS = 1024

_registered = False


def register_all() -> None:
    """Register with vLLM, once a process; models load on first use.

    Raises:
        BackendUnavailableError: vLLM is missing, or of a release that this package does not know.
    """
    global _registered
    if _registered:
        return
    check_vllm()
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import register_quantization_config

    from oss_fused.plugin.build_info import ServerCollector, register_collectors
    from oss_fused.plugin.config import OssFp8Config
    from oss_fused.plugin.monitor_metrics import Collector, interval, share_folder

    if interval():
        share_folder()
        register_collectors(ServerCollector(), Collector())
    else:
        register_collectors(ServerCollector())
    register_quantization_config(QUANT_METHOD)(OssFp8Config)
    for architecture, name in MODEL_CLASSES.items():
        ModelRegistry.register_model(architecture, f"oss_fused.plugin.models:{name}")
        _add_to_settings(architecture, shorten_steps)
    _registered = True


def shorten_steps(vllm_config: VllmConfig) -> None:
    """Leave the host less to do, where the quantisation is ours and the user chose nothing else.

    That is the scheduler of plugin/scheduler.py, and CUDA graphs for up to GRAPH_TOKENS tokens.
    """
    if (
        vllm_config.model_config.quantization != QUANT_METHOD
        or envs.get("OSS_FUSED_STEP") != "short"
    ):
        return
    scheduler, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = "oss_fused.plugin.scheduler.make_scheduler"
    chosen = graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size
    # with drafts vLLM adds sizes of its own, unless the largest one is given
    if chosen == (None, None) and vllm_config.speculative_config is None:
        graphs.max_cudagraph_capture_size = min(GRAPH_TOKENS, scheduler.max_num_batched_tokens)


def _add_to_settings(architecture: str, change: Callable[[VllmConfig], None]) -> None:
    """Have vLLM call ``change`` after its own settings for models of ``architecture``."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    theirs = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)

    class Changed(theirs):  # type: ignore[misc, valid-type]
        """vLLM's settings of a model, and a change of ours."""

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            theirs.verify_and_update_config(vllm_config)
            change(vllm_config)

    MODELS_CONFIG_MAP[architecture] = Changed
