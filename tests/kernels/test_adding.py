# SPDX-License-Identifier: MIT
"""CONTRIBUTING.md's steps to add an operation and a backend, followed in a temporary package."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from oss_fused.bench.runner import shared_operations
from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.op import OPERATIONS, get_kernel
from tests.kernels import test_backends, test_declarations

NAME = "weighted_sum"
REFERENCE = '''
from __future__ import annotations

import torch


def weighted_sum(x: torch.Tensor, weight: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Sum of each row of ``x`` [M, N] times ``weight`` [N], plus ``shift``."""
    return (x * weight).sum(1) + shift
'''
TRITON = """
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _weighted_sum_kernel(x, weight, out, n, stride, shift, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + column, mask=column < n, other=0.0)
    weights = tl.load(weight + column, mask=column < n, other=0.0)
    tl.store(out + row, tl.sum(values * weights, 0) + shift)


def weighted_sum(x: torch.Tensor, weight: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    rows, n = x.shape
    out = x.new_empty(rows)
    block = triton.next_power_of_2(n)
    _weighted_sum_kernel[(rows,)](x, weight, out, n, x.stride(0), shift, BLOCK=block)
    return out
"""
DECLARATION = """
import torch

from oss_fused.kernels.contract import Between, Operand
from oss_fused.kernels.op import declare
from weighted import reference

declare(
    reference.weighted_sum,
    {
        "x": Operand("M N", torch.float32, contiguous=True),
        "weight": Operand("N", torch.float32, contiguous=True),
        "shift": Between(-1.0, 1.0),
    },
    {"triton": "triton"},
    example={"M": 5, "N": 12, "shift": 0.5},
)
"""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """An operation's folder: a twin, a kernel, a declaration."""
    folder = tmp_path_factory.mktemp("adding") / "weighted"
    folder.mkdir()
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "triton.py").write_text(TRITON)
    (folder / "__init__.py").write_text(DECLARATION)
    sys.path.insert(0, str(folder.parent))
    importlib.import_module("weighted")
    yield
    sys.path.remove(str(folder.parent))
    del OPERATIONS[NAME]


def test_the_schema_is_the_signature_of_the_twin():
    schema = str(torch.ops.oss_fused.weighted_sum.default._schema)
    assert schema == "oss_fused::weighted_sum(Tensor x, Tensor weight, float shift=0.) -> Tensor"


def test_the_example_runs_and_the_fake_agrees(check_op):
    x, weight, shift = OPERATIONS[NAME].contract.example()
    assert x.shape == (5, 12) and weight.shape == (12,) and shift == 0.5
    torch.testing.assert_close(torch.ops.oss_fused.weighted_sum(x, weight, shift), x @ weight + 0.5)
    test_declarations.test_the_fake_has_the_shapes_and_dtypes_of_the_result(NAME, check_op)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments_are_named(backend, device):
    x, weight = torch.ones(2, 3, device=device), torch.ones(4, device=device)
    with pytest.raises(ShapeMismatchError, match=r"weight.shape=\(4,\): expected \[N\] with N=3"):
        get_kernel(backend, NAME)(x, weight)
    with pytest.raises(SchemeError, match=r"shift=2.0: expected -1.0 to 1.0"):
        torch.ops.oss_fused.weighted_sum(x, weight[:3], 2.0)
    test_declarations.test_a_wrong_argument_is_named(NAME)


def test_the_backends_are_found_and_compared(device):
    assert shared_operations()[NAME] == ["torch", "triton"]
    case = OPERATIONS[NAME].contract.example()
    test_backends.test_backends_agree(NAME, "triton", case, device)
