# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from oss_fused.errors import CheckpointError, DatasetError, SchemeError
from oss_fused.quant import policy
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint import CheckpointReader
from oss_fused.quant.formats import quantize
from oss_fused.quant.pipeline import StoredWeights, calibrate
from oss_fused.quant.policy import Harm, PolicySearch
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.scheme import FP8_DYNAMIC
from oss_fused.quant.skeleton import ModelSkeleton

Models = Callable[[str], Path]


def search_of(folder: Path) -> PolicySearch:
    reader = CheckpointReader(folder)
    linears = [name for name in ModelSkeleton(reader).linears if name != "lm_head"]
    quantised = {name: quantize(reader.read(f"{name}.weight"), "channel") for name in linears}
    torch.manual_seed(0)
    samples = [torch.randint(0, 256, (24,)) for _ in range(3)]
    schemes = dict.fromkeys(linears, FP8_DYNAMIC) | {"lm_head": None}
    return PolicySearch(reader, quantised, schemes, samples, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "gpt-oss-mxfp4"])
def test_measures_grow_with_what_is_quantised(models: Models, kind: str) -> None:
    search = search_of(models(kind))
    names = list(search.quantised)
    mixes = [dict.fromkeys(names, precision) for precision in ("bf16", "w8a16", "fp8")]
    exact, weights, both = search.measure(mixes)
    assert exact == pytest.approx(1.0, abs=1e-5)
    assert 1 < weights < 1.5 and 1 < both < 1.5
    if "oss" not in kind:  # a changed choice of experts outweighs the rounding
        assert weights < both
    alone = {**mixes[0], names[0]: "fp8"}
    assert 1 < search.measure([alone])[0] < max(weights, both)


def test_head_experts_and_cache_take_part(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 32, "num_samples": 4}
    recipe = make_recipe({**settings, "experts": "fp8", "kv_cache": "fp8", "lm_head": "fp8"})
    run = Run(recipe, RunOptions(models("gpt-oss"), tmp_path / "out"))
    run.execute()
    stored = CheckpointReader(tmp_path / "out", quantised=True)
    parts = (run.reader, StoredWeights(stored), run.plan.schemes, run.samples, run.device)
    alone, full = PolicySearch(*parts), PolicySearch(*parts, stored=stored)
    assert any(harm.names == ("lm_head",) and harm.inputs > 0 for harm in full.rank())
    exact = dict.fromkeys(alone.quantised, "bf16")
    head = {**exact, "lm_head": "fp8"}
    without, with_head = alone.measure([exact, head])
    with_rest, with_all = full.measure([exact, head])
    assert without == pytest.approx(1, abs=1e-5) and with_head > 1.00001
    assert with_rest > 1.00001 and with_all > with_rest


def test_harms_add_up_to_what_all_of_them_measure(models: Models) -> None:
    search = search_of(models("llama"))
    total = sum(harm.inputs + harm.weights for harm in search.rank())
    (factor,) = search.measure([dict.fromkeys(search.quantised, "fp8")])
    assert 0.4 < total / math.log(factor) < 2.5  # second order, and one draw of labels


def test_every_group_is_ranked_once_with_positive_harm(models: Models) -> None:
    search = search_of(models("llama"))
    harms = search.rank()
    assert sorted(name for harm in harms for name in harm.names) == sorted(search.quantised)
    assert all(harm.inputs > 0 and harm.weights > 0 for harm in harms)
    assert len(harms) == 8  # qkv, o, gate and up, down in each of two layers
    assert sum(harm.size for harm in harms) == search.total


def test_budgets_are_kept_and_bf16_is_taken_from_16_bit_inputs(models: Models) -> None:
    outcomes = search_of(models("llama")).outcomes()
    assert outcomes[0].overrides == () and outcomes[0].inputs_share == 0
    for outcome, (inputs, weights) in zip(outcomes, policy.LEVELS):
        assert outcome.inputs_share <= inputs and outcome.weights_share <= weights
        targets = [target for override in outcome.overrides for target in override.targets]
        assert len(targets) == len(set(targets))
    assert outcomes[5].inputs_share > 0.15
    assert outcomes[5].factor < outcomes[0].factor


