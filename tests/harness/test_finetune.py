# SPDX-License-Identifier: MIT
"""The fine-tuned byte-level gpt-oss: its checkpoints as they are served, and what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import finetune
from harness.tiny_gpt_oss import Trainer, Training, read_texts, token_table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from oss_fused.errors import DatasetError
from oss_fused.quant.dataset import python_text
from oss_fused.quant.formats import fake_quantize
from oss_fused.quant.mxfp4 import unpack_mxfp4
from tests.quant.conftest import make_model
from tests.quant.runs import calibrate

MODEL = finetune.ROOT / "tests/data/tiny_gpt_oss"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gpt-oss", tmp_path_factory.mktemp("finetune") / "gpt-oss")


def test_a_bf16_model_is_served_as_transformers_runs_it(model: Path) -> None:
    ids = torch.arange(48).view(2, 24)
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ours = finetune.log_probabilities(finetune.load_served(model), ids)
    torch.testing.assert_close(ours, exact(ids).logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_a_calibrated_model_has_its_rounded_weights_and_inputs(model: Path, tmp_path: Path) -> None:
    calibrate(model, tmp_path / "out", experts="mxfp4")
    served = finetune.load_served(tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj"
    weight = finetune.load_state(tmp_path / "out")[f"{name}.weight"]
    module, x = served.get_submodule(name), torch.randn(5, 64)
    expected = torch.nn.functional.linear(fake_quantize(x), weight, module.bias)
    torch.testing.assert_close(module(x), expected)


def test_the_original_has_its_experts_in_mxfp4(model: Path, tmp_path: Path) -> None:
    finetune.pack_experts(model, tmp_path / "original")
    stored = load_file(tmp_path / "original/model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    values = unpack_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"], torch.float32)
    assert torch.equal(finetune.load_state(tmp_path / "original")[name], values.transpose(1, 2))
    config = json.loads((tmp_path / "original/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_comparison_of_predictions() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 7, (3, 20))
    one = torch.randn(3, 20, 7).log_softmax(-1)
    other = (one + 0.3 * torch.randn(3, 20, 7)).log_softmax(-1)
    same, differs = finetune.compare(one, one, ids), finetune.compare(one, other, ids)
    assert same["kl_divergence"] == 0 and same["perplexity_factor"] == same["top1_agreement"] == 1
    kl = torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(-1).mean()
    assert differs["kl_divergence"] == pytest.approx(float(kl), rel=1e-5)
    losses = [-x[:, :-1].gather(-1, ids[:, 1:, None]).mean() for x in (one, other)]
    assert differs["perplexity_factor"] == pytest.approx(float((losses[1] - losses[0]).exp()))


def test_held_out_texts_are_in_no_other_text(tmp_path: Path) -> None:
    finetune.write_texts(tmp_path)
    seen = (tmp_path / "calibration.txt").read_text()
    assert python_text() in seen and (tmp_path / "tuning.txt").read_text()[:9999] in seen
    table = token_table(AutoTokenizer.from_pretrained(MODEL))
    for name, data in finetune.held_out_texts().items():
        lines = [line for line in data.decode().splitlines() if len(line) > 50]
        assert lines and not [line for line in lines if line in seen], name
        ids = finetune.windows(data, table, 8192)
        assert ids.shape[1] == 512 and 13 <= len(ids) <= 16


def test_training_goes_on_from_a_checkpoint_with_other_text(tmp_path: Path) -> None:
    finetune.pack_experts(MODEL, tmp_path / "original")
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 150)
    settings = Training(steps=1, batch=1, start=str(tmp_path / "original"), texts=(str(text),))
    trainer = Trainer(settings, torch.device("cpu"), AutoTokenizer.from_pretrained(MODEL))
    state = finetune.load_state(tmp_path / "original")
    assert all(torch.equal(tensor, state[n]) for n, tensor in trainer.model.state_dict().items())
    assert len(trainer.train) + len(trainer.held_out) == text.stat().st_size
    text.write_text("too short")
    with pytest.raises(DatasetError, match=r"--text: 9 bytes in all; expected more than 5120"):
        read_texts((str(text),))
    with pytest.raises(DatasetError, match=r"--text /nowhere: cannot be read"):
        read_texts(("/nowhere",))
