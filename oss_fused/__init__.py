# SPDX-License-Identifier: MIT
"""oss_fused: fused Triton kernels and FP8 weights that serve gpt-oss-style models with vLLM.

Public names load on first use: importing the package imports neither vLLM nor Triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS: dict[str, str] = {
    "OssFusedError": "oss_fused.errors",
    "TritonKernelError": "oss_fused.errors",
    "ShapeMismatchError": "oss_fused.errors",
    "UnsupportedDtypeError": "oss_fused.errors",
    "NumericalOverflowError": "oss_fused.errors",
    "quantize_fp8": "oss_fused.functional",
    "dequantize_fp8": "oss_fused.functional",
    "fp8_gemm": "oss_fused.functional",
    "fused_rmsnorm_rope": "oss_fused.functional",
    "fused_gated_mlp": "oss_fused.functional",
    "flash_attention": "oss_fused.attention",
    "FlashAttentionFunction": "oss_fused.attention",
    "AttentionFP8": "oss_fused.quant.attention_fp8",
    "save_per_channel_state": "oss_fused.quant.attention_fp8",
    "load_per_channel_state": "oss_fused.quant.attention_fp8",
    "conv2d": "oss_fused.convolution",
    "conv2d_bias_relu": "oss_fused.convolution",
    "conv2d_direct": "oss_fused.convolution",
    "conv2d_im2col": "oss_fused.convolution",
    "im2col": "oss_fused.convolution",
    "softmax": "oss_fused.normalization",
    "layer_norm": "oss_fused.normalization",
    "layer_norm_stats": "oss_fused.normalization",
    "layer_norm_dropout": "oss_fused.normalization",
    "FP8Format": "oss_fused.quant.formats",
    "BenchmarkSuite": "oss_fused.bench.suite",
    "FusedRMSNormRoPE": "oss_fused.layers.hf.modules",
    "FusedGatedMLP": "oss_fused.layers.hf.modules",
    "FP8Linear": "oss_fused.layers.hf.modules",
    "PatchPolicy": "oss_fused.layers.hf.patch",
    "patch_model": "oss_fused.layers.hf.patch",
    "TensorSpec": "oss_fused.specs",
    "RMSNormRoPEInput": "oss_fused.specs",
    "GatedMLPInput": "oss_fused.specs",
    "FP8GEMMInput": "oss_fused.specs",
    "validate_rmsnorm_rope_inputs": "oss_fused.specs",
    "validate_gated_mlp_inputs": "oss_fused.specs",
    "validate_fp8_gemm_inputs": "oss_fused.specs",
    "RMSNORM_ROPE_CONFIGS": "oss_fused.tuning.space",
    "GATED_MLP_CONFIGS": "oss_fused.tuning.space",
    "FP8_GEMM_CONFIGS": "oss_fused.tuning.space",
    "TritonAutoTuner": "oss_fused.tuning.tuner",
    "get_cached_config": "oss_fused.tuning.lookup",
    "TuningResult": "oss_fused.tuning.result",
    "KernelMetrics": "oss_fused.tuning.objective",
}

__all__ = ["__version__", "register", *_EXPORTS]


def register() -> None:
    """Entry point of ``vllm.general_plugins``: quantisation method, model classes. Idempotent."""
    from oss_fused.plugin.registration import register_all

    register_all()


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'oss_fused' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
