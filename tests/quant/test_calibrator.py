# SPDX-License-Identifier: MIT
"""What a run writes, for every family and way of storing."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint.audit import audit
from oss_fused.quant.formats import amax_to_scale, dequantize, quantize, relative_error
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.runner import LayerRunner
from tests.quant.runs import (
    Models,
    calibrate,
    config_of,
    tensors,
    whole_model,
)

KINDS = [
    "llama",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "mixtral",
    "qwen3-moe",
]
STORED = {"gpt-oss": "bf16", "gpt-oss-mxfp4": "mxfp4", "mixtral": "bf16", "qwen3-moe": "bf16"}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_only(models: Models, tmp_path: Path, kind: str) -> None:
    source, output = models(kind), tmp_path / "out"
    summary = calibrate(source, output)
    before, after = tensors(source), tensors(output)
    config = config_of(output)["quantization_config"]
    assert config["quant_method"] == "oss_fp8" and config["version"] == 1
    quantised = [name for name, t in after.items() if t.dtype is torch.float8_e4m3fn]
    assert len(quantised) == summary.quantised
    for name in quantised:
        q, scale = quantize(before[name], "channel")
        assert torch.equal(after[name].float(), q.float())
        assert torch.equal(after[f"{name}_scale"], scale)
    kept = set(after) - set(quantised) - {f"{name}_scale" for name in quantised}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert set(before) == kept | set(quantised)
    dense = "gpt-oss" not in kind
    assert ("lm_head" in config["ignore"]) is dense
    assert config["experts"] == STORED.get(kind)
    files = {path.name for path in output.iterdir()}
    assert {"README.md", "recipe.yaml", "tokenizer.json", "generation_config.json"} <= files
    same = {**config_of(source), "quantization_config": config}
    assert config_of(output) == same
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_static_scales_of_the_last_layer_match_the_whole_model(
    models: Models, tmp_path: Path, text_file: Path, kind: str
) -> None:
    source = models(kind)
    last = "re:model\\.layers\\.1\\."
    calibrate(
        source,
        tmp_path / "out",
        scheme="FP8_STATIC",
        targets=[last],
        dataset=str(text_file),
        num_samples=3,
        max_seq_length=32,
    )
    after = tensors(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(text_file.read_text(), return_tensors="pt")["input_ids"][0]
    windows = ids[: len(ids) // 32 * 32].view(-1, 32)
    chosen = sorted(torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:3])
    model = whole_model(source)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.startswith("model.layers.1.") and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, x, n=name: seen.update({n: torch.cat((seen.get(n, x[0]), x[0]))})
            )
    with torch.no_grad():
        for i in chosen:
            model(windows[i].unsqueeze(0))
    assert len(seen) == len([n for n in after if n.endswith("input_scale")]) > 3
    for name, x in seen.items():
        expected = amax_to_scale(x.abs().amax().view(1))
        torch.testing.assert_close(after[f"{name}.input_scale"], expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_kv_scales_are_those_of_what_a_cache_holds(
    models: Models, tmp_path: Path, text_file: Path, kind: str
) -> None:
    source = models(kind)
    settings = {"num_samples": 1, "max_seq_length": 128, "dataset": str(text_file)}
    calibrate(source, tmp_path / "out", kv_cache="fp8", **settings)
    after = tensors(tmp_path / "out")
    run = Run(make_recipe({**settings, "kv_cache": "fp8"}), RunOptions(source, tmp_path / "no"))
    with torch.no_grad():
        cache = whole_model(source)(run.samples[0].unsqueeze(0), use_cache=True).past_key_values
    first = cache.layers[0]
    # a sliding window drops what lies behind it: as many positions as it kept
    for part, exact in (("k", first.keys), ("v", first.values)):
        scale = after[f"model.layers.0.self_attn.{part}_scale"]
        assert scale.shape == (1,) and scale >= exact.abs().max() / 448 * 0.9999
        assert scale <= exact.abs().max() / 448 * (2 if kind == "gpt-oss" else 1.0001)
    config = config_of(tmp_path / "out")["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "tensor"


@pytest.mark.parametrize("kind", ["gpt-oss", "gpt-oss-mxfp4"])
@pytest.mark.parametrize("target", ["mxfp4", "fp8", "bf16"])
def test_experts_in_every_form(models: Models, tmp_path: Path, kind: str, target: str) -> None:
    source, output = models(kind), tmp_path / "out"
    calibrate(source, output, experts=target)
    after = tensors(output)
    assert config_of(output)["quantization_config"]["experts"] == target
    reference = whole_model(source).state_dict()
    prefix = "model.layers.1.mlp.experts"
    exact = reference[f"{prefix}.gate_up_proj"][2].t()
    if target == "fp8":
        own = f"{prefix}.2.w13"
        assert after[f"{own}_weight"].shape == (192, 64) and after[f"{own}_bias"].shape == (192,)
        got = dequantize(after[f"{own}_weight"], after[f"{own}_weight_scale"])
        # MXFP4 values fit into E4M3 with scales that are powers of two
        bound = 0.0 if kind == "gpt-oss-mxfp4" else 0.04
    elif target == "bf16":
        got, bound = after[f"{prefix}.gate_up_proj"][2].t(), 0.0
    else:
        name = f"{prefix}.gate_up_proj"
        got = unpack_mxfp4(after[f"{name}_blocks"][2], after[f"{name}_scales"][2])
        bound = 0.0 if kind == "gpt-oss-mxfp4" else 0.15
    assert relative_error(exact, got) <= bound


def test_the_output_names_no_code_that_it_lacks(models: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(models("llama"), source)
    code = {"AutoConfig": "custom.Config"}
    (source / "config.json").write_text(json.dumps({**config_of(source), "auto_map": code}))
    calibrate(source, tmp_path / "out")
    assert "auto_map" not in config_of(tmp_path / "out")
    audit(tmp_path / "out")


def test_every_chat_template_is_copied_and_replaced(models: Models, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    shutil.copytree(models("llama"), source)
    templates = {"default": "a {{ messages }}", "tool_use": "b {{ messages }}"}
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    calibrate(source, output)
    assert AutoTokenizer.from_pretrained(output).chat_template == templates
    Run(make_recipe({}), RunOptions(source, output, overwrite=True)).execute()
    (source / "additional_chat_templates" / "tool_use.jinja").unlink()
    (source / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja: is a link to .*outside"):
        calibrate(source, tmp_path / "no")


def test_lm_head_of_a_tied_model_gets_its_own_tensor(models: Models, tmp_path: Path) -> None:
    source, output = models("llama-tied"), tmp_path / "out"
    calibrate(source, output, lm_head="fp8")
    after = tensors(output)
    embedding = tensors(source)["model.embed_tokens.weight"]
    q, _ = quantize(embedding, "channel")
    assert torch.equal(after["lm_head.weight"].float(), q.float())
    assert torch.equal(after["model.embed_tokens.weight"], embedding)
    assert config_of(output)["tie_word_embeddings"] is False
    assert config_of(output)["quantization_config"]["ignore"] == []


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "gpt-oss"])
def test_compressed_tensors_config_is_what_that_package_reads(
    models: Models, tmp_path: Path, kind: str
) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    calibrate(models(kind), tmp_path / "out", format="compressed-tensors")
    written = config_of(tmp_path / "out")["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    group = config.config_groups["group_0"]
    assert (config.format, config.quantization_status) == ("float-quantized", "compressed")
    assert group.weights.strategy == "channel" and not group.weights.dynamic
    assert group.input_activations.strategy == "token" and group.input_activations.dynamic
    assert "lm_head" in config.ignore
    assert ("model.layers.0.mlp.experts" in config.ignore) is (kind == "gpt-oss")


def test_compressed_tensors_decompresses_to_our_values(models: Models, tmp_path: Path) -> None:
    calibrate(models("llama"), tmp_path / "out", format="compressed-tensors")
    decompress = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=decompress
    )
    after = tensors(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj"
    module = model.get_submodule(name)
    x = torch.randn(5, 64)
    exact = x @ dequantize(after[f"{name}.weight"], after[f"{name}.weight_scale"]).t()
    assert relative_error(exact, module(x)) < 0.05


def test_overrides_mix_schemes_in_one_checkpoint(models: Models, tmp_path: Path) -> None:
    overrides = [
        {"scheme": "W8A16", "targets": ["re:.*down_proj"]},
        {"scheme": "BF16", "targets": ["model.layers.0.mlp.down_proj"]},
    ]
    summary = calibrate(models("llama"), tmp_path / "out", overrides=overrides)
    config = config_of(tmp_path / "out")["quantization_config"]
    assert summary.quantised == 13
    assert config["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    second = config["config_groups"]["group_1"]
    assert second["targets"] == ["model.layers.1.mlp.down_proj"]
    assert second["input_activations"] is None
    kept = tensors(tmp_path / "out")["model.layers.0.mlp.down_proj.weight"]
    assert kept.dtype is torch.bfloat16
    last = [*reversed(overrides)]
    assert calibrate(models("llama"), tmp_path / "last", overrides=last).quantised == 14
    with pytest.raises(SchemeError, match="served as one"):
        split = [{"scheme": "BF16", "targets": ["re:.*v_proj"]}]
        calibrate(models("llama"), tmp_path / "no", overrides=split)
    with pytest.raises(SchemeError, match="overrides='nothing': matches no linear"):
        nothing = [{"scheme": "BF16", "targets": ["nothing"]}]
        calibrate(models("llama"), tmp_path / "no", overrides=nothing)


def test_feedback_lowers_the_output_error(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 64, "scheme": "W8A16"}
    errors = {
        rounding: calibrate(
            models("qwen3"), tmp_path / rounding, rounding=rounding, **settings
        ).errors
        for rounding in ("nearest", "feedback")
    }
    for name, metrics in errors["nearest"].items():
        if "output_error" in metrics:
            assert errors["feedback"][name]["output_error"] < 0.7 * metrics["output_error"]
    assert "| Rounding | error feedback |" in (tmp_path / "feedback" / "README.md").read_text()
    for name, tensor in tensors(tmp_path / "feedback").items():
        if name.endswith("_scale"):
            assert (tensor > 0).all() and tensor.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_a_layer_that_is_done_is_freed_at_once(
    models: Models, tmp_path: Path, text_file: Path, monkeypatch, kind: str
) -> None:
    seen: list[weakref.ref[Any]] = []
    drop = LayerRunner.drop

    def watched(self: LayerRunner, index: int) -> None:
        seen.extend(weakref.ref(module) for module in self.inner.layers[index].modules())
        drop(self, index)

    monkeypatch.setattr(LayerRunner, "drop", watched)
    settings = {"num_samples": 2, "max_seq_length": 16, "dataset": str(text_file)}
    experts = {"experts": "fp8"} if kind == "gpt-oss" else {}
    gc.disable()
    try:
        calibrate(models(kind), tmp_path / "out", **settings, **experts)
        assert seen and not [module for module in seen if module() is not None]
    finally:
        gc.enable()
