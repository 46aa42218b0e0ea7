# SPDX-License-Identifier: MIT
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from oss_fused.errors import (
    CheckpointError,
    DatasetError,
    NumericalOverflowError,
    SchemeError,
    UnsupportedModelError,
)
from oss_fused.quant.calibrator import Run, RunOptions, Summary
from oss_fused.quant.formats import amax_to_scale, dequantize, quantize, relative_error
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record

KINDS = ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "gpt-oss", "gpt-oss-mxfp4"]
Models = Callable[[str], Path]


def calibrate(
    model: Path, output: Path, progress=lambda items, _: items, *, resume=False, **settings
) -> Summary:
    options = RunOptions(model, output, resume=resume, max_shard_bytes=60_000)
    return Run(make_recipe(settings), options).execute(progress)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


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
    assert config["experts"] == {"gpt-oss": "bf16", "gpt-oss-mxfp4": "mxfp4"}.get(kind)
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
        source, tmp_path / "out", scheme="FP8_STATIC", targets=[last],
        dataset=str(text_file), num_samples=3, max_seq_length=32,
    )  # fmt: skip
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


def whole_model(source: Path) -> torch.nn.Module:
    if not config_of(source).get("quantization_config"):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float()
    state = tensors(source)
    for name in [n for n in state if n.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        state[plain] = unpack_mxfp4(state.pop(name), state.pop(f"{plain}_scales")).transpose(1, 2)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


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


class Stop(Exception):
    pass


def stop_after(count: int) -> Callable[[Iterable], Iterator]:
    def progress(steps: Iterable, _: str) -> Iterator:
        for number, step in enumerate(steps):
            if number == count:
                raise Stop
            yield step

    return progress


SETTINGS = {"scheme": "FP8_STATIC", "kv_cache": "fp8", "num_samples": 2, "max_seq_length": 16}


@pytest.mark.parametrize("count", [0, 3, 14, 15, 27, 30])
def test_an_interrupted_run_resumes_to_the_identical_result(
    models: Models, tmp_path: Path, text_file: Path, count: int
) -> None:
    source, settings = models("gpt-oss"), {**SETTINGS, "dataset": str(text_file)}
    whole, cut = tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(count), **settings)
    assert not cut.exists() and len(list(cut.parent.iterdir())) == 1
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)
    assert list(cut.parent.iterdir()) == [cut]


