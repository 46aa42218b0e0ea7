# SPDX-License-Identifier: MIT
"""Served on a CPU, experts compute bit for bit what the operators' reference twins do, after the
same checks whoever runs them.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from oss_fused.errors import CheckpointError
from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm.experts import choice
from oss_fused.quant.mxfp4 import unpack_mxfp4
from tests.plugin.test_experts_parallel import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    Layer,
    checkpoint,
    make_method,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")


def as_stored(layout: str) -> Layer:
    """A layer that has its checkpoint's tensors, not yet processed."""
    layer, method = Layer(0, 1, by_expert=False), make_method(layout)
    layer.quant_method = method
    method.create_weights(layer, EXPERTS, HIDDEN, layer.inner, torch.bfloat16)
    for name, expert, tensor in checkpoint(layout):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, weight_name=f"experts.{name}", expert_id=expert)
    return layer


def loaded(layout: str) -> tuple[Layer, list[torch.Tensor]]:
    """A layer that is ready to run, and the operator's weight arguments."""
    layer = as_stored(layout)
    arguments = []
    for name in ("w13", "w2"):
        pair = [getattr(layer, f"{name}_{kind}").data for kind in ("weight", "weight_scale")]
        if layout == "mxfp4":
            pair = list(torch.ops.oss_fused.moe_repack_mxfp4(*pair, name == "w13"))
        arguments += [*pair, getattr(layer, f"{name}_bias").data]
    layer.quant_method.process_weights_after_loading(layer)
    return layer, arguments


@pytest.mark.parametrize("exponent", [-40, 20])
def test_mxfp4_weights_are_exact_in_a_model_of_float16(exponent):
    layer = as_stored("mxfp4")
    layer.quant_method.moe.in_dtype = torch.float16
    for name in ("w13", "w2"):
        getattr(layer, f"{name}_weight_scale").data.fill_(127 + exponent)
    blocks = layer.w2_weight.data.unflatten(-1, (-1, 16)).clone()
    expected = unpack_mxfp4(blocks, layer.w2_weight_scale.data, torch.float32)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.w2_weight.float(), expected)


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


def test_the_tokens_of_a_step_decide_on_fp8_activations():
    """From 512 on, whatever the tokens are; each is quantised by itself."""
    layer, weights = loaded("mxfp4")
    torch.manual_seed(9)
    x, logits = torch.randn(512, HIDDEN).bfloat16(), torch.randn(512, EXPERTS).bfloat16()

    def twin(tokens, fp8_min_tokens):
        run = get_kernel("torch", "moe_mxfp4")
        return run(
            x[:tokens], logits[:tokens], *weights, TOP_K, True, fp8_min_tokens=fp8_min_tokens
        )

    def served(tokens):
        return layer.quant_method.apply_monolithic(layer, x[:tokens], logits[:tokens])

    assert torch.equal(served(511), twin(511, -1))
    assert torch.equal(served(512), twin(512, 0)) and not torch.equal(served(512), twin(512, -1))
    # eight sequences that decode beside a prompt, and by themselves with FP8 activations
    beside, alone = served(512)[:8].float(), twin(8, 0).float()
    # sums may be ordered otherwise, which bf16 shows in its last bit
    assert (beside - alone).norm() < 2e-3 * alone.norm()
    assert (beside - served(8).float()).norm() > 6e-3 * alone.norm()


@pytest.mark.parametrize("part", ["w13", "w2"])
@pytest.mark.parametrize("owner", ["ours", "vllm"])
def test_block_scales_are_checked_whoever_runs_the_layer(owner, part, monkeypatch):
    layer = as_stored("mxfp4")
    method, ran = layer.quant_method, []
    if owner == "vllm":
        method = choice.VllmMxfp4MoEMethod.__new__(choice.VllmMxfp4MoEMethod)
        method.prefix = "experts"
        theirs = choice.GptOssMxfp4MoEMethod
        monkeypatch.setattr(
            theirs, "process_weights_after_loading", lambda method, layer: ran.append(layer)
        )
        method.process_weights_after_loading(layer)
        assert ran == [layer]
    getattr(layer, f"{part}_weight_scale").data[1, 2, -1] = 255
    name = {"w13": "gate_up_proj_scales", "w2": "down_proj_scales"}[part]
    with pytest.raises(CheckpointError, match=f"experts.{name}' holds 255"):
        method.process_weights_after_loading(layer)
