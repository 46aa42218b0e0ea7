# SPDX-License-Identifier: MIT
"""Classifiers, embedding models, Mistral's own format, drafts: folders that are no plain LM's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oss_fused.errors import CheckpointError
from oss_fused.plugin.checkpoint import check_before_load, check_checkpoint
from tests.plugin.conftest import (
    PROMPT,
    SHARED_GPU,
    build,
    calibrate,
    edit,
    make_config,
    tensors_of,
)


def save(folder: Path, kind: str, family: str) -> Path:
    """A random bf16 model without an LM head: "Model" or "ForSequenceClassification"."""
    import transformers

    torch.manual_seed(7)
    config = make_config(family, num_labels=3)
    model = getattr(transformers, f"AutoModel{kind.removeprefix('Model')}").from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    # vLLM looks for one before it scores anything
    for path in (Path(__file__).parents[1] / "data/tiny_gpt_oss").glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def bare(folder: Path) -> Path:
    """Names as embedding models have them on the hub."""
    tensors = {name.removeprefix("model."): t for name, t in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def drop(folder: Path, name: str) -> Path:
    edit(folder, {}, (name,))
    return folder


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_folders_without_a_head_pass_and_miss_nothing_else(kind, tmp_path):
    folder = save(tmp_path, kind, "llama")
    check_before_load(str(folder))
    name = next(n for n in tensors_of(folder) if n.endswith("layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        check_before_load(str(drop(folder, name)))


def test_a_causal_models_name_without_its_head(tmp_path):
    folder = build(tmp_path, "qwen3")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing.*Qwen3ForCausalLM"):
        check_before_load(str(drop(folder, "lm_head.weight")))
    # as embedding models of this family are published
    check_before_load(str(bare(folder)))


def test_layers_of_an_architecture_that_is_not_known_are_not_guessed(tmp_path):
    folder = drop(build(tmp_path, "llama"), "model.norm.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaEagle3"]}))
    check_before_load(str(folder))


def test_audit_of_dtypes(tmp_path):
    folder = calibrate(build(tmp_path, "llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    codes, scale = tensors_of(folder)[name], tensors_of(folder)[f"{name}_scale"]
    dense = (codes.float() * scale).bfloat16()
    named = rf"model\.safetensors: tensor '{name}' is torch"
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        edit(folder, {name: dense.to(dtype)})
        with pytest.raises(CheckpointError, match=rf"{named}.*float8_e4m3fn.*is its scale"):
            check_before_load(str(folder))
    edit(folder, {name: dense}, (f"{name}_scale",))
    with pytest.raises(CheckpointError, match=rf"{named}.*float8_e4m3fn, because ignore"):
        check_before_load(str(folder))
    edit(folder, {name: codes, f"{name}_scale": scale})
    check_before_load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "*.layers.1.mlp.down_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{named}.*expected bf16"):
        check_before_load(str(folder))


def snapshot(hub: Path, folder: Path, monkeypatch) -> Path:
    """Put a model into a hub cache, as ``org/name``."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    root = hub / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text("0123")
    (root / "snapshots").mkdir()
    return folder.rename(root / "snapshots/0123")


def test_a_name_on_the_hub_is_checked_where_the_cache_has_it(tmp_path, monkeypatch):
    check_before_load("org/name")
    check_before_load("s3://bucket/name")
    folder = snapshot(tmp_path / "hub", build(tmp_path / "model", "llama"), monkeypatch)
    check_before_load("org/name")
    drop(folder, "model.norm.weight")
    with pytest.raises(CheckpointError, match="'model.norm.weight' is missing"):
        check_before_load("org/name")
    # vLLM is yet to fetch the rest
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_before_load("org/name")


MISTRAL = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
PARAMS = {
    "dim": 128,
    "n_layers": 2,
    "head_dim": 32,
    "hidden_dim": 192,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 200,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}


