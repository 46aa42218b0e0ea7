# SPDX-License-Identifier: MIT
"""Which layers a pattern means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oss_fused.errors import SchemeError
from oss_fused.quant.patterns import find_target, is_ignored, matches, shards, spellings

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
QKV = "model.layers.3.self_attn.qkv_proj"


def test_gpt_oss_attention_has_two_spellings():
    assert spellings("model.layers.3.attn.o_proj") == [
        "model.layers.3.attn.o_proj",
        "model.layers.3.self_attn.o_proj",
    ]
    assert spellings("model.layers.3.attn.attn")[1] == "model.layers.3.self_attn.attn"
    assert spellings(QKV) == [QKV]


DRAFT = "draft_model.model.layers.0"


def test_a_draft_models_names_are_those_of_its_checkpoint():
    assert spellings(f"{DRAFT}.attn.o_proj")[-1] == "model.layers.0.self_attn.o_proj"
    assert shards(f"{DRAFT}.self_attn.qkv_proj", PACKED) == [
        f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
    ]
    ignore = ["lm_head", "model.layers.0.mlp.down_proj", "re:model\\.layers\\.0\\.self_attn"]
    for name in ("draft_model.lm_head", f"{DRAFT}.mlp.down_proj", f"{DRAFT}.self_attn.qkv_proj"):
        assert is_ignored(name, ignore, PACKED)
        assert is_ignored(name, [f"{name}*"], PACKED)
    assert not is_ignored(f"{DRAFT}.mlp.gate_up_proj", ignore, PACKED)
    groups = {"a": ["Linear"], "b": ["model.layers.0.mlp.down_proj"]}
    assert find_target(f"{DRAFT}.mlp.down_proj", groups, PACKED) == "b"


def test_shards_carry_the_names_of_the_checkpoint():
    assert shards("model.layers.0.attn.qkv_proj", PACKED) == [
        f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
    ]
    assert shards("lm_head", PACKED) == ["lm_head"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("model.layers.*.self_attn*", "model.layers.1.attn.o_proj", True),
        ("model.layers.*.self_attn", "model.layers.1.attn.o_proj", False),
        ("re:.*layers\\.1\\.", "model.layers.1.mlp.up_proj", True),
        ("re:.*layers\\.1\\.", "model.layers.11.mlp.up_proj", False),
        ("*.o_proj", "model.layers.1.self_attn.o_proj", True),
    ],
)
def test_matches(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_bad_regular_expression():
    with pytest.raises(SchemeError, match=r"re:\(.*not a regular expression"):
        matches("re:(", "lm_head")


@pytest.mark.parametrize(
    "ignore",
    [[QKV], ["*qkv_proj"], ["re:.*self_attn.*"], [f"*.layers.3.self_attn.{p}_proj" for p in "qkv"]],
)
def test_fused_layer_is_ignored_as_a_whole(ignore):
    assert is_ignored(QKV, ignore, PACKED)
    assert not is_ignored("model.layers.3.mlp.down_proj", ignore, PACKED)


def test_partial_ignore_of_a_fused_layer_is_refused():
    with pytest.raises(SchemeError, match="leaves model.layers.3.self_attn.k_proj but not"):
        is_ignored(QKV, ["*.k_proj"], PACKED)


def test_targets_by_name_win_over_the_class_name():
    groups = {"a": ["Linear"], "b": [f"model.layers.3.self_attn.{p}_proj" for p in "qkv"]}
    assert find_target(QKV, groups, PACKED) == "b"
    assert find_target("model.layers.3.mlp.gate_up_proj", groups, PACKED) == "a"
    assert find_target("lm_head", {"a": ["re:.*mlp"]}, PACKED) is None


def test_fused_layer_with_two_schemes_is_refused():
    groups = {"a": ["Linear"], "b": ["model.layers.3.self_attn.q_proj"]}
    with pytest.raises(SchemeError, match="different schemes"):
        find_target(QKV, groups, PACKED)


@pytest.fixture
def config(monkeypatch):
    """The configuration of a bf16 model whose user ignores some layers."""
    from oss_fused.plugin import config
    from oss_fused.quant import settings

    def make(*ignore):
        made = config.OssFp8Config(settings.online(settings.OnlineOptions(ignore=ignore)))
        made._options_read, made._unmatched_ignore = True, set(ignore)
        return made

    return make


def test_a_pattern_may_mean_a_layer_of_another_rank(config, monkeypatch):
    from oss_fused.layers.vllm import reload

    # two ranks with a layer each, run one after the other
    ranks = [config("model.layers.0.*", "model.layers.1.*", "model.layers.9.*") for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.scheme_of(f"model.layers.{number}.mlp.down_proj")
    group = SimpleNamespace(world_size=2, cpu_group="cpu")
    monkeypatch.setattr(reload.parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(reload.parallel_state, "get_pp_group", lambda: group)
    monkeypatch.setattr(
        reload.parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    flags = []

    def all_reduce(found, op, group):
        flags.append(found.clone())
        found.copy_(torch.tensor([1, 1, 0]))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for rank in ranks:
        with pytest.raises(SchemeError, match=r"ignore=\['model.layers.9.\*'\]: matches no"):
            rank.check_ignore()
    assert [f.tolist() for f in flags] == [[1, 0, 0], [0, 1, 0]]


def test_a_head_that_stays_as_it_is_may_be_ignored(config, monkeypatch):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    made = config("lm_head", "model.layers.9.*")
    monkeypatch.setattr(made, "_wants_head", lambda layer: False)
    made.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head")
    with pytest.raises(SchemeError, match=r"ignore=\['model.layers.9.\*'\]: matches no"):
        made.check_ignore()


@pytest.mark.parametrize(
    ("pattern", "quantised"),
    [
        ("model.layers.0.*", False),
        ("model.layers.0.mlp.experts", False),
        ("re:.*routed_experts", False),
        ("model.layers.9.*", True),
    ],
)
def test_experts_may_be_ignored(pattern, quantised, monkeypatch):
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from oss_fused.plugin import config
    from oss_fused.quant import settings

    options = settings.OnlineOptions(experts="fp8", ignore=[pattern])
    made = config.OssFp8Config(settings.online(options))
    made._options_read, made._unmatched_ignore = True, {pattern}
    monkeypatch.setattr(config, "experts_method", lambda layer, chosen, prefix: chosen)
    layer = RoutedExperts.__new__(RoutedExperts)
    chosen = made.get_quant_method(layer, "model.layers.0.mlp.experts.routed_experts")
    assert chosen.quantize_experts == quantised
    assert made._unmatched_ignore == ({pattern} if quantised else set())
