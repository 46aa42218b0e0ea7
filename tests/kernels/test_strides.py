# SPDX-License-Identifier: MIT
"""A view of an operand is read as what it shows, by every operation and backend, or is refused."""

from __future__ import annotations

import functools

import pytest
import torch

from oss_fused.bench.runner import shared_operations
from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import as_rows
from oss_fused.kernels.op import OPERATIONS, get_kernel

FP8 = torch.float8_e4m3fn
# NaN where it has one: what lies between the elements must not be read
FILLERS = {torch.int32: 1, torch.int64: 1, torch.uint8: 1}
VIEWS = [
    pytest.param(operation, backend, i, id=f"{operation}-{backend}-{name}")
    for operation, backends in shared_operations().items()
    for backend in backends
    if backend in ("triton", "cpu")
    for contract in [OPERATIONS[operation].contract]
    for i, (name, value) in enumerate(zip(contract.names, contract.example()))
    if isinstance(value, torch.Tensor) and value.numel() > 1
]


def copies(args, device):
    def copy(value):
        if isinstance(value, list):
            return [copy(each) for each in value]
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    return [copy(value) for value in args]


def view_of(tensor, spread):
    """The same values in wider memory: in every second place, or with gaps behind the rows."""
    shape = [2 * size if spread else size for size in tensor.shape]
    shape[-1] += 0 if spread else 16
    wide = torch.full(shape, FILLERS.get(tensor.dtype, float("nan")), device=tensor.device)
    wide = wide.to(tensor.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in shape)] if spread else wide
    view = view[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def results(operation, backend, args):
    """What it returns and, after it, its arguments: some are written to."""
    found = get_kernel(backend, operation)(*args)
    found = [found] if isinstance(found, torch.Tensor) else list(found or ())
    return [t.float() for t in (*found, *args) if isinstance(t, torch.Tensor)]


@functools.cache
def expected_of(operation, backend, device):
    return results(operation, backend, copies(OPERATIONS[operation].contract.example(), device))


@pytest.mark.parametrize(("operation", "backend", "position"), VIEWS)
def test_a_view_is_read_as_what_it_shows(operation, backend, position, device):
    example = OPERATIONS[operation].contract.example()
    expected = expected_of(operation, backend, device)
    for spread in (True, False):
        args = copies(example, device)
        args[position] = view_of(args[position], spread)
        try:
            found = results(operation, backend, args)
        except ShapeMismatchError as error:
            name = OPERATIONS[operation].contract.names[position]
            assert str(error).startswith(f"{name}."), error
            assert "contiguous" in str(error) or "unit stride" in str(error)
            continue
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0.01, atol=0.01, equal_nan=True)


def test_rows_of_any_shape():
    """Of a scalar, too; a view where the last dimension has unit stride."""
    for shape, rows in (((), (1, 1)), ((3,), (1, 3)), ((2, 0, 3), (0, 3)), ((2, 4, 3), (8, 3))):
        assert as_rows(torch.zeros(shape)).shape == rows
    x = torch.zeros(4, 3)
    assert as_rows(x[:, ::2]).is_contiguous() and as_rows(x[::2]).data_ptr() == x.data_ptr()
