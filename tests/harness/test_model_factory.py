# SPDX-License-Identifier: MIT
"""Random checkpoints: loadable, complete or absent, of realistic spread; their tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import folder as folder_module
from harness.folder import INDEX, missing_files
from harness.model_factory import SHAPES, Shape, get_shape, make_model
from harness.tokenizer import special_tokens, vocabulary
from safetensors.torch import load_file, save_file

from oss_fused.errors import CheckpointError, UnsupportedModelError
from oss_fused.quant.mxfp4 import unpack_mxfp4

TINY = get_shape("gpt-oss", "tiny")


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("arch", ["gpt-oss", "llama", "qwen2", "qwen3", "mistral"])
def test_transformers_loads_every_tensor(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size = make_model(tmp_path / "m", get_shape(arch, "tiny"))
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert missing_files(tmp_path / "m") == []
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"]["total_size"] == size
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(ids["input_ids"]).logits.float()
    assert 0.5 < logits.std() < 2.5
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id


def test_load_spreads_over_experts_as_in_a_trained_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "m", replace(TINY, layers=4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens = torch.randint(0, 1000, (4, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router = model(tokens, output_router_logits=True).router_logits
    assert len(router) == 4
    for logits in router:
        chosen = logits.reshape(-1, TINY.experts).topk(TINY.top_k).indices
        share = torch.bincount(chosen.flatten(), minlength=TINY.experts) / chosen.numel()
        # an even load is 1/8 each; vLLM's dummy weights give 1/4 to four experts
        assert share.max() < 0.19 and share.min() > 0.06
        # neighbouring tokens choose differently
        assert (chosen[1:].sort().values != chosen[:-1].sort().values).any(1).float().mean() > 0.8


def test_mxfp4_has_the_published_layout_and_spread(tmp_path: Path) -> None:
    make_model(tmp_path / "m", TINY, "mxfp4")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert "model.layers.*.self_attn" in config["quantization_config"]["modules_to_not_convert"]
    assert config["layer_types"][:2] == ["sliding_attention", "full_attention"]
    tensors = load_tensors(tmp_path / "m")
    prefix = "model.layers.1.mlp.experts."
    blocks, scales = (
        tensors[prefix + "gate_up_proj_blocks"],
        tensors[prefix + "gate_up_proj_scales"],
    )
    assert blocks.shape == (8, 512, 8, 16) and scales.shape == (8, 512, 8)
    assert blocks.dtype == scales.dtype == torch.uint8
    weights = unpack_mxfp4(blocks, scales, torch.float32)
    assert weights.shape == (8, 512, 256)
    assert abs(weights.mean()) < 1e-3
    assert 0.6 / 16 < weights.std() < 1.4 / 16  # about 1 / sqrt(hidden)
    down = unpack_mxfp4(
        tensors[prefix + "down_proj_blocks"], tensors[prefix + "down_proj_scales"], torch.float32
    )
    assert down.shape == (8, 256, 256)
    # every e2m1 code occurs, the large ones less often
    codes = torch.bincount(torch.cat([blocks & 15, blocks >> 4]).flatten().int(), minlength=16)
    assert (codes > 0).all() and codes[7] < codes[2]


def test_same_seed_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, TINY, "mxfp4", seed)
    a, b, c = (load_tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_real_sizes() -> None:
    def parameters(shape: Shape) -> float:
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        experts = 3 * shape.hidden * shape.intermediate * max(1, shape.experts)
        return (shape.layers * (attention + experts) + 2 * shape.vocab * shape.hidden) / 1e9

    assert parameters(SHAPES["gpt-oss", "20b"]) == pytest.approx(20.9, abs=0.2)
    assert parameters(SHAPES["gpt-oss", "120b"]) == pytest.approx(116.8, abs=0.5)
    assert parameters(SHAPES["llama", "8b"]) == pytest.approx(8.03, abs=0.05)


@pytest.mark.parametrize("size", [512, 1024, 30000])
def test_random_tokens_survive_text(size: int, tmp_path: Path) -> None:
    vocab, merges = vocabulary(size)
    assert len(vocab) == size and len(merges) == size - 256
    assert sorted(vocab.values()) == list(range(size))


def test_gpt_oss_special_tokens_keep_their_published_ids() -> None:
    specials = special_tokens("gpt-oss", 201088)
    ids = {text: 201088 - len(specials) + i for i, text in enumerate(specials)}
    assert ids["<|endoftext|>"] == 199999 and ids["<|return|>"] == 200002
    assert ids["<|start|>"] == 200006 and ids["<|call|>"] == 200012
    assert len(ids) == len(specials)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"llama:20b: expected one of gpt-oss:20b"):
        get_shape("llama", "20b")
    with pytest.raises(UnsupportedModelError, match="llama has no experts"):
        make_model(tmp_path / "m", get_shape("llama", "tiny"), "mxfp4")
    with pytest.raises(UnsupportedModelError, match="multiples of 32"):
        make_model(tmp_path / "m", replace(TINY, hidden=250), "mxfp4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        make_model(tmp_path / "full", TINY)
    assert (tmp_path / "full" / "x").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot create it"):
        make_model(tmp_path / "file" / "m", TINY)


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_a_failure(
    trouble: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def save_two_then_fail(tensors: dict[str, torch.Tensor], path: Path, metadata: object) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise trouble
        save_file(tensors, path)

    monkeypatch.setattr(folder_module, "save_file", save_two_then_fail)
    expected = CheckpointError if isinstance(trouble, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(trouble, OSError) else None):
        make_model(tmp_path / "m", TINY)
    assert list(tmp_path.iterdir()) == []
