# SPDX-License-Identifier: MIT
"""Operations: one folder a subject. Importing this package declares them all."""

from oss_fused.kernels import (
    all_reduce,
    attention,
    convolution,
    decode_inputs,
    flash_attention,
    gemm,
    greedy,
    layer_norm,
    mlp,
    moe,
    norm,
    qkv,
    quantize,
    rope,
    softmax,
    weight_only,
)

__all__ = [
    "all_reduce",
    "attention",
    "convolution",
    "decode_inputs",
    "flash_attention",
    "gemm",
    "greedy",
    "layer_norm",
    "mlp",
    "moe",
    "norm",
    "qkv",
    "quantize",
    "rope",
    "softmax",
    "weight_only",
]
