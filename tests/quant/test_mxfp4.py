# SPDX-License-Identifier: MIT
"""MXFP4 at its edges: weighed errors, kept blocks, shapes that do not fit."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import E8M0_BIAS
from oss_fused.quant.mxfp4 import least_error_exponents, pack_mxfp4, unpack_mxfp4
from oss_fused.quant.mxfp4_rounding import (
    Mxfp4Rounder,
    find_kept,
    round_to_mxfp4,
)
from tests.quant.runs import Models


def test_a_weak_input_gives_up_its_value_for_the_others() -> None:
    values, power = torch.full((1, 32), 0.375), torch.ones(32)
    values[0, 0], power[0] = 4.0, 0.0
    # two binades lower 4.0 saturates at 1.5, and 0.375 is a code
    assert least_error_exponents(values, power).tolist() == [[-2]]


def test_errors_count_by_power_and_not_by_its_root() -> None:
    torch.manual_seed(0)
    values, power = torch.randn(256, 32), torch.logspace(-4, 4, 32)

    def errors(exponents: torch.Tensor) -> torch.Tensor:
        found = unpack_mxfp4(*pack_mxfp4(values, exponents), torch.float32)
        return ((found - values).square() * power).sum(-1)

    chosen = least_error_exponents(values, power)
    for shift in (-1, 1):
        assert (errors(chosen) <= errors(chosen + shift) * 1.0001).all()


def test_a_block_at_the_smallest_scale_gets_no_smaller_one() -> None:
    # the others would gain by an exponent of -128, which has no code
    values = torch.full((1, 32), 0.75 * 2.0**-127)
    values[0, 0] = 4.0 * 2.0**-127
    assert least_error_exponents(values).min() >= -E8M0_BIAS
    assert int(pack_mxfp4(values, least_error_exponents(values))[1]) == 0


def test_nan_is_refused_where_exponents_are_given() -> None:
    values = torch.full((1, 32), float("nan"))
    with pytest.raises(NumericalOverflowError, match="found NaN or Inf"):
        pack_mxfp4(values, torch.zeros(1, 1, dtype=torch.int32))


def test_shapes_that_only_have_the_right_number_of_elements() -> None:
    values = torch.ones(2, 3, 32)
    with pytest.raises(ShapeMismatchError, match=r"exponents\.shape=\(3, 2, 1\)"):
        pack_mxfp4(values, torch.zeros(3, 2, 1, dtype=torch.int32))
    with pytest.raises(ShapeMismatchError, match=r"blocks\.shape=\(4, 8\)"):
        unpack_mxfp4(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ShapeMismatchError, match=r"power\.shape=\(64,\)"):
        least_error_exponents(values, torch.ones(64))


def test_a_kept_block_keeps_a_scale_that_its_values_would_not_choose() -> None:
    base = torch.full((1, 1, 16), 0x11, dtype=torch.uint8), torch.full((1, 1), 127).byte()
    weight = torch.full((1, 32), 0.5)
    assert int(pack_mxfp4(weight)[1]) != 127
    found = round_to_mxfp4(weight, None, find_kept(weight, *base))
    assert all(torch.equal(one, other) for one, other in zip(found, base, strict=True))


def test_blocks_with_another_scale_are_not_the_bases(models: Models) -> None:
    reader = CheckpointReader(models("gpt-oss-mxfp4"))
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = (reader.read(f"{name}_{part}").clone() for part in ("blocks", "scales"))
    rounder = Mxfp4Rounder(base=reader)
    assert rounder.count_base(name, blocks, scales) == scales.numel()
    scales[0, 0, 0] += 1
    assert rounder.count_base(name, blocks, scales) == scales.numel() - 1