def mistral_folder(folder: Path) -> Path:
    """A model in Mistral's own format: names, one file, params.json."""
    tensors = {}
    for name, tensor in tensors_of(build(folder, "mistral")).items():
        for theirs, ours in MISTRAL.items():
            name = name.replace(f"{theirs}.", f"{ours}.")
        tensors[name] = tensor
    for path in folder.iterdir():
        path.unlink()
    save_file(tensors, folder / "consolidated.safetensors", {"format": "pt"})
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder


def test_mistrals_own_format_is_judged_by_its_own_config(tmp_path):
    folder = mistral_folder(tmp_path)
    assert "layers.0.attention.wq.weight" in check_checkpoint(folder)
    (folder / "params.json").write_text(json.dumps(PARAMS | {"n_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers=1000000000"):
        check_checkpoint(folder)
    (folder / "consolidated.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors: truncated"):
        check_checkpoint(folder)


@pytest.mark.serve
def test_mistrals_own_format_is_served(tmp_path, engine):
    folder = mistral_folder(tmp_path)
    tokens, _ = engine(folder, quantization="oss_fp8").generate()
    assert len(tokens) == 4


@pytest.mark.serve
def test_a_classifier_from_a_folder_answers_as_in_transformers(tmp_path, engine):
    from transformers import AutoModelForSequenceClassification

    folder = save(tmp_path, "ForSequenceClassification", "llama")
    llm = engine(folder, quantization="oss_fp8", runner="pooling", skip_tokenizer_init=False).llm
    ours = llm.classify([{"prompt_token_ids": PROMPT}], use_tqdm=False)[0].outputs.probs
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0].float().softmax(-1)
    assert torch.allclose(torch.tensor(ours), theirs, atol=0.05)


@pytest.mark.serve
def test_an_embedding_model_from_a_folder_agrees_with_transformers(tmp_path, engine):
    from transformers import AutoModel

    folder = save(tmp_path, "Model", "qwen3")
    llm = engine(folder, quantization="oss_fp8", runner="pooling", skip_tokenizer_init=False).llm
    ours = torch.tensor(
        llm.embed([{"prompt_token_ids": PROMPT}], use_tqdm=False)[0].outputs.embedding
    )
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
        theirs = model(torch.tensor([PROMPT])).last_hidden_state[0, -1].float()
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_options_are_for_the_served_model_not_for_its_draft(monkeypatch):
    from types import SimpleNamespace

    from oss_fused.plugin import config
    from oss_fused.quant import settings

    hf = SimpleNamespace(to_dict=lambda: {}, model_type="llama")
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, trust_remote_code=False, runner_type="draft"),
        additional_config={"oss_fused": {"ignore": ["model.layers.20.*"]}},
        load_config=SimpleNamespace(load_format="auto"),
    )
    monkeypatch.setattr(config, "get_current_vllm_config", lambda: vllm_config)
    stored = {"quant_method": "oss_fp8", "version": 1, "ignore": ["model.layers.0.mlp.down_proj"]}
    groups = {"g": {"targets": ["Linear"]}}
    ours = config.OssFp8Config(settings.from_checkpoint(stored | {"config_groups": groups}))
    vllm_config.speculative_config, vllm_config.quant_config = object(), ours
    ours._read_options()
    assert ours.scheme_of("draft_model.model.layers.0.mlp.down_proj") is None
    assert ours.scheme_of("draft_model.model.layers.1.mlp.down_proj") is not None
    ours.check_ignore()


@pytest.mark.gpu
@pytest.mark.serve
def test_a_calibrated_draft_model_on_a_gpu(tmp_path, engine):
    """The served model as its own draft, with a pattern that names layers: every draft is taken."""
    folder = build(tmp_path, "llama")
    calibrate(folder, ignore=("lm_head", "model.layers.0.mlp.down_proj"))
    plain, _ = engine(folder, **SHARED_GPU).generate()
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    drafted, _ = engine(folder, speculative_config=speculation, **SHARED_GPU).generate()
    assert drafted == plain
