# SPDX-License-Identifier: MIT
"""Tiny models on a GPU, with torch.compile and full CUDA graphs, as a server runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import oss_fused
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.levels import BF16_ROWS
from oss_fused.layers.vllm.decoder import norm_for
from oss_fused.layers.vllm.dense_mlp import runs_next_norm
from tests.plugin.conftest import GRAPHS, PROMPT, assert_agrees, build, calibrate, to_mxfp4

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.usefixtures("compiled")]


def attention_classes(served):
    return {
        type(module.impl).__name__
        for module in served.model.modules()
        if getattr(module, "impl", None) is not None and hasattr(module, "kv_cache_dtype")
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_online_in_graphs(family, tmp_path, engine):
    folder = build(tmp_path, family, head_dim=64) if family != "llama" else build(tmp_path, family)
    served = engine(folder, quantization="oss_fp8", **GRAPHS)
    assert attention_classes(served) == {"OssAttentionImpl"}
    ignore = () if family == "gpt_oss" else ("lm_head",)
    # noise of 2**-9 in the products, norms and experts of the CPU reference moves one of the tiny
    # gpt-oss's log-probabilities by up to 0.5: its routing is sharp
    tolerance = 0.4 if family == "gpt_oss" else 0.15
    assert_agrees(served.generate(), folder, tolerance=tolerance, ignore=ignore)


# sums of a down projection of this size are in two parts from 33 tokens on
LONG_SUMS = {"hidden_size": 2304, "intermediate_size": 8192, "initializer_range": 0.02}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_run_the_next_norm(family, tmp_path, engine):
    folder = build(tmp_path, family, num_attention_heads=36, num_key_value_heads=12, **LONG_SUMS)
    served = engine(folder, quantization="oss_fp8", **GRAPHS)
    following = [layer.following for layer in served.model.model.layers]
    assert None not in following[:-1] and following[-1] is None
    rows = torch.ones(2, 2304, dtype=torch.bfloat16, device="cuda")
    for layer in served.model.model.layers[:-1]:
        projection = layer.mlp.gate_up_proj
        x, _ = norm_for(layer.post_attention_layernorm, projection, rows, rows)
        assert runs_next_norm(layer, x)
    prompt = (PROMPT * 5)[:50]
    assert_agrees(served.generate(prompt), folder, prompt=prompt, ignore=("lm_head",))


def test_mxfp4_gpt_oss_in_graphs(tmp_path, engine):
    plain = build(tmp_path / "bf16", "gpt_oss", head_dim=64)
    served = engine(
        to_mxfp4(build(tmp_path / "mxfp4", "gpt_oss", head_dim=64)),
        quantization="oss_fp8",
        **GRAPHS,
    )
    assert_agrees(served.generate(), plain, ignore=(), experts="mxfp4")


def test_few_tokens_in_two_levels(tmp_path, engine):
    """As served by default: linear layers compute as with 16-bit activations."""
    if not runs_gluon(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and Gluon")
    plain = build(tmp_path / "bf16", "gpt_oss", head_dim=64)
    options = {"additional_config": {"oss_fused": {"linear_activations": "bf16"}}}
    served = engine(
        to_mxfp4(build(tmp_path / "mxfp4", "gpt_oss", head_dim=64)),
        quantization="oss_fp8",
        **options,
        **GRAPHS,
    )
    methods = [getattr(module, "quant_method", None) for module in served.model.modules()]
    assert BF16_ROWS in {getattr(method, "bf16_rows", 0) for method in methods}
    prompt = PROMPT[:5]
    result = served.generate(prompt)
    assert_agrees(result, plain, prompt=prompt, inputs=None, ignore=(), experts="mxfp4")


def test_fp8_cache_in_graphs(tmp_path, engine):
    plain = build(tmp_path / "bf16", "llama")
    served = engine(calibrate(build(tmp_path / "fp8", "llama"), kv=True), **GRAPHS)
    assert_agrees(served.generate(), plain, tolerance=0.3)


@pytest.mark.parametrize("family,kv", [("llama", True), ("qwen2", True), ("qwen3", False)])
def test_rope_and_cache_in_one_launch(family, kv, tmp_path, engine):
    # Qwen2's heads are as wide as their number says
    sizes = {"num_attention_heads": 2} if family == "qwen2" else {"head_dim": 64}
    plain = build(tmp_path / "bf16", family, **sizes)
    folder = calibrate(build(tmp_path / "fp8", family, **sizes), kv=kv)
    # a prompt in pieces; the second time its first blocks come from the prefix cache
    options = {"max_num_batched_tokens": 32, "enable_prefix_caching": True}
    served = engine(folder, **GRAPHS, **options)
    classes = {type(m).__name__ for m in served.model.modules()}
    assert f"Oss{family.capitalize()}Attention" in classes
    prompt = (PROMPT * 5)[:50]
    for _ in range(2):
        tolerance = 0.3 if kv else 0.15
        assert_agrees(served.generate(prompt), plain, tolerance=tolerance, prompt=prompt)


def test_attention_kernels_agree(tmp_path, engine):
    folder = build(tmp_path, "gpt_oss", head_dim=64)
    prompt = (PROMPT * 5)[:50]
    ours = engine(folder, quantization="oss_fp8", **GRAPHS).generate(prompt)
    options = {"additional_config": {"oss_fused": {"attention_kernels": "vllm"}}}
    served = engine(folder, quantization="oss_fp8", **options, **GRAPHS)
    assert attention_classes(served) == {"FlashAttentionImpl"}
    theirs = served.generate(prompt)
    assert ours[0] == theirs[0]
    # one e4m3 code that flips moves a log-probability of this model by about 0.1
    assert ours[1] == pytest.approx(theirs[1], abs=0.15)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_nothing_of_ours_compiles_while_serving(family, tmp_path, engine, monkeypatch):
    from vllm.utils import jit_monitor

    compiled = []
    monkeypatch.setattr(jit_monitor, "_log_triton_jit_compile", lambda *args: compiled.append(args))
    # as served by default: conftest asks for one level where a test compares numbers
    default = {"oss_fused": {"linear_activations": "bf16"}}
    sizes = LONG_SUMS if family == "llama" else {}
    folder = build(tmp_path, family, head_dim=64, **sizes)
    options = {"additional_config": default, "max_model_len": 160}
    served = engine(folder, quantization="oss_fp8", **options, **GRAPHS)
    monkeypatch.setattr(jit_monitor, "_active", False)
    jit_monitor.activate()
    # an engine before this one may have left the monitor on while this one warmed up
    compiled.clear()
    for length in (1, 2, 3, 7, 12, 31, 50, 100):
        served.generate((PROMPT * 10)[:length])
    ours = [name for name, _ in compiled if name in kernel_names()]
    assert not ours


def kernel_names():
    sources = (Path(oss_fused.__file__).parent / "kernels").rglob("*.py")
    return set(re.findall(r"\ndef (\w+)\(", "".join(path.read_text() for path in sources)))
