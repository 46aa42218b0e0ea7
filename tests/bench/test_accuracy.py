# SPDX-License-Identifier: MIT
"""The accuracy checker against hand-computed errors, special values and FP8 codes."""

from __future__ import annotations

import math

import pytest
import torch

from oss_fused.bench.accuracy import check_accuracy, measure_error, ulp_distance
from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError

FP8 = torch.float8_e4m3fn


def test_metrics_by_hand():
    metrics = measure_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert metrics.max_absolute == 0.5
    assert metrics.max_relative == 0.125
    assert metrics.relative_l2 == pytest.approx(0.1)
    assert metrics.cosine == pytest.approx(27 / (5 * math.hypot(3, 4.5)))


def test_ulp_counts_representable_values():
    one = torch.tensor([1.0, 0.0, -1.0, 2.0**-126])
    up = torch.nextafter(one, torch.tensor(9.0))
    assert ulp_distance(up, one).tolist() == [1, 1, 1, 1]
    assert ulp_distance(torch.tensor([-0.0]), torch.tensor([0.0])).item() == 0
    tiny = torch.tensor([2.0**-149])
    assert ulp_distance(tiny, -tiny).item() == 2


def test_ulp_of_fp8_counts_codes():
    codes = torch.arange(0, 127, dtype=torch.uint8)
    assert (ulp_distance(codes[1:].view(FP8), codes[:-1].view(FP8)) == 1).all()
    plus, minus = torch.tensor([1.0]).to(FP8), torch.tensor([-1.0]).to(FP8)
    assert ulp_distance(plus, minus).item() == 2 * 0x38


def test_nan_and_inf_must_agree_in_place_and_sign():
    nan, inf = float("nan"), float("inf")
    same = torch.tensor([1.0, nan, inf, -inf])
    assert check_accuracy(same, same.clone()).passed
    for wrong in ([1.0, 0.0, inf, -inf], [1.0, nan, -inf, -inf], [nan, nan, inf, -inf]):
        result = check_accuracy(torch.tensor(wrong), same)
        assert not result.passed and "NaN or Inf" in result.reason


def test_zero_reference():
    zero = torch.zeros(4)
    assert check_accuracy(zero, zero).passed
    assert not check_accuracy(zero + 1e-30, zero).passed


def test_empty_tensors_agree():
    assert check_accuracy(torch.empty(0, 3), torch.empty(0, 3)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_one_bad_element_does_not(dtype):
    exact = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    good = exact.to(dtype)
    assert check_accuracy(good, exact).passed
    bad = good.clone()
    bad[5, 7] += 0.5
    assert not check_accuracy(bad, exact).passed


def test_wrong_shape_is_a_rejection_not_a_crash():
    result = check_accuracy(torch.zeros(2), torch.zeros(3))
    assert not result.passed and "shape (2,)" in result.reason
    with pytest.raises(ShapeMismatchError):
        measure_error(torch.zeros(2), torch.zeros(3))
    with pytest.raises(UnsupportedDtypeError, match="pass a tolerance"):
        check_accuracy(torch.zeros(2).to(FP8), torch.zeros(2))
    with pytest.raises(UnsupportedDtypeError):
        ulp_distance(torch.zeros(2).half(), torch.zeros(2))
