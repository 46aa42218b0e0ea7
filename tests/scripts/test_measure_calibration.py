# SPDX-License-Identifier: MIT
"""What a calibration costs: figures for every stage, the memory's peak, and nothing left over."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from oss_fused.quant.streaming import LayerStream
from tests.loading import load_script
from tests.quant.conftest import make_model


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_calibration")


def test_stages_and_peaks_are_measured(script, tmp_path, capsys) -> None:
    model = make_model("gpt-oss-mxfp4", tmp_path / "model")
    before = LayerStream.commit
    words = ["--output", str(tmp_path / "cost.json"), "--summary", str(tmp_path / "summary.json")]
    sizes = ["--num-samples", "1", "--max-seq-length", "16", "--device", "cpu"]
    assert script.main([str(model), *words, *sizes]) == 0
    cost = json.loads((tmp_path / "cost.json").read_text())
    stages = {name for _, _, name in script.STAGES} | {script.REST}
    assert set(cost["stages"]) == stages
    total = sum(stage["seconds"] for stage in cost["stages"].values())
    assert total == pytest.approx(cost["seconds"])
    assert 0.1 < cost["peak_anonymous_gib"] <= cost["peak_resident_gib"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["calibration.peak_gib_20b"] == round(cost["peak_resident_gib"], 2)
    assert "lm_head" in capsys.readouterr().err and LayerStream.commit is before
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "cost.json", "summary.json", "summary-sources.json"}


def test_bad_input_is_named(script, tmp_path, capsys) -> None:
    words = [str(tmp_path / "none"), "--work", str(tmp_path), "--output", str(tmp_path / "x.json")]
    assert script.main(words) == 2
    assert "no such folder" in capsys.readouterr().err
