# SPDX-License-Identifier: MIT
"""Random draft heads: the tensors and configuration of published ones; vLLM loads them:
tests/plugin/test_drafts.py, test_drafts_gpu.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from harness.draft_factory import make_draft, seen_layers
from harness.model_factory import get_shape
from safetensors.torch import load_file

from oss_fused.errors import CheckpointError, UnsupportedModelError

TINY = get_shape("gpt-oss", "tiny")


def made(folder, layout):
    size = make_draft(folder, TINY, layout)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    return tensors, json.loads((folder / "config.json").read_text())


def test_specforge_layout(tmp_path):
    tensors, config = made(tmp_path / "draft", "specforge")
    hidden, inner = TINY.hidden, 6 * TINY.hidden
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "midlayer.self_attn.q_proj.weight": [256, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": [128, 2 * hidden],
        "midlayer.self_attn.v_proj.weight": [128, 2 * hidden],
        "midlayer.self_attn.o_proj.weight": [hidden, 256],
        "midlayer.mlp.gate_proj.weight": [inner, hidden],
        "midlayer.mlp.up_proj.weight": [inner, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, inner],
        "midlayer.input_layernorm.weight": [hidden],
        "midlayer.hidden_norm.weight": [hidden],
        "midlayer.post_attention_layernorm.weight": [hidden],
        "fc.weight": [hidden, 3 * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [512, hidden],
        "d2t": [512],
        "t2d": [1024],
    }
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 512 and config["vocab_size"] == 1024
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_speculators_layout(tmp_path):
    tensors, config = made(tmp_path / "draft", "speculators")
    # as many as the published head has
    assert len(tensors) == 17 and "layers.0.hidden_norm.weight" in tensors
    assert list(tensors["embed_tokens.weight"].shape) == [1024, TINY.hidden]
    assert list(tensors["input_norm.weight"].shape) == [3 * TINY.hidden]
    assert config["norm_before_fc"] and config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("arch", "name"), [("gpt-oss", "GptOssForCausalLM"), ("llama", "LlamaForCausalLM")]
)
def test_a_head_names_its_verifier(arch, name, tmp_path):
    make_draft(tmp_path / "draft", get_shape(arch, "tiny"), "speculators")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == [name]


def test_peagle_layout(tmp_path):
    tensors, config = made(tmp_path / "draft", "peagle")
    assert len(tensors) == 17 and list(tensors["mask_hidden"].shape) == [1, 3 * TINY.hidden]
    assert config["mask_token_id"] == 1023 and config["speculators_model_type"] == "peagle"
    assert config["speculators_config"]["algorithm"] == "peagle"
    # vLLM would give it a vector, which its kernel refuses
    assert not config["norm_before_fc"] and "input_norm.weight" not in tensors


def test_dflash_layout(tmp_path):
    tensors, config = made(tmp_path / "draft", "dflash")
    # its queries read the hidden state alone, and head and embedding are the target's
    assert list(tensors["layers.0.self_attn.q_proj.weight"].shape) == [256, TINY.hidden]
    assert list(tensors["layers.0.self_attn.k_norm.weight"].shape) == [TINY.head_dim]
    assert len(tensors) == 11 + 3 and "lm_head.weight" not in tensors
    assert config["architectures"] == ["DFlashDraftModel"] and config["num_hidden_layers"] == 1
    # the states behind these layers: one less than those that EAGLE-3 names
    assert config["dflash_config"] == {"mask_token_id": 1023, "target_layer_ids": [-1, 0, 1]}


@pytest.mark.parametrize("layout", ["specforge", "speculators", "peagle"])
def test_a_draft_names_tokens_of_the_target(layout, tmp_path):
    tensors, _ = made(tmp_path / "draft", layout)
    ids = torch.arange(512) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_which_states_a_head_reads():
    assert seen_layers(get_shape("gpt-oss", "20b").layers) == (2, 12, 21)
    assert seen_layers(3) == (0, 1, 3)


def test_the_seed_decides(tmp_path):
    first, _ = made(tmp_path / "a", "specforge")
    again, _ = made(tmp_path / "b", "specforge")
    assert all(torch.equal(first[name], again[name]) for name in first)
    make_draft(tmp_path / "c", TINY, seed=1)
    other = load_file(next((tmp_path / "c").glob("*.safetensors")))
    assert not torch.equal(other["fc.weight"], first["fc.weight"])


def test_bad_arguments(tmp_path):
    with pytest.raises(UnsupportedModelError, match="'eagle': expected one of specforge"):
        make_draft(tmp_path / "a", TINY, "eagle")
    make_draft(tmp_path / "b", replace(TINY, vocab=256))
    with pytest.raises(CheckpointError, match="exists already"):
        make_draft(tmp_path / "b", TINY)
