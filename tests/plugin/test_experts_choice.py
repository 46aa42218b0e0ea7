# SPDX-License-Identifier: MIT
"""Which kernel runs FP8 experts: ours, unless something asks for or needs vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from oss_fused.errors import BackendUnavailableError, UnsupportedModelError
from oss_fused.plugin import moe as choice
from oss_fused.plugin.settings import OnlineOptions, online

SETTINGS = online(OnlineOptions(experts="fp8"))


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch):
    """Record what the method is made with, as if this were an H200."""
    monkeypatch.setattr(choice, "_ours_is_faster", lambda: True)
    monkeypatch.setattr(choice, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(choice, "OssFp8MoEMethod", lambda *given: given)


def layer(**changes):
    parallel = SimpleNamespace(
        enable_eplb=False,
        use_all2all_kernels=False,
        use_ag_rs_all2all_kernels=False,
        all2all_backend="ep",
        pcp_size=1,
    )
    moe = SimpleNamespace(
        moe_backend="auto",
        is_lora_enabled=False,
        hidden_dim=128,
        intermediate_size_per_partition=64,
        moe_parallel_config=parallel,
    )
    made = SimpleNamespace(
        moe_config=moe,
        activation=MoEActivation.SILU,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        scoring_func="softmax",
        use_grouped_topk=False,
        custom_routing_function=None,
        e_score_correction_bias=None,
        apply_router_weight_on_input=False,
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=0),
    )
    for name, value in changes.items():
        holder = next(h for h in (made, moe, parallel) if hasattr(h, name))
        setattr(holder, name, value)
    return made


def test_ours_by_default(monkeypatch):
    assert choice.experts_method(layer(), SETTINGS, "x")[-2:] == (True, True)
    gathered = layer(use_all2all_kernels=True, use_ag_rs_all2all_kernels=True)
    assert choice.experts_method(gathered, SETTINGS, "x")[-2:] == (True, True)
    monkeypatch.setenv("OSS_FUSED_EXPERTS", "vllm")
    assert choice.experts_method(layer(), SETTINGS, "x")[-2:] == (True, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_backend": "triton"}, "--moe-backend triton"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"enable_eplb": True}, "load balancing"),
        ({"use_all2all_kernels": True}, "all2all backend ep"),
        (
            {"use_all2all_kernels": True, "use_ag_rs_all2all_kernels": True, "pcp_size": 2},
            "all2all backend ep",
        ),
        ({"scoring_func": "sigmoid"}, "routing"),
        ({"use_grouped_topk": True}, "routing"),
        ({"hidden_dim": 100}, "hidden size 100"),
    ],
)
def test_what_takes_vllm(changes, reason, monkeypatch):
    routes = not {"scoring_func", "use_grouped_topk"} & set(changes)
    assert choice.experts_method(layer(**changes), SETTINGS, "x")[-2:] == (routes, False)
    monkeypatch.setenv("OSS_FUSED_EXPERTS", "oss")
    with pytest.raises(BackendUnavailableError, match=reason):
        choice.experts_method(layer(**changes), SETTINGS, "x")


def test_an_activation_that_no_kernel_has():
    with pytest.raises(UnsupportedModelError, match="gelu"):
        choice.experts_method(layer(activation=MoEActivation.GELU), SETTINGS, "x")
