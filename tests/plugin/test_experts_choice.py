# SPDX-License-Identifier: MIT
"""Which kernel runs experts: ours, unless something asks for or needs vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from oss_fused.errors import BackendUnavailableError, UnsupportedModelError
from oss_fused.layers.vllm.experts import choice
from oss_fused.quant.settings import OnlineOptions, from_checkpoint, online, with_options
from tests.plugin.cpu_kind import tell_vllm

SETTINGS = online(OnlineOptions(experts="fp8"))
MXFP4 = from_checkpoint({"quant_method": "mxfp4"})


def asking(kernels, settings=SETTINGS):
    return with_options(settings, {"expert_kernels": kernels})


needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is a GPU here")


@pytest.fixture(autouse=True)
def returned(monkeypatch):
    """vLLM's configuration, which here says only whether experts of tokens are returned."""
    outputs = SimpleNamespace(enable_return_routed_experts=False)
    config = SimpleNamespace(aux_output_config=outputs)
    monkeypatch.setattr(choice, "get_current_vllm_config", lambda: config)
    return outputs


@pytest.fixture
def on_a_hopper(monkeypatch):
    """Record what the method is made with, as if this were an H200."""
    monkeypatch.setattr(choice, "_native_is_faster", lambda: True)
    monkeypatch.setattr(choice, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(choice, "OssFp8MoEMethod", lambda *given: given)


def layer(**changes):
    parallel = SimpleNamespace(
        dp_size=1,
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


@pytest.mark.usefixtures("on_a_hopper")
def test_ours_by_default():
    assert choice.experts_method(layer(), SETTINGS, "x")[-2:] == (True, True)
    gathered = layer(use_all2all_kernels=True, use_ag_rs_all2all_kernels=True)
    assert choice.experts_method(gathered, SETTINGS, "x")[-2:] == (True, True)
    assert choice.experts_method(layer(), asking("vllm"), "x")[-2:] == (True, False)


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
@pytest.mark.usefixtures("on_a_hopper")
def test_what_takes_vllm(changes, reason):
    routes = not {"scoring_func", "use_grouped_topk"} & set(changes)
    assert choice.experts_method(layer(**changes), SETTINGS, "x")[-2:] == (routes, False)
    with pytest.raises(BackendUnavailableError, match=reason):
        choice.experts_method(layer(**changes), asking("native"), "x")


@pytest.mark.usefixtures("on_a_hopper")
def test_routed_experts_that_are_returned_take_vllm(returned):
    """vLLM's capture of them refuses kernels that route by themselves, when the server starts."""
    returned.enable_return_routed_experts = True
    assert choice.experts_method(layer(), SETTINGS, "x")[-2:] == (True, False)
    with pytest.raises(BackendUnavailableError, match="--enable-return-routed-experts"):
        choice.experts_method(layer(), asking("native"), "x")


def test_an_activation_that_no_kernel_has():
    with pytest.raises(UnsupportedModelError, match="gelu"):
        choice.experts_method(layer(activation=MoEActivation.GELU), SETTINGS, "x")


class GptOss(choice.GptOssRoutedExperts):
    """gpt-oss's layer of experts, for what its type says."""

    def __init__(self, **changes):
        torch.nn.Module.__init__(self)
        vars(self).update(vars(layer(**changes)))


@pytest.fixture(params=["fp8", "mxfp4"])
def chosen(request, monkeypatch):
    """The method a CPU takes for a layer with FP8 or MXFP4 experts."""
    for module in ("fp8", "mxfp4"):
        monkeypatch.setattr(
            f"oss_fused.layers.vllm.experts.{module}.max_routed_tokens", lambda moe: 16
        )

    def choose(kernels="auto", **changes):
        if request.param == "fp8":
            return choice.experts_method(layer(**changes), asking(kernels), "x")
        return choice.experts_method(GptOss(**changes), asking(kernels, MXFP4), "x")

    choose.layout = request.param
    return choose


@needs_cpu
def test_every_cpu_takes_the_reference(chosen, amx):
    expected = {"fp8": choice.OssFp8MoEMethod, "mxfp4": choice.OssMxfp4MoEMethod}[chosen.layout]
    for kernels in ("auto", "native"):
        method = chosen(kernels)
        assert type(method) is expected and method.on_cpu and method.is_monolithic


@needs_cpu
def test_lora_is_refused_by_name_on_every_cpu(chosen, amx):
    for kernels in ("auto", "vllm"):
        if (kernels, chosen.layout) == ("vllm", "fp8"):
            continue  # there is no such kernel, with or without LoRA
        with pytest.raises(UnsupportedModelError, match=f"LoRA with experts='{chosen.layout}'"):
            chosen(kernels, is_lora_enabled=True)


@needs_cpu
def test_vllms_kernels_on_a_cpu_only_where_they_are_asked_for(chosen, monkeypatch):
    """By name, and never silently something else where vLLM has none."""

    def init(method, moe):
        if not torch.cpu._is_amx_tile_supported():
            raise NotImplementedError("no MXFP4 MoE backend")

    monkeypatch.setattr(choice.GptOssMxfp4MoEMethod, "__init__", init)
    for asked in ({"moe_backend": "cpu"}, {"kernels": "vllm"}):
        for has_amx in (False, True):
            tell_vllm(monkeypatch, has_amx)
            if has_amx and chosen.layout == "mxfp4":
                assert type(chosen(**asked)) is choice.VllmMxfp4MoEMethod
                continue
            with pytest.raises(BackendUnavailableError, match="vLLM has no"):
                chosen(**asked)


@needs_cpu
@pytest.mark.parametrize(("asked", "tokens"), [("auto", 512), ("bf16", -1), ("fp8", 256)])
def test_activations_of_mxfp4_experts(asked, tokens, monkeypatch):
    monkeypatch.setattr("oss_fused.layers.vllm.experts.mxfp4.max_routed_tokens", lambda moe: 16)
    settings = with_options(MXFP4, {"expert_activations": asked})
    assert choice.experts_method(GptOss(), settings, "x").fp8_min_tokens == tokens
