# SPDX-License-Identifier: MIT
"""Scales of an FP8 KV cache, without an engine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.model_executor.layers.attention.attention import set_default_quant_scales

from oss_fused.errors import CheckpointError
from oss_fused.layers.vllm.kv_cache import OssFp8KVCacheMethod


def load(scheme=None, cache="fp8", **scales):
    """An attention layer that loaded ``scales``."""
    layer = nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.kv_cache_dtype = cache
    config = SimpleNamespace(kv_cache_scheme=scheme)
    method = OssFp8KVCacheMethod(config, "model.layers.3.self_attn.attn")
    method.create_weights(layer)
    for name, value in scales.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, torch.tensor([value]))
    method.process_weights_after_loading(layer)
    return layer


def test_scales_reach_the_kernels():
    layer = load({}, q_scale=0.5, k_scale=0.0123456, v_scale=0.25)
    found = [layer._q_scale, layer._k_scale, layer._v_scale]
    assert torch.equal(torch.stack(found), torch.tensor([0.5, 0.0123456, 0.25]))
    # none of a query: 1.0, as in vLLM
    assert load({}, k_scale=0.5, v_scale=0.25)._q_scale == 1


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_a_bad_scale_is_refused(name, value):
    scales = {"k_scale": 0.5, "v_scale": 0.25} | {name: value}
    said = f"'model.layers.3.self_attn.{name}' is {value}; expected a finite scale above 0"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(**scales)
    # a cache in 16 bits reads none
    load(cache="auto", **scales)


@pytest.mark.parametrize("scheme", [None, {}])
@pytest.mark.parametrize(("came", "missing"), [("k_scale", "v_scale"), ("v_scale", "k_scale")])
def test_one_scale_is_not_taken_for_the_other(scheme, came, missing):
    with pytest.raises(CheckpointError, match=rf"'model\S*\.{missing}' is missing .* other scale"):
        load(scheme, **{came: 0.5})


def test_both_may_be_missing_where_nothing_promises_them():
    assert load()._k_scale == 1
    with pytest.raises(CheckpointError, match="k_scale' is missing .* kv_cache_scheme"):
        load({})
