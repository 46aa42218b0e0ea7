# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
from pydantic import ValidationError

from oss_fused.errors import SchemeError
from oss_fused.quant import scheme as s
from oss_fused.quant.recipe import load_recipe, make_recipe

MODULES = {
    "model.layers.0.self_attn.q_proj": "Linear",
    "model.layers.0.self_attn.k_proj": "Linear",
    "model.layers.0.self_attn.v_proj": "Linear",
    "model.layers.0.mlp.down_proj": "Linear",
    "lm_head": "Linear",
}


def test_presets_by_any_spelling() -> None:
    assert s.preset("fp8-dynamic") is s.FP8_DYNAMIC
    assert s.preset("FP8_STATIC").needs_data and not s.preset("W8A16").needs_data
    with pytest.raises(SchemeError, match="scheme='FP9'.*FP8_DYNAMIC.*W8A16"):
        s.preset("FP9")


@pytest.mark.parametrize("name", ["fp8-block", "FP8_GROUP", "fp8_tensor"])
def test_strategies_no_kernel_serves_are_refused_by_name(name: str) -> None:
    with pytest.raises(SchemeError, match=f"scheme='{name}': .*a scale per output row"):
        s.preset(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "token"}, "dynamic=False"),
        ({"strategy": "channel", "dynamic": True}, "dynamic=True"),
        ({"strategy": "channel", "bits": 4}, "Extra inputs"),
    ],
)
def test_arguments_must_agree(settings, message) -> None:
    with pytest.raises(ValidationError, match=message):
        s.QuantizationArgs(**settings)


def test_schemes_are_frozen_and_checked() -> None:
    with pytest.raises(ValidationError, match="weights.strategy='tensor'"):
        s.QuantizationScheme(weights=s.INPUT_TENSOR)
    with pytest.raises(ValidationError, match="input_activations.strategy='channel'"):
        s.QuantizationScheme(input_activations=s.WEIGHT_CHANNEL)
    with pytest.raises(ValidationError, match="frozen"):
        s.FP8_DYNAMIC.weights = s.INPUT_TENSOR


def test_select_by_class_name_and_regex() -> None:
    chosen, left = s.select(["Linear"], ["lm_head", r"re:.*\.mlp\..*"], MODULES)
    assert [name[-6:] for name in chosen] == ["q_proj", "k_proj", "v_proj"]
    assert left == ["model.layers.0.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("targets", "ignore", "message"),
    [
        (["Linear"], ["re:.*router"], "ignore='re:.*router': matches no linear"),
        (["q_proj"], [], "targets='q_proj': matches no linear"),
        (["re:("], [], "not a regular expression"),
    ],
)
def test_select_names_a_pattern_that_matches_nothing(targets, ignore, message) -> None:
    with pytest.raises(SchemeError) as error:
        s.select(targets, ignore, MODULES)
    assert message in str(error.value)


def test_fused_linears_must_share_a_scheme() -> None:
    schemes = dict.fromkeys(MODULES, s.FP8_DYNAMIC)
    s.check_siblings(schemes)
    with pytest.raises(SchemeError, match=r"q_proj.*v_proj.*served as one"):
        s.check_siblings(schemes | {"model.layers.0.self_attn.v_proj": None})


def test_config_groups_put_the_commonest_scheme_on_the_class() -> None:
    schemes = dict.fromkeys(MODULES, s.FP8_DYNAMIC)
    groups = s.config_groups(schemes | {"lm_head": None, "model.layers.0.mlp.down_proj": s.W8A16})
    assert groups["group_0"]["targets"] == ["Linear"]
    assert groups["group_1"]["targets"] == ["model.layers.0.mlp.down_proj"]
    assert groups["group_1"]["input_activations"] is None
    assert groups["group_0"]["input_activations"]["strategy"] == "token"


def test_recipe_round_trip(tmp_path) -> None:
    recipe = make_recipe({"scheme": "W8A16", "ignore": ["re:.*down_proj"], "seed": 3})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert make_recipe(load_recipe(path)) == recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "FP9"}, "FP8_DYNAMIC"),
        ({"scheme": "FP8_STATIC"}, "needs a dataset"),
        ({"kv_cache": "fp8"}, "needs a dataset"),
        ({"overrides": [{"scheme": "FP7", "targets": ["Linear"]}]}, "FP8_DYNAMIC"),
        ({"overrides": [{"scheme": "FP8_STATIC", "targets": ["Linear"]}]}, "needs a dataset"),
        ({"rounding": "feedback"}, "needs a dataset"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"colour": "red"}, "colour='red'"),
        ({"experts": "int4"}, "experts='int4'"),
    ],
)
def test_bad_recipe_names_the_setting(settings, message) -> None:
    with pytest.raises(SchemeError, match=message):
        make_recipe(settings)


def test_unreadable_recipe_is_named(tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(SchemeError, match=r"recipe\.yaml"):
        load_recipe(path)
    path.write_text("- a list")
    with pytest.raises(SchemeError, match="expected a mapping"):
        load_recipe(path)
    path.write_text("a: [")
    with pytest.raises(SchemeError, match="cannot be read"):
        load_recipe(path)
