# SPDX-License-Identifier: MIT
"""The plain MXFP4 checkpoint: names and values as OpenAI's, loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.mxfp4 import unpack_mxfp4
from oss_fused.quant.pipeline import calibrate_both, is_finished, rehearse
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import Models, calibrate, config_of, digests, tensors, whole_model
from tests.quant.test_source import rewrite

DATA = {"num_samples": 2, "max_seq_length": 16}


def test_names_dtypes_and_config_are_those_of_openai(models: Models, tmp_path: Path) -> None:
    source = rewrite(
        models("gpt-oss"), tmp_path / "fp32", lambda s: {n: t.float() for n, t in s.items()}
    )
    calibrate(source, tmp_path / "out", format="mxfp4")
    after, before = tensors(tmp_path / "out"), tensors(source)
    experts = {name for name in before if name.endswith(("gate_up_proj", "down_proj"))}
    packed = {f"{name}_{part}" for name in experts for part in ("blocks", "scales")}
    assert set(after) == (set(before) - experts) | packed
    for name, tensor in after.items():
        assert tensor.dtype == (torch.uint8 if name in packed else torch.bfloat16)
    for name in set(before) - experts:
        assert torch.equal(after[name], before[name].bfloat16())
    config = config_of(tmp_path / "out")
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
    }
    assert config["dtype"] == "bfloat16"
    assert "\n# fp32, MXFP4\n" in (tmp_path / "out" / "README.md").read_text()


def test_transformers_loads_it_and_computes_the_same(models: Models, tmp_path: Path) -> None:
    """On a CPU transformers dequantises; the logits are those of our own values."""
    calibrate(models("gpt-oss"), tmp_path / "out", format="mxfp4")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).float()
    ids = torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        logits, expected = theirs(ids).logits, whole_model(tmp_path / "out")(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt-oss", "gpt-oss-mxfp4"])
def test_one_run_gives_both_with_the_same_experts(
    models: Models, tmp_path: Path, text_file: Path, kind: str
) -> None:
    recipe = make_recipe({"dataset": str(text_file), **DATA, "kv_cache": "fp8"})
    summaries = calibrate_both(recipe, RunOptions(models(kind), tmp_path / "out"))
    assert [s.output.name for s in summaries] == ["oss-fp8", "mxfp4"]
    fp8, plain = (tensors(tmp_path / "out" / name) for name in ("oss-fp8", "mxfp4"))
    names = {name for name in fp8 if name.endswith(("_blocks", "_scales"))}
    assert len(names) == 8 and all(torch.equal(fp8[name], plain[name]) for name in names)
    assert fp8["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(plain["lm_head.weight"], tensors(models(kind))["lm_head.weight"])
    assert not any(name.endswith("k_scale") for name in plain)


def test_the_second_of_a_pair_copies_the_experts_of_the_first(
    models: Models, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding takes hours, and gives the same: only what a run is made with tells."""
    made: list[tuple[object, ...]] = []
    make = Run.__init__

    def noted(run: Run, *arguments: object) -> None:
        made.append(arguments)
        make(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "__init__", noted)
    recipe = make_recipe({"dataset": str(text_file), **DATA})
    calibrate_both(recipe, RunOptions(models("gpt-oss"), tmp_path / "out"))
    base = made[-1][2]
    assert isinstance(base, CheckpointReader) and base.folder == tmp_path / "out" / "oss-fp8"


