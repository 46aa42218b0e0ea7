# SPDX-License-Identifier: MIT
"""The byte-level gpt-oss in tests/data: that it has learned, and how its experts quantise."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from harness import tiny_gpt_oss
from harness.finetune import pack_experts
from harness.tiny_gpt_oss import (
    HELD_OUT,
    SHAPE,
    TRAINED_CONTEXT,
    Trainer,
    Training,
    balance_loss,
    build,
    dense_experts,
    token_table,
    train_tiny,
)
from torch.nn.functional import cross_entropy

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.experts import PARTS, convert_experts
from oss_fused.quant.mxfp4 import unpack_mxfp4

MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny_gpt_oss"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The model with MXFP4 experts, as OpenAI ships them."""
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    pack_experts(MODEL, folder)
    return folder


def test_it_predicts_text_and_uses_every_expert(tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 8e6
    text = (Path(sysconfig.get_paths()["stdlib"]) / f"{HELD_OUT[-2]}.py").read_bytes()[:2048]
    ids = token_table(tokenizer)[torch.tensor(list(text))].view(4, -1)
    with torch.no_grad():
        output = model(ids, output_router_logits=True)
    loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss < 1.3  # a random model has log(265) = 5.6
    _, load = balance_loss(output.router_logits)
    assert load.min() > 0.1


def test_tokens_are_bytes(tokenizer):
    text = "def f(x):\n\treturn 'é世😀'"
    ids = tokenizer(text)["input_ids"]
    assert token_table(tokenizer)[torch.tensor(list(text.encode()))].tolist() == ids
    assert tokenizer.decode(ids) == text and len(tokenizer) == SHAPE.vocab


def test_mxfp4_experts_become_fp8_exactly(packed):
    """All of them: every value of MXFP4 is one of E4M3's times a power of two."""
    reader = CheckpointReader(packed)
    exact = total = 0
    for layer in range(SHAPE.layers):
        module = f"model.layers.{layer}.mlp.experts"
        made = dict(convert_experts(reader, module, SHAPE.experts, "fp8"))
        for long, short in PARTS:
            prefix = f"{module}.{long}"
            stored = reader.read(f"{prefix}_blocks"), reader.read(f"{prefix}_scales")
            dense = unpack_mxfp4(*stored, torch.float32)
            for expert, weight in enumerate(dense):
                own = f"{module}.{expert}.{short}_weight"
                exact += int((made[own].float() * made[f"{own}_scale"] == weight).sum())
                total += weight.numel()
    assert exact == total == 2359296


def test_dense_experts_compute_what_transformers_does():
    model = build(seed=1)
    experts = model.model.layers[0].mlp.experts
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        torch.nn.init.normal_(bias)
    x = torch.randn(6, SHAPE.hidden)
    ids = torch.stack([torch.randperm(SHAPE.experts)[: SHAPE.top_k] for _ in range(6)])
    weights = torch.rand(6, SHAPE.top_k).softmax(-1)
    experts.config._experts_implementation = "eager"
    theirs = type(experts).forward(experts, x, ids, weights)
    torch.testing.assert_close(dense_experts(experts, x, ids, weights), theirs)


def test_corpus_holds_out_modules_and_their_tests():
    train, held_out = tiny_gpt_oss.corpus()
    assert len(train) > 2**22 and b"def fill(text, width=70" in held_out
    assert b"def fill(text, width=70" not in train and b"class ArgumentParser(" in train


@pytest.mark.parametrize(("needle", "length"), [(None, 32), (4096, 256)])
def test_training_goes_on_where_it_stopped(needle, length, tmp_path, tokenizer, monkeypatch):
    text = (MODEL / "config.json").read_bytes()
    monkeypatch.setattr(tiny_gpt_oss, "corpus", lambda: (text, text))
    monkeypatch.setattr(tiny_gpt_oss, "TRAINED_CONTEXT", length)
    settings = Training(steps=2, batch=1, save_every=1, needle=needle)
    device, losses = torch.device("cpu"), []
    whole = Trainer(settings, device, tokenizer)
    whole.run(lambda *_: None, tmp_path / "whole.pt")

    first = Trainer(settings, device, tokenizer)
    first._train_step()
    first._save(tmp_path / "state.pt")
    second = Trainer(settings, device, tokenizer)
    second.run(lambda _, loss, __: losses.append(loss), tmp_path / "state.pt")
    assert second.step == 2
    assert second.model.config.max_position_embeddings == (needle or SHAPE.context)
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters()):
        torch.testing.assert_close(ours, theirs)
    other = Trainer(Training(steps=3, batch=1), device, tokenizer)
    with pytest.raises(CheckpointError, match="remove it to start over"):
        other.run(lambda *_: None, tmp_path / "state.pt")


def test_output_must_be_new(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        train_tiny(tmp_path, Training(), torch.device("cpu"), lambda *_: None)


def test_trained_context_is_the_rope_one():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["rope_parameters"]["original_max_position_embeddings"] == TRAINED_CONTEXT
