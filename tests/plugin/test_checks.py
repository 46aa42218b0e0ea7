# SPDX-License-Identifier: MIT
"""Bad tensors are refused by the name that they have in the checkpoint."""

from __future__ import annotations

import types

import pytest
import torch

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.checks import (
    FLOATS,
    MISSING,
    check_finite,
    check_scale,
    check_weight,
    checked_loader,
)

QKV = "model.layers.0.attn.qkv_proj.weight_scale"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale(value):
    scale = torch.ones(8, 1)
    scale[5] = value
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.k_proj.weight_scale'"):
        check_scale(QKV, scale, [4, 2, 2])


def test_missing_scale():
    scale = torch.ones(8, 1)
    scale[6:] = MISSING
    with pytest.raises(CheckpointError, match=r"'.*v_proj.weight_scale' is missing"):
        check_scale(QKV, scale, [4, 2, 2])


def test_good_scale():
    check_scale(QKV, torch.full((8, 1), 1e-30), [4, 2, 2])
    check_scale("lm_head.weight_scale", torch.ones(8, 1), [8])


def test_nan_codes():
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    check_weight("model.layers.1.mlp.gate_up_proj.weight", codes, [2, 2])
    codes[3, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight'"):
        check_weight("model.layers.1.mlp.gate_up_proj.weight", codes, [2, 2])


def test_weight_that_is_not_finite():
    check_finite("lm_head.weight", torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight'"):
        check_finite("lm_head.weight", torch.tensor([[1.0, float("inf")]]))


FP8 = torch.float8_e4m3fn


class Layer:
    """Stands for vLLM's layers: loaders are methods, reloading puts them on another object."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "w1", "w3", "w2"

    def linear(self, param, loaded_weight, loaded_shard_id=None):
        return self, loaded_weight

    def experts(self, param, loaded_weight, weight_name, shard_id, expert_id):
        return self, loaded_weight


@pytest.mark.parametrize("wrong", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int8])
def test_numbers_are_not_loaded_as_codes(wrong):
    layer, good = Layer(), torch.zeros(2).to(FP8)
    loader = checked_loader(layer.linear, "model.layers.0.attn.qkv_proj.weight", (FP8,))
    assert loader(None, good, "k") == (layer, good)
    assert loader(None, loaded_weight=good) == (layer, good)
    named = rf"'model.layers.0.self_attn.k_proj.weight' is {wrong}; expected torch.float8_e4m3fn"
    with pytest.raises(CheckpointError, match=named):
        loader(None, torch.zeros(2).to(wrong), "k")
    loader = checked_loader(layer.linear, "model.layers.0.mlp.gate_up_proj.weight", (FP8,))
    with pytest.raises(CheckpointError, match="'model.layers.0.mlp.up_proj.weight' is"):
        loader(None, torch.zeros(2).to(wrong), loaded_shard_id=1)


@pytest.mark.parametrize("codes", [FP8, torch.float8_e5m2, torch.uint8, torch.int8])
def test_codes_are_not_loaded_as_numbers(codes):
    loader = checked_loader(Layer().linear, "model.embed_tokens.weight", FLOATS)
    for dtype in FLOATS:
        loader(None, torch.zeros(2, dtype=dtype))
    with pytest.raises(CheckpointError, match="'model.embed_tokens.weight' is torch"):
        loader(None, torch.zeros(2).to(codes))


def test_an_experts_tensor_is_named():
    loader = checked_loader(Layer().experts, "model.layers.1.mlp.experts.w13_weight", (FP8,))
    with pytest.raises(CheckpointError, match="'model.layers.1.mlp.experts.5.w3.weight_scale' is"):
        loader(None, torch.zeros(2), "x.experts.w13_weight_scale", shard_id="w3", expert_id=5)


def test_a_loader_stays_a_method_of_its_layer():
    layer, other = Layer(), Layer()
    loader = checked_loader(layer.linear, "lm_head.weight", FLOATS)
    assert isinstance(loader, types.MethodType) and loader.__self__ is layer
    weight = torch.zeros(1)
    # vLLM's reload moves loaders from layer to layer in this way
    assert loader.__func__.__get__(other)(None, weight) == (other, weight)
    plain = checked_loader(lambda param, loaded_weight: loaded_weight, "k_scale", FLOATS)
    assert plain(None, weight) is weight