@pytest.mark.parametrize("target", [None, 9.0])
def test_an_interrupted_pair_goes_on_with_the_second(
    models: Models,
    tmp_path: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: float | None,
) -> None:
    recipe = make_recipe({"dataset": str(text_file), **DATA, "accuracy_target": target})
    options = RunOptions(models("gpt-oss"), tmp_path / "out")
    calibrate_both(recipe, RunOptions(models("gpt-oss"), tmp_path / "whole"))

    def killed(run: Run, *arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "oss_fused.quant.calibrator.Run._check_source",
            lambda run: run.recipe.format == "mxfp4" and killed(run),
        )
        with pytest.raises(KeyboardInterrupt):
            calibrate_both(recipe, options)
    assert sorted(p.name for p in (tmp_path / "out").iterdir())[0].startswith("mxfp4.partial-")
    resumed = RunOptions(models("gpt-oss"), tmp_path / "out", resume=True)
    assert [run.options.output.name for run in rehearse(recipe, resumed, both=True)] == ["mxfp4"]
    assert not is_finished(recipe, resumed, both=True)
    assert [s.output.name for s in calibrate_both(recipe, resumed)] == ["mxfp4"]
    assert is_finished(recipe, resumed, both=True)
    assert not is_finished(recipe.model_copy(update={"seed": 1}), resumed, both=True)
    for name in ("oss-fp8", "mxfp4"):
        assert digests(tmp_path / "out" / name) == digests(tmp_path / "whole" / name)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {}, "is written for gpt-oss only"),
        ("gpt-oss", {"experts": "fp8"}, "expects auto or mxfp4"),
        ("gpt-oss", {"lm_head": "fp8"}, "keeps it in bf16"),
    ],
)
def test_what_the_format_cannot_hold(
    models: Models, tmp_path: Path, kind: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SchemeError, match=message):
        calibrate(models(kind), tmp_path / "out", format="mxfp4", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache": "fp8"},
        {"accuracy_target": 1.5},
        {"scheme": "W8A16"},
        {"ignore": ("lm_head",)},
        {"targets": ("lm_head",)},
        {"overrides": ({"scheme": "W8A16", "targets": ("lm_head",)},)},
        {"smoothing": 0.5},
        {"group_candidates": (32,)},
    ],
)
def test_settings_of_linears_are_refused_where_none_is_quantised(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(SchemeError, match=rf"'mxfp4' has no place for {name}=.*no such setting"):
        make_recipe({"format": "mxfp4", "dataset": "python", **settings})
    make_recipe({"format": "mxfp4", "lm_head": "bf16"})


def test_a_pair_is_refused_before_work_starts(models: Models, tmp_path: Path) -> None:
    options = RunOptions(models("gpt-oss"), tmp_path / "out")
    with pytest.raises(SchemeError, match=r"expects auto or mxfp4"):
        calibrate_both(make_recipe({"experts": "bf16"}), options)
    assert not (tmp_path / "out").exists()
    calibrate(models("gpt-oss"), tmp_path / "made")
    with pytest.raises(CheckpointError, match=r"expected a folder to hold oss-fp8 and mxfp4"):
        calibrate_both(make_recipe({}), RunOptions(models("gpt-oss"), tmp_path / "made"))


@pytest.mark.parametrize("output_format", ["oss-fp8", "mxfp4"])
def test_the_rest_of_the_folder_is_copied_byte_for_byte(
    models: Models, tmp_path: Path, output_format: str
) -> None:
    """What a chat and its tool calls are rendered with."""
    source = rewrite(models("gpt-oss"), tmp_path / "source", lambda state: state)
    (source / "chat_template.jinja").write_text("{{ tools }}{% for m in messages %}{% endfor %}")
    (source / "generation_config.json").write_text('{"eos_token_id": [5, 7], "do_sample": true}')
    (source / "trainer_state.json").write_text("{}")
    calibrate(source, tmp_path / "out", format=output_format)
    copied = ["chat_template.jinja", "generation_config.json"]
    copied += ["tokenizer.json", "tokenizer_config.json"]
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "trainer_state.json").exists()


def test_blocks_hold_the_rounded_source(models: Models, tmp_path: Path) -> None:
    calibrate(models("gpt-oss"), tmp_path / "out", format="mxfp4")
    after, name = tensors(tmp_path / "out"), "model.layers.1.mlp.experts.down_proj"
    values = unpack_mxfp4(after[f"{name}_blocks"], after[f"{name}_scales"]).transpose(1, 2)
    source = load_file(models("gpt-oss") / "model.safetensors")[name]
    assert (values.float() - source.float()).norm() < 0.15 * source.float().norm()
