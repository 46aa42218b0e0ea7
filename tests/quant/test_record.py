# SPDX-License-Identifier: MIT
"""calibration.json: what it holds, and that it holds it for every kind of run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import RunOptions
from oss_fused.quant.pipeline import calibrate
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import CalibrationRecord, load_record
from tests.quant.runs import changed

Models = Callable[[str], Path]


def record_of(model: Path, output: Path, **settings: object) -> CalibrationRecord:
    calibrate(make_recipe(settings), RunOptions(model, output))
    return load_record(output)


def test_weights_whose_squares_exceed_float32_are_judged(models: Models, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    weight = (torch.randn(96, 64) * 5e37).to(torch.bfloat16)
    source = changed(models, tmp_path, "llama", **{f"{name}.weight".replace(".", "__"): weight})
    by_name = {linear.name: linear for linear in record_of(source, tmp_path / "out").linears}
    judged = by_name[name]
    assert judged.weight_error is not None and 0.01 < judged.weight_error < 0.05
    assert judged.weight_histogram is not None
    assert sum(judged.weight_histogram.counts) == weight.numel()


def test_without_data_only_weights_are_judged(models: Models, tmp_path: Path) -> None:
    record = record_of(models("llama"), tmp_path / "out", ignore=("re:.*down_proj",))
    assert (record.samples, record.tokens, record.rounding) == (0, 0, "nearest")
    by_name = {linear.name: linear for linear in record.linears}
    kept, rounded = by_name["model.layers.1.mlp.down_proj"], by_name["model.layers.1.mlp.up_proj"]
    assert kept.scheme == "BF16" and kept.bytes_after == kept.bytes_before
    assert kept.weight_error is None and kept.weight_histogram is None
    assert rounded.scheme == "FP8_DYNAMIC" and rounded.output_error is None
    assert rounded.bytes_before == 2 * rounded.elements
    assert rounded.bytes_after == rounded.elements + 4 * 96
    assert rounded.format_errors is not None and rounded.weight_histogram is not None
    assert rounded.weight_error == rounded.format_errors["e4m3"] < rounded.format_errors["e5m2"]
    assert sum(rounded.weight_histogram.counts) == rounded.elements
    assert [layer.cumulative_error for layer in record.layers] == [None, None]


def test_with_data_outputs_drift_cache_and_routing_are_judged(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 32, "num_samples": 10}
    record = record_of(
        models("gpt-oss"), tmp_path / "out", experts="fp8", kv_cache="fp8", **settings
    )
    assert record.samples == 10 and record.tokens == 320 and record.experts == "fp8"
    quantised = [linear for linear in record.linears if linear.scheme != "BF16"]
    assert any(linear.name == "lm_head" for linear in quantised)
    for linear in quantised:
        if linear.name == "lm_head":
            continue
        assert linear.error is not None and linear.output_error is not None
        assert 0 < linear.error.p50 <= linear.error.p90 <= linear.error.p99 < 0.3
        assert linear.clip_ratio == 0
    first, second = (layer.cumulative_error for layer in record.layers)
    assert first is not None and second is not None and 0 < first < second < 0.3
    for layer in record.layers:
        assert layer.kv_cache == "fp8" and layer.k_scale and layer.v_scale
        assert layer.expert_tokens is not None
        assert sum(layer.expert_tokens) == 320 * 2  # two experts a token


def test_static_scales_may_clip_what_calibration_did_not_show(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 32, "num_samples": 4}
    record = record_of(models("llama"), tmp_path / "out", scheme="FP8_STATIC", **settings)
    ratios = [linear.clip_ratio for linear in record.linears if linear.clip_ratio is not None]
    # scales come from exact weights; rounded ones move a few inputs past them
    assert len(ratios) == 14 and all(ratio < 0.01 for ratio in ratios)


def test_a_policy_run_keeps_what_its_first_stage_measured(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "max_seq_length": 32, "num_samples": 12}
    record = record_of(models("llama"), tmp_path / "out", accuracy_target=2.0, **settings)
    assert record.accuracy_target == 2.0 and record.tokens == 12 * 32
    assert [mix.chosen for mix in record.mixes] == [True] + [False] * (len(record.mixes) - 1)
    for linear in record.linears:
        if linear.scheme == "FP8_DYNAMIC":
            assert linear.kl is not None and linear.kl > 0 and linear.error is not None
    assert all(layer.cumulative_error for layer in record.layers)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no calibration record"),
        (json.dumps({"kind": "other"}), "kind"),
        ("[]", "is no calibration record"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_record(tmp_path)
