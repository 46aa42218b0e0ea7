# SPDX-License-Identifier: MIT
"""Static scales from observed values, with and without a clip target, and groups of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oss_fused.errors import NumericalOverflowError, SchemeError
from oss_fused.quant.formats import fake_quantize, relative_error
from oss_fused.quant.observers import make_observer
from oss_fused.quant.recipe import load_recipe, make_recipe
from oss_fused.quant.record import load_record
from tests.quant.runs import SETTINGS, Models, calibrate, tensors


def test_an_outlier_that_costs_more_than_it_gains_is_not_clipped() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[7] = 1e6
    scales = {}
    for target in (None, 0.0, 0.001):
        observer = make_observer("x", target)
        for part in x.split(1000):
            observer.see(part)
        scales[target] = observer.scale()
    assert scales[None] == x.amax() / 448
    assert scales[None] <= scales[0.0] == scales[0.001]


@pytest.mark.parametrize("target", [0.0, 0.003, 0.05])
def test_the_scale_has_the_least_error_within_the_target(target: float) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 3
    observer = make_observer("x", target)
    observer.see(x)
    chosen = observer.scale()
    error = relative_error(x, fake_quantize(x, "tensor", chosen))
    assert float((x.abs() > 448 * chosen).float().mean()) <= target
    plain = x.abs().amax().view(1) / 448
    for step in range(-4, 8):
        scale = plain * 2 ** (step / 8)
        if float((x.abs() > 448 * scale).float().mean()) <= target:
            assert error <= relative_error(x, fake_quantize(x, "tensor", scale)) * 1.003


@pytest.mark.parametrize("target", [None, 0.01])
def test_nothing_zeros_and_nan(target: float | None) -> None:
    with pytest.raises(NumericalOverflowError, match="what: no calibration sample"):
        make_observer("what", target).scale()
    zeros = make_observer("what", target)
    zeros.see(torch.zeros(3, 4))
    assert zeros.scale() == 1
    for bad in (float("nan"), float("inf")):
        zeros.see(torch.tensor([bad, 1.0]))
        with pytest.raises(NumericalOverflowError, match="what: NaN or Inf"):
            zeros.scale()
    large = make_observer("what", target)
    large.see(torch.full((8,), 3e38))
    assert large.scale().isfinite().all()


def test_a_run_with_clip_target_and_group_candidates(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {**SETTINGS, "dataset": str(text_file)}
    calibrate(models("qwen3"), tmp_path / "plain", **settings)
    chosen = {"clip_target": 0.02, "group_candidates": [16, 32, 7]}
    calibrate(models("qwen3"), tmp_path / "out", **settings, **chosen)
    plain, found = tensors(tmp_path / "plain"), tensors(tmp_path / "out")
    scales = [n for n in plain if n.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(scales) == 14 + 4 and any(not torch.equal(plain[n], found[n]) for n in scales)
    for linear in load_record(tmp_path / "out").linears:
        if linear.scheme != "BF16":
            assert linear.clip_ratio is not None and linear.clip_ratio <= 0.03
            assert linear.group is not None and linear.group.size in (16, 32)
            assert linear.group.clip_ratio == 0 and 0.01 < linear.group.error < 0.03
    recipe = load_recipe(tmp_path / "out" / "recipe.yaml")
    assert (recipe["clip_target"], recipe["group_candidates"]) == (0.02, [16, 32, 7])
    assert "clip_target" not in load_recipe(tmp_path / "plain" / "recipe.yaml")


def test_settings_without_effect_or_sense_are_refused() -> None:
    with pytest.raises(SchemeError, match=r"clip_target=0.1: no scale is static"):
        make_recipe({"clip_target": 0.1})
    with pytest.raises(SchemeError, match="clip_target=1.5"):
        make_recipe({"clip_target": 1.5, "group_candidates": [8]})
    with pytest.raises(SchemeError, match=r"group_candidates.0=0"):
        make_recipe({"group_candidates": [0]})
