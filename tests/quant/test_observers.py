# SPDX-License-Identifier: MIT
"""Static scales from observed values, with and without a clip target, and groups of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oss_fused.errors import NumericalOverflowError, SchemeError
from oss_fused.quant.formats import fake_quantize, relative_error
from oss_fused.quant.observers import CacheObserver, OutputError, drift, make_observer
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


def test_a_scale_may_be_larger_than_the_plain_one() -> None:
    # 0.9 lies between two steps of the plain grid; one that is shifted by less than a binade fits
    x = torch.tensor([1.0, *[0.9] * 50])
    observer = make_observer("x", 0.0)
    observer.see(x)
    plain = relative_error(x, fake_quantize(x, "tensor", torch.tensor([1 / 448])))
    assert relative_error(x, fake_quantize(x, "tensor", observer.scale())) < 0.1 * plain


@pytest.mark.parametrize("target", [None, 0.01])
def test_a_tensor_without_elements_changes_nothing(target: float | None) -> None:
    observer = make_observer("what", target)
    observer.see(torch.zeros(0, 4))
    with pytest.raises(NumericalOverflowError, match="what: no calibration sample"):
        observer.scale()
    observer.see(torch.tensor([2.0]))
    before = observer.scale()
    observer.see(torch.zeros(0, 4))
    assert torch.equal(observer.scale(), before)


def test_keys_and_values_have_scales_of_their_own() -> None:
    key, value = torch.randn(2, 1, 4, 6, 8, generator=torch.Generator().manual_seed(2))
    value, cache = 100 * value, CacheObserver("attn")
    assert cache.update(key, value) == (key, value)
    k_scale, v_scale = cache.freeze()
    assert (k_scale, v_scale) == (key.abs().amax() / 448, value.abs().amax() / 448)
    served = cache.update(key, value)
    assert torch.equal(served[0], fake_quantize(key, "tensor", k_scale))
    assert torch.equal(served[1], fake_quantize(value, "tensor", v_scale))


def test_keys_and_values_are_both_clipped() -> None:
    x = torch.randn(2, 1, 4, 500, 8, generator=torch.Generator().manual_seed(2))
    plain, cache = CacheObserver("attn").key, CacheObserver("attn", 0.05)
    plain.see(x[0])
    cache.update(x[0], x[0])
    k_scale, v_scale = cache.freeze()
    assert k_scale == v_scale != plain.scale()


def test_the_error_of_an_output_is_that_of_all_inputs_seen() -> None:
    torch.manual_seed(3)
    weight, bias, parts = torch.randn(5, 8), torch.randn(5), [torch.randn(2, 30, 8), torch.ones(8)]
    error = OutputError(weight, bias, torch.tensor([1.5 / 448]))
    exact = torch.cat([(x @ weight.t() + bias).view(-1, 5) for x in parts])
    rounded = exact + 0.1 * torch.randn(61, 5)
    for x, output in zip(parts, rounded.split((60, 1))):
        error.see(x, output.view(*x.shape[:-1], 5))
    found = error.metrics()
    assert found["output_error"] == pytest.approx(relative_error(exact, rounded), rel=1e-5)
    by_token = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found["error"][name] == pytest.approx(float(by_token.quantile(level)), rel=1e-4)
    clipped = int((parts[0].abs() > 1.5).sum())
    assert clipped > 0 and found["clip_ratio"] == clipped / (61 * 8)


def test_drift_is_the_rms_of_the_share_of_the_baseline() -> None:
    baseline = [torch.full((1, 2, 4), 2.0), torch.full((1, 1, 4), 10.0)]
    states = [torch.full((1, 2, 4), 3.0), torch.full((1, 1, 4), 10.0)]
    assert drift(baseline, states) == pytest.approx((2 * 0.5**2 / 3) ** 0.5)


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
