# SPDX-License-Identifier: MIT
"""``greedy_tokens``: kernel and twin against the largest value of each row."""

import pytest
import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.op import get_kernel

# 4096 columns fill one program
SHAPES = [(1, 1), (3, 40), (2, 4096), (2, 4097), (5, 9000)]


def run(backend, logits):
    arrivals = torch.zeros(logits.shape[0] + 1, dtype=torch.int32, device=logits.device)
    tokens = get_kernel(backend, "greedy_tokens")(logits, arrivals)
    assert tokens.dtype == torch.int64 and tokens.shape == logits.shape[:1]
    assert not arrivals.any()
    return tokens.tolist()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_largest_value_of_a_row(backend, dtype, rows, columns, device):
    values = torch.randn(rows, columns, dtype=torch.float64) - 20
    place = torch.randint(0, columns, (rows,))
    values[torch.arange(rows), place] = -0.25
    assert run(backend, values.to(device, dtype)) == place.tolist()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_first_of_equals_and_nan_above_all(backend, device):
    logits = torch.full((6, 9000), -3.0)
    logits[1, [8000, 77, 4100]] = 2.0
    # zeros of both signs are equal
    logits[2, 50], logits[2, 4200] = -0.0, 0.0
    logits[3, 100], logits[3, [8999, 5000]] = float("inf"), float("nan")
    logits[4, :] = float("-inf")
    logits[5, 20], logits[5, 4500] = 1.0, float("inf")
    assert run(backend, logits.to(device)) == [0, 77, 50, 5000, 0, 4500]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_wider_tensor_and_no_rows(backend, device):
    wide = torch.randn(4, 5000).to(device)
    wide[:, 4500:] = 99.0
    logits = wide[:, :4500]
    assert run(backend, logits) == run(backend, logits.contiguous())
    assert run(backend, logits[:0]) == []


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_offsets_of_a_head_with_tokens_of_its_own(backend, device):
    logits = torch.zeros(3, 9000, device=device)
    logits[[0, 1, 2], [5, 4096, 8999]] = 1.0
    offsets = 7 * torch.arange(9000, device=device)
    arrivals = torch.zeros(3, dtype=torch.int32, device=device)
    tokens = get_kernel(backend, "greedy_tokens")(logits, arrivals, offsets)
    assert tokens.tolist() == [40, 8 * 4096, 8 * 8999]


def test_bad_arguments(device):
    kernel = get_kernel("torch", "greedy_tokens")
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ShapeMismatchError, match="expected V >= 1"):
        kernel(torch.zeros(1, 0, device=device), zeros)
    with pytest.raises(ShapeMismatchError, match="arrivals"):
        kernel(torch.zeros(2, 3, device=device), zeros)
    with pytest.raises(ShapeMismatchError, match="offsets"):
        kernel(
            torch.zeros(1, 3, device=device),
            zeros,
            torch.zeros(2, dtype=torch.int64, device=device),
        )
