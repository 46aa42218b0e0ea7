# SPDX-License-Identifier: MIT
"""Problem data classes and input validators: what they accept, and the error for each bad input."""

from __future__ import annotations

import pytest
import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDeviceError, UnsupportedDtypeError
from oss_fused.specs import (
    FP8GEMMInput,
    GatedMLPInput,
    RMSNormRoPEInput,
    TensorSpec,
    validate_fp8_gemm_inputs,
    validate_gated_mlp_inputs,
    validate_rmsnorm_rope_inputs,
)

FP8 = torch.float8_e4m3fn


def rope_args(**changes):
    return {**RMSNormRoPEInput(2, 3, 8, 4).make(), **changes}


def mlp_args(**changes):
    return {**GatedMLPInput(1, 3, 8, 16).make(), **changes}


def test_made_inputs_pass_their_own_validator():
    assert validate_rmsnorm_rope_inputs(**rope_args()) == RMSNormRoPEInput(2, 3, 8, 4)
    assert validate_gated_mlp_inputs(**mlp_args()) == GatedMLPInput(1, 3, 8, 16)
    assert validate_fp8_gemm_inputs(**FP8GEMMInput(2, 3, 4).make()) == FP8GEMMInput(2, 3, 4)


def test_made_inputs_are_reproducible_and_seeded():
    problem = GatedMLPInput(1, 3, 8, 16)
    assert torch.equal(problem.make(seed=1)["x"], problem.make(seed=1)["x"])
    assert not torch.equal(problem.make(seed=1)["x"], problem.make(seed=2)["x"])


def test_zero_tokens_are_valid():
    x = torch.empty(0, 3, 8, dtype=torch.bfloat16)
    assert validate_rmsnorm_rope_inputs(**rope_args(x=x)).batch_size == 0
    a, b = torch.empty(0, 4), torch.empty(4, 3)
    assert validate_fp8_gemm_inputs(a, b).m == 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": torch.zeros(3, 8)}, ShapeMismatchError, "x.shape=(3, 8)"),
        (
            {"weight": torch.zeros(9)},
            ShapeMismatchError,
            "weight.shape=(9,): expected [H] with H=8",
        ),
        ({"cos": torch.zeros(5, 4)}, ShapeMismatchError, "cos.shape=(5, 4)"),
        ({"sin": torch.zeros(3, 2)}, ShapeMismatchError, "sin.shape=(3, 2)"),
        ({"x": torch.zeros(2, 3, 8, dtype=torch.int32)}, UnsupportedDtypeError, "x.dtype"),
        ({"cos": torch.zeros(3, 4, device="meta")}, UnsupportedDeviceError, "cos.device=meta"),
        (
            {"cos": torch.zeros(3, 3), "sin": torch.zeros(3, 3)},
            ShapeMismatchError,
            "cos.shape=(3, 3): expected an even head_dim",
        ),
        ({"weight": torch.ones(8).int()}, UnsupportedDtypeError, "weight.dtype=torch.int32"),
        ({"cos": torch.ones(3, 4).bool()}, UnsupportedDtypeError, "cos.dtype=torch.bool"),
        ({"x": torch.zeros(2, 3, 8).double()}, UnsupportedDtypeError, "x.dtype=torch.float64"),
    ],
)
def test_bad_rmsnorm_rope_inputs(changes, error, words):
    with pytest.raises(error) as caught:
        validate_rmsnorm_rope_inputs(**rope_args(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": torch.zeros(7)}, ShapeMismatchError, "H=7"),
        ({"x": torch.zeros(3, 8).double()}, UnsupportedDtypeError, "x.dtype=torch.float64"),
        ({"gate_weight": torch.zeros(16, 7)}, ShapeMismatchError, "gate_weight.shape=(16, 7)"),
        ({"up_weight": torch.zeros(15, 8)}, ShapeMismatchError, "up_weight.shape=(15, 8)"),
        ({"up_weight": torch.zeros(16, 8)}, UnsupportedDtypeError, "up_weight.dtype=torch.float32"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'"),
    ],
)
def test_bad_gated_mlp_inputs(changes, error, words):
    with pytest.raises(error) as caught:
        validate_gated_mlp_inputs(**mlp_args(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 5)), ShapeMismatchError, "a.shape=(2, 3)"),
        ((torch.zeros(2), torch.zeros(2, 5)), ShapeMismatchError, "a.shape=(2,)"),
        ((torch.zeros(2, 3).double(), torch.zeros(3, 5)), UnsupportedDtypeError, "a.dtype"),
        (
            (torch.zeros(2, 3), torch.zeros(3, 5), torch.ones(3)),
            ShapeMismatchError,
            "a_scale.shape=(3,)",
        ),
        (
            (torch.zeros(2, 3), torch.zeros(3, 5), None, torch.ones(1).half()),
            UnsupportedDtypeError,
            "b_scale.dtype",
        ),
    ],
)
def test_bad_fp8_gemm_inputs(args, error, words):
    with pytest.raises(error) as caught:
        validate_fp8_gemm_inputs(*args)
    assert words in str(caught.value)


def test_gemm_output_dtype_follows_the_floating_operand():
    a, b = torch.zeros(2, 4).to(FP8), torch.zeros(4, 3, dtype=torch.float16)
    assert validate_fp8_gemm_inputs(a, b).out_dtype == torch.float16
    assert validate_fp8_gemm_inputs(a, b.to(FP8)).out_dtype == torch.bfloat16


def test_tensor_spec_round_trip_and_wildcard():
    tensor = torch.zeros(2, 3)
    spec = TensorSpec.of(tensor)
    spec.validate("x", tensor)
    assert spec.num_bytes == 24
    assert spec.empty().shape == tensor.shape
    free = TensorSpec((-1, 3), torch.float32)
    free.validate("x", torch.zeros(7, 3))
    with pytest.raises(ShapeMismatchError, match="unknown"):
        _ = free.num_bytes


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.zeros(2, 4), ShapeMismatchError),
        (torch.zeros(2, 3, 1), ShapeMismatchError),
        (torch.zeros(2, 3).half(), UnsupportedDtypeError),
        (torch.zeros(2, 3, device="meta"), UnsupportedDeviceError),
        (torch.zeros(3, 2).t(), ShapeMismatchError),
    ],
)
def test_tensor_spec_rejects(tensor, error):
    with pytest.raises(error, match=r"^x\."):
        TensorSpec((2, 3), torch.float32, contiguous=True).validate("x", tensor)


def test_counts_of_work():
    assert FP8GEMMInput(2, 3, 4).flops == 48
    assert FP8GEMMInput(2, 3, 4).num_bytes == 8 + 12 + 4 * 5 + 2 * 6
    assert GatedMLPInput(1, 2, 4, 8).flops == 4 * 2 * 4 * 8
    assert RMSNormRoPEInput(1, 2, 8, 4).num_bytes == 2 * (2 * 16 + 8 + 16)


def test_impossible_problems_are_rejected():
    with pytest.raises(ShapeMismatchError, match="head_dim=6"):
        RMSNormRoPEInput(1, 1, 8, 6)
    with pytest.raises(ShapeMismatchError, match="intermediate_dim=0"):
        GatedMLPInput(1, 1, 8, 0)
    with pytest.raises(UnsupportedDtypeError, match="out_dtype"):
        FP8GEMMInput(1, 1, 1, out_dtype=FP8)
    with pytest.raises(ShapeMismatchError, match="expected sizes"):
        TensorSpec((2, -2))
