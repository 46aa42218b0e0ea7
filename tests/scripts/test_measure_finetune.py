# SPDX-License-Identifier: MIT
"""scripts/measure_finetune.py: the headline, and that an arm is what its name says."""

from __future__ import annotations

import argparse
from pathlib import Path

import measure_finetune
import pytest

from oss_fused.quant.recipe import make_recipe
from tests.quant.conftest import make_model


def arms(nearest: float, mse: float, feedback: float, factor: float) -> dict:
    kl = {"nearest": nearest, "mse": mse, "feedback": feedback, "everything": 0.001}
    return {
        name: {"kl_divergence": value, "perplexity_factor": factor, "kl_divergence_p99": 0.1}
        | {"top1_agreement": 0.9}
        for name, value in kl.items()
    }


def test_the_headline_is_the_worst_text_of_any_model() -> None:
    figures = {
        "trained": {"texts": {"prose": {"arms": arms(0.02, 0.015, 0.008, 0.99)}}},
        "tuned": {"texts": {"code": {"arms": arms(0.03, 0.018, 0.0135, 1.004)}}},
    }
    assert measure_finetune.headline(figures) == {
        "finetune.tiny.kl_feedback_over_nearest_max": 0.45,
        "finetune.tiny.kl_least_error_over_nearest_max": 0.75,
        "finetune.tiny.everything_factor": 1.004,
    }
    assert "0.0135" in measure_finetune.show(figures)


def test_an_arm_rounds_experts_alone_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("gpt-oss", tmp_path / "model")
    args = argparse.Namespace(work=tmp_path, num_samples=2)
    arm = {**measure_finetune.ARMS["mse"]}
    made = measure_finetune.calibrate(args, model, tmp_path / "mse", arm)
    assert made["expert_rounding"] == "mse" and made["calibration_tokens"] == 0
    assert made["blocks"] == 2 * 4 * (192 * 64 + 64 * 96) // 32
    monkeypatch.setattr(measure_finetune, "run_recipe", None)
    assert measure_finetune.calibrate(args, model, tmp_path / "mse", arm) == made
    everything = make_recipe({**measure_finetune.ARMS["everything"], "dataset": "python"})
    assert everything.feedback and not everything.ignore
