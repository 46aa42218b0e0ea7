# SPDX-License-Identifier: MIT
"""What a model's configuration reads of vLLM's before it chooses methods of layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from oss_fused.errors import SchemeError
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.unquantized import (
    OssUnquantizedEmbeddingMethod,
    OssUnquantizedLinearMethod,
)
from oss_fused.plugin import config
from oss_fused.plugin.registration import prepare_server


def served(architecture="LlamaForCausalLM", runner_type="generate", load_format="auto", **options):
    hf = SimpleNamespace(to_dict=dict, model_type="m", architectures=[architecture])
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf,
            runner_type=runner_type,
            trust_remote_code=False,
            quantization="oss_fp8",
        ),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=None,
        additional_config={"oss_fused": options},
    )


@pytest.mark.parametrize(
    ("architecture", "idle"), [("MixtralForCausalLM", True), ("LlamaForCausalLM", False)]
)
def test_options_that_do_nothing_are_named(architecture, idle, monkeypatch, caplog):
    """vLLM does not ask for our scheduler or monitor where its own class serves the model."""
    vllm_config = served(architecture, monitor_every=7, burst=4, expert_kernels="native")
    monkeypatch.setattr(config, "get_current_vllm_config", lambda: vllm_config)
    with caplog.at_level("WARNING"):
        config.OssFp8Config()._read_options()
    text = (
        "oss_fused: burst=4, monitor_every=7: no effect with architectures=['MixtralForCausalLM']"
    )
    assert (text in caplog.text) is idle


@pytest.mark.parametrize("chosen", ["sharded_state", "runai_streamer_sharded"])
def test_a_sharded_state_is_refused_by_name(chosen, monkeypatch):
    match = f"^--load-format {chosen}: .*does not support it; expected auto"
    with pytest.raises(SchemeError, match=match):
        prepare_server(served(load_format=chosen))
    # vLLM asks no server settings of us where its own class serves, nor for a draft
    for runner_type in ("generate", "draft"):
        vllm_config = served("MixtralForCausalLM", runner_type, chosen)
        monkeypatch.setattr(config, "get_current_vllm_config", lambda: vllm_config)  # noqa: B023
        with pytest.raises(SchemeError, match=match):
            config.OssFp8Config()._read_options()


def layer_of(kind):
    """A layer of vLLM's type ``kind``, without what it takes to make one."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


def chosen(kind, prefix, bits16=(), drafts=False):
    made = config.OssFp8Config()
    made._options_read, made._bits16 = True, dict.fromkeys(bits16, "why")
    made._drafts = drafts
    return made.get_quant_method(layer_of(kind), prefix)


@pytest.mark.parametrize(
    ("kind", "name", "method"),
    [
        (LinearBase, "mlp.gate_up_proj", OssFp8LinearMethod),
        # rounding could change what they choose
        (GateLinear, "mlp.gate", OssUnquantizedLinearMethod),
        (LinearBase, "score", OssUnquantizedLinearMethod),
        (LinearBase, "model.classifier", OssUnquantizedLinearMethod),
    ],
)
def test_routers_and_classifiers_stay_as_they_are(kind, name, method):
    assert type(chosen(kind, name)) is method


def test_the_head_of_a_draft_is_quantised_where_the_served_one_is_not(monkeypatch):
    """A checkpoint of a draft may lack it: it is the served model's then."""
    monkeypatch.setattr(config, "get_current_vllm_config", served)
    assert type(chosen(ParallelLMHead, "lm_head")) is OssUnquantizedEmbeddingMethod
    method = chosen(ParallelLMHead, "lm_head", drafts=True)
    assert type(method) is OssFp8LinearMethod and method.drafts and method.may_be_absent


def test_experts_of_the_monitors_policy_get_16_bits(monkeypatch):
    def method(layer, settings, prefix):
        made = OssMxfp4MoEMethod.__new__(OssMxfp4MoEMethod)
        made.fp8_min_tokens = 16
        return made

    monkeypatch.setattr(config, "experts_method", method)
    names = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    found = [chosen(RoutedExperts, name, names[1:]).fp8_min_tokens for name in names]
    assert found == [16, -1]