def test_ten_kills_at_random_moments_change_nothing(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    source, settings = models("qwen3"), {**SETTINGS, "dataset": str(text_file)}
    # one process imports and forks: it computes nothing itself, so its children may
    code = f"""
import os, random, signal, sys, time
from pathlib import Path
from oss_fused.quant import runner
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from transformers import AutoModelForCausalLM, AutoTokenizer
def calibrate():
    options = RunOptions(
        Path({str(source)!r}), Path({str(tmp_path / "out")!r}), resume=True, max_shard_bytes=60000
    )
    Run(make_recipe({settings!r}), options).execute()
random.seed(0)
killed = 0
while killed < 10:
    child = os.fork()
    if child == 0:
        calibrate()
        os._exit(0)
    deadline = time.monotonic() + random.uniform(0.02, 0.4)
    while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.002)
    if Path({str(tmp_path / "out")!r}).exists():
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed += 1
print("killed", killed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) >= 3, done.stderr
    if not (tmp_path / "out").exists():
        calibrate(source, tmp_path / "out", resume=True, **settings)
    calibrate(source, tmp_path / "whole" / "out", **settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole" / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_an_existing_output_is_kept_unless_overwritten(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "note").write_text("mine")
    with pytest.raises(CheckpointError, match=r"--output=.*exists.*--overwrite"):
        calibrate(models("llama"), output)
    assert (output / "note").exists()
    options = RunOptions(models("llama"), output, overwrite=True)
    Run(make_recipe({}), options).execute()
    assert not (output / "note").exists() and (output / "model.safetensors").exists()
    assert list(tmp_path.iterdir()) == [output]
    with pytest.raises(CheckpointError, match="is the source"):
        Run(make_recipe({}), RunOptions(output, output, overwrite=True))


def changed(models: Models, tmp_path: Path, kind: str, **changes) -> Path:
    """A copy of a model with some tensors replaced or, if None, dropped."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in models(kind).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        full = name.replace("__", ".")
        state.pop(full)
        if value is not None:
            state[full] = value
    save_file(state, folder / "model.safetensors")
    return folder


def test_nan_weights_are_refused_by_name_and_leave_no_output(
    models: Models, tmp_path: Path
) -> None:
    bad = torch.full((96, 64), float("nan"), dtype=torch.bfloat16)
    name = "model__layers__1__mlp__up_proj__weight"
    source = changed(models, tmp_path, "llama", **{name: bad})
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*up_proj\.weight' holds NaN"):
        calibrate(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_missing_and_misshapen_tensors_are_refused(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama", model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is missing"):
        calibrate(source, tmp_path / "out")
    save_file({**tensors(source), "model.norm.weight": torch.ones(3)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \(3,\)"):
        calibrate(source, tmp_path / "out")


def test_a_zero_row_is_quantised_with_scale_one(models: Models, tmp_path: Path) -> None:
    weight = torch.randn(96, 64).to(torch.bfloat16)
    weight[5] = 0
    name = "model__layers__0__mlp__up_proj__weight"
    calibrate(changed(models, tmp_path, "llama", **{name: weight}), tmp_path / "out")
    scale = tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale[5] == 1 and not (scale[:5] == 1).any()


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_STATIC"])
def test_zero_and_constant_activations_are_calibrated(
    models: Models, tmp_path: Path, text_file: Path, value: float, scheme: str
) -> None:
    embedding = torch.full((320, 64), value, dtype=torch.bfloat16)
    source = changed(models, tmp_path, "llama", model__embed_tokens__weight=embedding)
    settings = {**SETTINGS, "scheme": scheme, "dataset": str(text_file)}
    calibrate(source, tmp_path / "out", **settings)
    for name, tensor in tensors(tmp_path / "out").items():
        assert tensor.float().isfinite().all(), name
    layer = load_record(tmp_path / "out").layers[0]
    assert layer.cumulative_error is not None and layer.cumulative_error < 0.1


def test_overflowing_activations_are_refused_by_name(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    norm = torch.full((64,), 3e38, dtype=torch.bfloat16)
    source = changed(models, tmp_path, "llama", model__layers__1__input_layernorm__weight=norm)
    with pytest.raises(NumericalOverflowError, match=r"model\.layers\.1\..*: NaN or Inf"):
        calibrate(source, tmp_path / "out", **{**SETTINGS, "dataset": str(text_file)})
    assert list(tmp_path.iterdir()) == [source]


def test_experts_never_routed_to_are_named_and_rounded_plainly(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    bias = torch.tensor([50.0, 50.0, 0.0, 0.0]).to(torch.bfloat16)
    source = changed(models, tmp_path, "gpt-oss", model__layers__1__mlp__router__bias=bias)
    settings = {"num_samples": 12, "max_seq_length": 16, "dataset": str(text_file)}
    summary = calibrate(source, tmp_path / "out", experts="fp8", **settings)
    module = "model.layers.1.mlp.experts"
    assert summary.unrouted[-2:] == (f"{module}.2", f"{module}.3")
    before, after = tensors(source), tensors(tmp_path / "out")
    for expert, plain in ((0, False), (3, True)):
        codes, scale = quantize(before[f"{module}.gate_up_proj"][expert].t().contiguous())
        written = (
            after[f"{module}.{expert}.w13_weight"],
            after[f"{module}.{expert}.w13_weight_scale"],
        )
        assert torch.equal(dequantize(*written), dequantize(codes, scale)) is plain


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "bert"}, UnsupportedModelError, "model_type='bert'"),
        ({"quantization_config": {"quant_method": "x"}}, CheckpointError, "quantised already"),
        ({"num_hidden_layers": 3}, CheckpointError, r"layers\.2\..* is missing"),
    ],
)
def test_unsupported_models_are_refused(
    models: Models, tmp_path: Path, change, error, message
) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "config.json").write_text(json.dumps({**config_of(source), **change}))
    with pytest.raises(error, match=message):
        calibrate(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"experts": "fp8"}, "model_type='llama' has no experts"),
        ("llama", {"targets": ["re:.*q_proj"]}, "served as one"),
        ("llama", {"ignore": ["re:.*router"]}, "matches no linear"),
        ("llama", {"ignore": ["Linear"]}, "no linear layer is left"),
        ("gpt-oss-mxfp4", {"format": "compressed-tensors"}, "--experts bf16"),
        ("gpt-oss", {"format": "compressed-tensors", "lm_head": "fp8"}, "--lm-head bf16"),
    ],
)
def test_contradictions_are_refused(
    models: Models, tmp_path: Path, kind, settings, message
) -> None:
    with pytest.raises(SchemeError, match=message):
        calibrate(models(kind), tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_too_long_samples_are_refused(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {**SETTINGS, "dataset": str(text_file), "max_seq_length": 129}
    with pytest.raises(DatasetError, match="max-seq-length=129: the model's context is 128"):
        calibrate(models("llama"), tmp_path / "out", **settings)


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
    with pytest.raises(SchemeError, match="served as one"):
        split = [{"scheme": "BF16", "targets": ["re:.*v_proj"]}]
        calibrate(models("llama"), tmp_path / "no", overrides=split)


def test_feedback_lowers_the_output_error(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 64, "scheme": "W8A16"}
    errors = {
        rounding: calibrate(
            models("qwen3"), tmp_path / rounding, rounding=rounding, **settings
        ).errors
        for rounding in ("nearest", "feedback")
    }
    for name, facts in errors["nearest"].items():
        if "output_error" in facts:
            assert errors["feedback"][name]["output_error"] < 0.7 * facts["output_error"]
    assert "| Rounding | error feedback |" in (tmp_path / "feedback" / "README.md").read_text()
    for name, tensor in tensors(tmp_path / "feedback").items():
        if name.endswith("_scale"):
            assert (tensor > 0).all() and tensor.isfinite().all()
