# SPDX-License-Identifier: MIT
"""What a model's configuration reads of vLLM's before it chooses methods of layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oss_fused.errors import SchemeError
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
