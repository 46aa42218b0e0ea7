# SPDX-License-Identifier: MIT
"""Tiny models through vllm.LLM on this machine, against a fake-quantised transformers model."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import BackendUnavailableError
from tests.plugin.conftest import (
    assert_agrees,
    build,
    calibrate,
    tensors_of,
    to_mxfp4,
)
from tests.plugin.cpu_kind import skip_without_fp8_cache, tell_vllm

pytestmark = pytest.mark.serve

DENSE = ("llama", "qwen2", "qwen3", "mistral")


def linear_of(model, name):
    return model.get_submodule(name)


@pytest.mark.parametrize("family", DENSE)
def test_online_dense(family, tmp_path, engine):
    folder = build(tmp_path, family)
    served = engine(folder, quantization="oss_fp8")
    assert_agrees(served.generate(), folder)
    layer = served.model.model.layers[0]
    assert type(layer).__module__ == "oss_fused.layers.vllm.decoder"
    assert type(layer.mlp.down_proj.quant_method).__name__ == "OssFp8LinearMethod"
    assert type(served.model.lm_head.quant_method).__name__.endswith("UnquantizedEmbeddingMethod")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_calibrated_dense(family, tmp_path, engine):
    folder = build(tmp_path / "bf16", family)
    served = engine(calibrate(build(tmp_path / "fp8", family)))
    assert_agrees(served.generate(), folder)


@pytest.mark.parametrize("inputs", ["tensor", None])
def test_calibrated_schemes(inputs, tmp_path, engine):
    folder = build(tmp_path / "bf16", "llama")
    served = engine(calibrate(build(tmp_path / "fp8", "llama"), inputs=inputs))
    assert_agrees(served.generate(), folder, inputs=inputs)


def test_calibrated_head(tmp_path, engine):
    folder = build(tmp_path / "bf16", "llama")
    served = engine(calibrate(build(tmp_path / "fp8", "llama"), ignore=()))
    assert type(served.model.lm_head.quant_method).__name__ == "OssFp8LinearMethod"
    assert_agrees(served.generate(), folder, ignore=())


@pytest.mark.parametrize("head", [False, True])
def test_tied_embeddings(head, tmp_path, engine):
    folder = build(tmp_path, "llama", tie_word_embeddings=True)
    options = {"additional_config": {"oss_fused": {"lm_head": head}}}
    served = engine(folder, quantization="oss_fp8", **options)
    assert_agrees(served.generate(), folder, ignore=() if head else ("lm_head",))
    embedding = served.model.model.embed_tokens.weight
    assert embedding.dtype == torch.bfloat16
    assert torch.equal(embedding[:200], tensors_of(folder)["model.embed_tokens.weight"])
    assert (served.model.lm_head.weight is embedding) is not head


def test_calibrated_tied(tmp_path, engine):
    folder = build(tmp_path / "bf16", "llama", tie_word_embeddings=True)
    served = engine(calibrate(build(tmp_path / "fp8", "llama", tie_word_embeddings=True)))
    assert_agrees(served.generate(), folder)


def test_options_of_the_command_line(tmp_path, engine):
    folder = build(tmp_path, "llama")
    ignore = ["re:.*mlp\\..*", "model.layers.1.*"]
    served = engine(
        folder,
        quantization="oss_fp8",
        additional_config={"oss_fused": {"ignore": ignore, "scheme": "W8A16"}},
    )
    kept = [n for n in tensors_of(folder) if "mlp" in n or "layers.1" in n or "lm_head" in n]
    kept = tuple(name.removesuffix(".weight") for name in kept)
    assert_agrees(served.generate(), folder, ignore=kept, inputs=None)


@pytest.mark.parametrize(("fused", "amx"), [(False, False), (True, True)])
def test_gpt_oss_online_mxfp4(fused, amx, tmp_path, engine, monkeypatch):
    tell_vllm(monkeypatch, amx)
    folder = build(tmp_path / "bf16", "gpt_oss")
    options = {"additional_config": {"oss_fused": {"fused_layers": fused}}}
    checkpoint = to_mxfp4(build(tmp_path / "mxfp4", "gpt_oss"))
    served = engine(checkpoint, quantization="oss_fp8", **options)
    block = served.model.model.layers[0]
    assert type(block).__name__ == ("OssTransformerBlock" if fused else "TransformerBlock")
    assert type(served.model.lm_head.quant_method).__name__ == "OssFp8LinearMethod"
    if not torch.cuda.is_available():
        experts = served.model.model.layers[0].mlp.experts.routed_experts
        assert type(experts.quant_method).__name__ == "OssMxfp4MoEMethod"
    assert_agrees(served.generate(), folder, ignore=(), experts="mxfp4")


NATIVE = {"additional_config": {"oss_fused": {"expert_kernels": "native"}}}


def test_gpt_oss_in_our_expert_kernel(tmp_path, engine):
    """The options of serving hold for a calibrated checkpoint too."""
    folder = build(tmp_path / "bf16", "gpt_oss")
    checkpoint = build(tmp_path / "fp8", "gpt_oss")
    served = engine(calibrate(checkpoint, ignore=(), experts="mxfp4"), **NATIVE)
    experts = served.model.model.layers[0].mlp.experts.routed_experts
    assert type(experts.quant_method).__name__ == "OssMxfp4MoEMethod"
    before = served.generate()
    assert_agrees(before, folder, ignore=(), experts="mxfp4")
    served.llm.collective_rpc("reload_weights")
    assert served.generate() == before


@pytest.mark.parametrize(
    ("options", "match"),
    [({"moe_backend": "marlin"}, "--moe-backend marlin"), ({"enable_lora": True}, "LoRA")],
)
def test_our_expert_kernel_refuses(options, match, tmp_path, engine):
    folder = to_mxfp4(build(tmp_path, "gpt_oss"))
    with pytest.raises(BackendUnavailableError, match=match):
        engine(folder, quantization="oss_fp8", **options, **NATIVE)


@pytest.mark.parametrize("experts", ["keep", "fp8"])
def test_gpt_oss_online_bf16(experts, tmp_path, engine):
    folder = build(tmp_path, "gpt_oss")
    options = {"additional_config": {"oss_fused": {"experts": experts}}}
    served = engine(folder, quantization="oss_fp8", **options)
    result = served.generate()
    assert_agrees(result, folder, ignore=(), experts="fp8" if experts == "fp8" else None)
    if experts == "fp8":
        served.llm.collective_rpc("reload_weights")
        assert served.generate() == result


@pytest.mark.parametrize("experts", ["bf16", "mxfp4", "fp8"])
def test_gpt_oss_calibrated(experts, tmp_path, engine):
    folder = build(tmp_path / "bf16", "gpt_oss")
    served = engine(calibrate(build(tmp_path / "fp8", "gpt_oss"), ignore=(), experts=experts))
    assert_agrees(served.generate(), folder, ignore=(), experts=experts)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_fp8_kv_cache(family, tmp_path, engine):
    skip_without_fp8_cache()
    folder = build(tmp_path / "bf16", family)
    ignore = ("lm_head",)
    experts = "bf16" if family == "gpt_oss" else None
    checkpoint = calibrate(build(tmp_path / "fp8", family), ignore=ignore, kv=True, experts=experts)
    served = engine(checkpoint)
    layer = served.model.model.layers[0]
    attention = (layer.attn if family == "gpt_oss" else layer.self_attn).attn
    assert attention.kv_cache_dtype.startswith("fp8")
    # exactly the checkpoint's float32, not rounded to the model's dtype
    assert attention._k_scale.item() == torch.tensor(0.0123456).item()
    assert attention._v_scale_float == torch.tensor(0.0234567).item()
    assert_agrees(served.generate(), folder, tolerance=0.2, ignore=ignore, experts=experts)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_dummy_weights(family, tmp_path, engine):
    skip_without_fp8_cache()
    experts = "fp8" if family == "gpt_oss" else None
    folder = calibrate(build(tmp_path, family), ignore=(), experts=experts, kv=True)
    served = engine(folder, load_format="dummy")
    _, logprobs = served.generate()
    assert all(-20 < value <= 0 for value in logprobs)


def test_other_quantisations_keep_vllms_layers(tmp_path, engine):
    folder = build(tmp_path, "llama")
    served = engine(folder)
    assert type(served.model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert_agrees(
        served.generate(), folder, ignore=tuple(n[: -len(".weight")] for n in tensors_of(folder))
    )


def test_sliding_window_layers_may_keep_their_cache(tmp_path, engine):
    skip_without_fp8_cache()
    folder = build(tmp_path / "bf16", "gpt_oss")
    checkpoint = calibrate(build(tmp_path / "fp8", "gpt_oss"), ignore=(), experts="bf16", kv=True)
    served = engine(checkpoint, kv_cache_dtype_skip_layers=["sliding_window"])
    kinds = [layer.attn.attn.kv_cache_dtype for layer in served.model.model.layers]
    assert kinds == ["auto", "fp8"]
    assert_agrees(served.generate(), folder, tolerance=0.2, ignore=())


def test_cache_stays_bf16_when_asked(tmp_path, engine):
    folder = build(tmp_path / "bf16", "llama")
    served = engine(calibrate(build(tmp_path / "fp8", "llama"), kv=True), kv_cache_dtype="bfloat16")
    attention = served.model.model.layers[0].self_attn.attn
    assert attention.kv_cache_dtype == "bfloat16"
    assert attention._k_scale.item() == 1.0
    assert_agrees(served.generate(), folder)
