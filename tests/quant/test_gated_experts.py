# SPDX-License-Identifier: MIT
"""Mixtral and Qwen3-MoE: experts stored one by one, in FP8."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from oss_fused.errors import CheckpointError, SchemeError
from oss_fused.quant.calibrator import RunOptions
from oss_fused.quant.checkpoint.audit import audit
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import dequantize, quantize
from oss_fused.quant.pipeline import calibrate as search
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from oss_fused.quant.runner import LayerRunner
from oss_fused.quant.skeleton import ModelSkeleton
from tests.quant.runs import Models, calibrate, changed, config_of, tensors, whole_model

FAMILIES = {
    "mixtral": ("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3-moe": ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_experts_in_fp8(models: Models, tmp_path: Path, kind: str) -> None:
    source, output = models(kind), tmp_path / "out"
    calibrate(source, output, experts="fp8")
    before, after = tensors(source), tensors(output)
    block, names = FAMILIES[kind]
    for expert in range(4):
        for name in names:
            weight = f"{block}.experts.{expert}.{name}.weight"
            q, scale = quantize(before[weight], "channel")
            assert torch.equal(after[weight].float(), q.float())
            assert torch.equal(after[f"{weight}_scale"], scale)
    assert torch.equal(before[f"{block}.gate.weight"], after[f"{block}.gate.weight"])
    assert config_of(output)["quantization_config"]["experts"] == "fp8"
    audit(output)  # as the plugin does before it loads


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_feedback_looks_at_every_expert_and_reports_it(
    models: Models, tmp_path: Path, text_file: Path, kind: str
) -> None:
    source = models(kind)
    settings = {"dataset": str(text_file), "num_samples": 12, "max_seq_length": 32}
    outputs = {}
    for rounding in ("nearest", "feedback"):
        output = tmp_path / rounding
        calibrate(source, output, experts="fp8", rounding=rounding, **settings)
        outputs[rounding] = load_record(output).layers
    block, names = FAMILIES[kind]
    routed = outputs["feedback"][1].expert_tokens
    assert routed is not None and sum(routed) == 12 * 32 * 2
    first = outputs["feedback"][0].expert_tokens
    assert (first is None) is (kind == "qwen3-moe")  # a layer without experts
    errors = [outputs[r][1].cumulative_error for r in ("nearest", "feedback")]
    assert 0 < errors[1] < errors[0] < 0.2
    # the stream computes with the experts that are written
    model = whole_model(source)
    exact = model(torch.arange(32)[None]).logits
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    after = tensors(tmp_path / "feedback")
    for expert in range(4):
        parts = [f"{block}.experts.{expert}.{name}.weight" for name in names]
        gate, up, down = (dequantize(after[p], after[f"{p}_scale"]) for p in parts)
        state["model.layers.1.mlp.experts.gate_up_proj"][expert] = torch.cat((gate, up))
        state["model.layers.1.mlp.experts.down_proj"][expert] = down
    model.load_state_dict(state)
    error = (model(torch.arange(32)[None]).logits - exact).norm() / exact.norm()
    assert 0 < error < 0.1


def test_a_search_takes_the_experts_from_its_stage(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "num_samples": 1, "max_seq_length": 8}
    recipe = make_recipe(
        {"experts": "fp8", "accuracy_target": 2.0, "rounding": "nearest", **settings}
    )
    search(recipe, RunOptions(models("mixtral"), tmp_path / "out"))
    calibrate(models("mixtral"), tmp_path / "plain", experts="fp8")
    found, plain = tensors(tmp_path / "out"), tensors(tmp_path / "plain")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert torch.equal(found[name].float(), plain[name].float())
    assert load_record(tmp_path / "out").mixes[0].factor > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": "mxfp4"}, "experts='mxfp4': is served for gpt-oss only"),
        ({"format": "compressed-tensors"}, "is not written for model_type='mixtral'"),
    ],
)
def test_what_is_not_served_is_refused(models: Models, tmp_path: Path, settings, message) -> None:
    with pytest.raises(SchemeError, match=message):
        calibrate(models("mixtral"), tmp_path / "out", **settings)


def test_a_missing_expert_is_named(models: Models, tmp_path: Path) -> None:
    name = "model__layers__1__mlp__experts__3__up_proj__weight"
    source = changed(models, tmp_path, "qwen3-moe", **{name: None})
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight' is missing"):
        calibrate(source, tmp_path / "out")


def test_a_dropped_layer_gives_its_memory_back(models: Models) -> None:
    runner = LayerRunner(ModelSkeleton(CheckpointReader(models("mixtral"))), torch.device("cpu"))
    for index in range(2):
        layer = runner.load(index)
        runner.forward(layer, index, torch.zeros(1, 4, 64))
        kept = weakref.ref(layer)
        runner.drop(index)
        del layer
        gc.collect()
        assert kept() is None
