# SPDX-License-Identifier: MIT
"""No public function keeps memory over 1000 calls, and a leak would be seen."""

from __future__ import annotations

import pytest
import torch

from oss_fused.attention import flash_attention
from oss_fused.bench.memory import leaked_bytes
from oss_fused.bench.problems import (
    AttentionInput,
    ConvolutionInput,
    LayerNormInput,
    SoftmaxInput,
)
from oss_fused.convolution import conv2d_bias_relu
from oss_fused.functional import (
    dequantize_fp8,
    fp8_gemm,
    fused_gated_mlp,
    fused_rmsnorm_rope,
    quantize_fp8,
)
from oss_fused.layers import FP8Linear
from oss_fused.normalization import layer_norm, softmax
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput


def round_trip(x):
    return dequantize_fp8(*quantize_fp8(x))


def forward_and_backward(x, weight, cos, sin):
    x = x.clone().requires_grad_()
    fused_rmsnorm_rope(x, weight, cos, sin).sum().backward()


def attention_and_gradients(q, k, v, causal):
    q = q.clone().requires_grad_()
    flash_attention(q, k, v, causal, fp8="channel").sum().backward()


CALLS = {
    "rmsnorm_rope": (fused_rmsnorm_rope, RMSNormRoPEInput(1, 4, 64, 16).make()),
    "gated_mlp": (fused_gated_mlp, GatedMLPInput(1, 4, 64, 32).make()),
    "fp8_gemm": (fp8_gemm, FP8GEMMInput(4, 32, 64).make()),
    "round trip": (round_trip, {"x": torch.randn(4, 64)}),
    "backward": (forward_and_backward, RMSNormRoPEInput(1, 4, 64, 16).make()),
    "softmax": (softmax, SoftmaxInput(4, 64).make()),
    "layer_norm": (layer_norm, LayerNormInput(4, 64).make()),
    "convolution": (conv2d_bias_relu, ConvolutionInput(1, 4, 4, 5).make()),
    "attention": (attention_and_gradients, AttentionInput(1, 2, 9, 16).make()),
    "FP8Linear": (FP8Linear(64, 32).requires_grad_(False), {"x": torch.randn(4, 64)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_calls_keep_nothing(name, device):
    function, arguments = CALLS[name]
    if isinstance(function, torch.nn.Module):
        function = function.to(device)
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    assert leaked_bytes(lambda: function(**moved), device) == 0


def test_a_leak_is_seen(device):
    kept = []
    assert leaked_bytes(lambda: kept.append(torch.ones(8, device=device)), device, 100) >= 3200
    with pytest.raises(ValueError, match="calls=0"):
        leaked_bytes(lambda: None, calls=0)
