# SPDX-License-Identifier: MIT
"""Schemes and expert layouts on a GPU, compiled and in CUDA graphs."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import GRAPHS, assert_agrees, build, calibrate, to_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.usefixtures("compiled")]


@pytest.mark.parametrize("inputs", ["token", "tensor", None])
def test_schemes(inputs, tmp_path, engine):
    folder = build(tmp_path / "bf16", "llama")
    served = engine(calibrate(build(tmp_path / "fp8", "llama"), inputs=inputs), **GRAPHS)
    assert_agrees(served.generate(), folder, inputs=inputs)


@pytest.mark.parametrize("experts", ["bf16", "fp8"])
def test_expert_layouts(experts, tmp_path, engine):
    folder = build(tmp_path / "bf16", "gpt_oss", head_dim=64)
    checkpoint = build(tmp_path / "fp8", "gpt_oss", head_dim=64)
    served = engine(calibrate(checkpoint, ignore=(), experts=experts), **GRAPHS)
    assert_agrees(served.generate(), folder, ignore=(), experts=experts)


@pytest.mark.parametrize("choice", ["native", "vllm"])
def test_mxfp4_kernels(choice, tmp_path, engine):
    options = {"additional_config": {"oss_fused": {"expert_kernels": choice}}}
    folder = build(tmp_path / "bf16", "gpt_oss", head_dim=64)
    checkpoint = to_mxfp4(build(tmp_path / "mxfp4", "gpt_oss", head_dim=64))
    # vLLM's default, triton_kernels, does not compile for layers this small
    backend = {"moe_backend": "marlin"} if choice == "vllm" else {}
    served = engine(checkpoint, quantization="oss_fp8", **options, **backend, **GRAPHS)
    experts = served.model.model.layers[0].mlp.experts.routed_experts
    ours = type(experts.quant_method).__name__ == "OssMxfp4MoEMethod"
    assert ours == (choice == "native")
    assert_agrees(served.generate(), folder, ignore=(), experts="mxfp4")


def test_reload(tmp_path, engine):
    served = engine(calibrate(build(tmp_path, "llama")), **GRAPHS)
    before = served.generate()
    served.llm.collective_rpc("reload_weights")
    assert served.generate() == before
