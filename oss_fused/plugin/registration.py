# SPDX-License-Identifier: MIT
"""What vLLM learns from this package: a quantisation method and classes for some models."""

from __future__ import annotations

from oss_fused.plugin.compat import check_vllm
from oss_fused.plugin.settings import QUANT_METHOD

# architecture -> class of plugin/models.py; each behaves as vLLM's own for other quantisations
MODEL_CLASSES = {
    "GptOssForCausalLM": "OssGptOssForCausalLM",
    "LlamaForCausalLM": "OssLlamaForCausalLM",
    "MistralForCausalLM": "OssMistralForCausalLM",
    "Qwen2ForCausalLM": "OssQwen2ForCausalLM",
    "Qwen3ForCausalLM": "OssQwen3ForCausalLM",
}

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

    from oss_fused.plugin.build_info import register_build_info
    from oss_fused.plugin.config import OssFp8Config
    from oss_fused.plugin.monitor_metrics import interval, register_collector, share_folder

    register_build_info()
    if interval():
        share_folder()
        register_collector()
    register_quantization_config(QUANT_METHOD)(OssFp8Config)
    for architecture, name in MODEL_CLASSES.items():
        ModelRegistry.register_model(architecture, f"oss_fused.plugin.models:{name}")
    _registered = True
