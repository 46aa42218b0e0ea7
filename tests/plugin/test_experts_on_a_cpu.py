# SPDX-License-Identifier: MIT
"""Served on a CPU, experts compute bit for bit what the operators' reference twins do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.kernels.registry import get_kernel
from tests.plugin.test_experts_parallel import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    Layer,
    checkpoint,
    make_method,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")


def loaded(layout: str) -> tuple[Layer, list[torch.Tensor]]:
    """The layer as its checkpoint has it, and the operator's weight arguments."""
    layer, method = Layer(0, 1, by_expert=False), make_method(layout)
    layer.quant_method = method
    method.create_weights(layer, EXPERTS, HIDDEN, layer.inner, torch.bfloat16)
    for name, expert, tensor in checkpoint(layout):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, weight_name=f"experts.{name}", expert_id=expert)
    arguments = []
    for name in ("w13", "w2"):
        pair = [getattr(layer, f"{name}_{kind}").data for kind in ("weight", "weight_scale")]
        if layout == "mxfp4":
            pair = list(torch.ops.oss_fused.moe_repack_mxfp4(*pair, name == "w13"))
        arguments += [*pair, getattr(layer, f"{name}_bias").data]
    method.process_weights_after_loading(layer)
    return layer, arguments


# 3: most gates and ups are beyond the clamps; 600 tokens: FP8 activations of MXFP4 experts
@pytest.mark.parametrize("tokens", [7, 600])
@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_it_is_the_twin(layout, tokens):
    layer, weights = loaded(layout)
    torch.manual_seed(9)
    x = 3 * torch.randn(tokens, HIDDEN).bfloat16()
    logits = torch.randn(tokens, EXPERTS).bfloat16()
    served = layer.quant_method.apply_monolithic(layer, x, logits)
    extra = {"fp8_min_tokens": 512} if layout == "mxfp4" else {}
    twin = get_kernel("torch", f"moe_{layout}")(x, logits, *weights, TOP_K, True, **extra)
    assert torch.equal(served, twin)