def test_ranking_prefers_harm_per_cost(models: Models) -> None:
    search = search_of(models("llama"))
    size = search.total // 5
    harms = [
        Harm(("a",), size, 1.0, 1.0),
        Harm(("b",), size // 4, 0.5, 0.1),
        Harm(("c",), size, 0.9, 0.2),
    ]
    mix = search._mix(harms, 0.26, 0.06)
    assert (mix["a"], mix["b"]) == ("w8a16", "bf16") and "c" not in mix


def test_sensitive_types_stay_in_bf16_in_every_mix(models: Models) -> None:
    qkv = tuple(f"layers.0.{name}_proj" for name in "qkv")
    harms = [
        Harm(qkv, 10, 3.0, 0.0),
        *(Harm((f"layers.{i}.down_proj",), 10, float(i), 0.1) for i in range(3)),
        Harm(("lm_head",), 1000, 50.0, 0.0),
    ]
    # per weight: qkv 0.3, down_proj 0.01, 0.11 and 0.21, lm_head 0.05
    rule = {"re:.*q_proj": 0.99, "re:.*k_proj": 0.99, "lm_head": 0.99}
    assert policy.too_sensitive(harms, rule) == [harms[0]], "one matrix has one format"
    assert policy.too_sensitive(harms, rule | {"lm_head": 0.2}) == [harms[0], harms[-1]]
    assert policy.too_sensitive(harms, {"lm_head": 0.25, "re:.*q_proj": 0.99}) == [harms[0]]
    assert policy.too_sensitive(harms, {"re:.*down_proj": 0.7}) == [harms[3]]
    assert policy.too_sensitive(harms, {"re:.*down_proj": 0.75}) == []
    assert policy.too_sensitive([], rule) == []

    search = search_of(models("llama"))
    search.keep_sensitive = {"re:.*q_proj": 0.0}
    harms = search.rank()
    least = min(harms, key=lambda harm: harm.per_weight)
    for level in policy.LEVELS:
        mix = search._mix(harms, *level)
        for harm in harms:
            if "q_proj" in str(harm.names) and harm is not least:
                assert {mix[name] for name in harm.names} == {"bf16"}
    assert set(search._mix(harms, 0.0, 0.0).values()) == {"bf16", "fp8"}


def settings_of(text_file: Path, target: float) -> dict:
    return {
        "dataset": str(text_file),
        "max_seq_length": 32,
        "num_samples": 12,
        "accuracy_target": target,
    }


def test_a_target_is_met_and_the_mix_is_in_the_recipe(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    said: list[str] = []
    options = RunOptions(models("llama"), tmp_path / "out")
    easy = calibrate(make_recipe(settings_of(text_file, 2.0)), options, say=said.append)
    assert easy.quantised == 14 and "0% of the linears" in said[1]
    assert any("output_error" in metrics for metrics in easy.errors.values())
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe["overrides"] == [] and recipe["accuracy_target"] is None
    start = float(said[1].rsplit(" ", 1)[1])
    options = RunOptions(models("llama"), tmp_path / "better")
    target = 1 + (start - 1) * 0.93
    calibrate(make_recipe(settings_of(text_file, target)), options, say=said.append)
    assert float(said[3].rsplit(" ", 1)[1]) <= target
    recipe = yaml.safe_load((tmp_path / "better" / "recipe.yaml").read_text())
    assert recipe["overrides"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["better", "out"]
    assert "keep_sensitive" not in recipe
    kept = make_recipe(settings_of(text_file, 2.0) | {"keep_sensitive": {"Linear": 0.99}})
    calibrate(kept, RunOptions(models("llama"), tmp_path / "kept"))
    (override,) = yaml.safe_load((tmp_path / "kept" / "recipe.yaml").read_text())["overrides"]
    assert override["scheme"] == "BF16", "the most sensitive matrix alone"
    shutil.rmtree(tmp_path / "kept")
    # the written recipe needs no search
    settings = {**recipe, "dataset": str(text_file)}
    again = RunOptions(models("llama"), tmp_path / "again")
    calibrate(make_recipe(settings), again)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("better", "again")]
    assert configs[0] == configs[1]


def test_an_interrupted_search_resumes_to_the_same_result(
    models: Models, tmp_path: Path, text_file: Path, monkeypatch
) -> None:
    recipe = make_recipe(settings_of(text_file, 1.5))
    whole = RunOptions(models("qwen3"), tmp_path / "a" / "out")
    calibrate(recipe, whole)
    cut = RunOptions(models("qwen3"), tmp_path / "b" / "out", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(PolicySearch, "rank", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            calibrate(recipe, cut)
    calibrate(recipe, cut)
    for path in (tmp_path / "a" / "out").iterdir():
        assert path.read_bytes() == (cut.output / path.name).read_bytes()
    assert list(cut.output.parent.iterdir()) == [cut.output]


def test_a_kept_stage_serves_other_targets_and_no_other_recipe(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    stage = tmp_path / "stage"
    easy = RunOptions(models("llama"), tmp_path / "easy", stage=stage)
    calibrate(make_recipe(settings_of(text_file, 1.5)), easy)
    written = (stage / "model.safetensors").stat().st_mtime_ns
    other = RunOptions(models("llama"), tmp_path / "other", stage=stage)
    calibrate(make_recipe(settings_of(text_file, 1.6)), other)
    assert (stage / "model.safetensors").stat().st_mtime_ns == written
    configs = [(tmp_path / name / "config.json").read_text() for name in ("easy", "other")]
    assert configs[0] == configs[1]
    third = RunOptions(models("llama"), tmp_path / "third", stage=stage)
    settings = {**settings_of(text_file, 1.5), "seed": 5}
    with pytest.raises(CheckpointError, match="--fp8-stage=.*another recipe"):
        calibrate(make_recipe(settings), third)
    assert stage.is_dir() and not (tmp_path / "third").exists()


def test_a_target_out_of_reach_says_how_near_and_keeps_the_stage(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    options = RunOptions(models("llama"), tmp_path / "out")
    said: list[str] = []
    with pytest.raises(SchemeError, match=r"--accuracy-target=1\.0000001: not met; the best mix"):
        calibrate(make_recipe(settings_of(text_file, 1.0000001)), options, say=said.append)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.all-fp8-") and f"--fp8-stage {left}" in said[-1]
    written = (left / "model.safetensors").stat().st_mtime_ns
    again = RunOptions(models("llama"), tmp_path / "out", stage=left)
    calibrate(make_recipe(settings_of(text_file, 2.0)), again)
    assert (left / "model.safetensors").stat().st_mtime_ns == written


def test_the_best_mix_is_written_where_that_is_asked_for(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    recipe = make_recipe(settings_of(text_file, 1.0000001))
    calibrate(recipe, RunOptions(models("llama"), tmp_path / "out"), best_effort=True)
    mixes = load_record(tmp_path / "out").mixes
    assert [mix.chosen for mix in mixes] == [
        mix.factor == min(other.factor for other in mixes) for mix in mixes
    ]


def test_too_small_a_dataset_is_refused(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {**settings_of(text_file, 1.1), "max_seq_length": 128}
    with pytest.raises(DatasetError, match="holds 8 out of calibration and needs more"):
        calibrate(make_recipe(settings), RunOptions(models("llama"), tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accuracy_target": 1.01}, "needs a dataset"),
        ({"keep_sensitive": {"lm_head": 0.99}}, "lm_head.*: needs accuracy_target"),
        (
            {"accuracy_target": 1.1, "dataset": "x", "keep_sensitive": {"lm_head": 99}},
            "keep_sensitive.lm_head=99: .*less than 1",
        ),
        ({"accuracy_target": 0.9, "dataset": "x"}, "accuracy_target=0.9"),
        ({"accuracy_target": 1.1, "dataset": "x", "scheme": "FP8_STATIC"}, "dynamic input scales"),
    ],
)
def test_contradictory_settings_are_refused(settings, message) -> None:
    with pytest.raises(SchemeError, match=message):
        make_recipe(settings)
