# SPDX-License-Identifier: MIT
"""softmax against PyTorch: both methods, every dtype, rows beyond registers, special values."""

import pytest
import torch

from oss_fused import softmax
from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import get_kernel

METHODS = ["two_pass", "online"]
# float32: the bar; halves: one rounding of the result, and an order of sums that may cross a tie
TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-24},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-30},
}


def run(x, method, backend="triton"):
    return get_kernel(backend, "softmax")(x, method)


def normal(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def assert_softmax(x, method):
    wanted = torch.softmax(x.double(), -1)
    for backend in ("torch", "triton"):
        y = run(x, method, backend)
        assert y.dtype == x.dtype and y.shape == x.shape
        torch.testing.assert_close(y.double(), wanted, equal_nan=True, **TOLERANCE[x.dtype])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 1), (3, 2, 100), (200, 7), (2, 4096), (2, 9000)])
def test_equal_to_pytorch(method, dtype, shape, device):
    assert_softmax(normal(*shape, dtype=dtype, device=device) * 3, method)


@pytest.mark.parametrize("method", METHODS)
def test_rows_beyond_registers(method, device):
    x = normal(2, 70001, device=device)
    x[1, -1] = 30.0  # the running maximum changes in the last tile
    assert_softmax(x, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-7, 65000.0, 1e6, -1e6])
def test_constant_rows(method, fill, device):
    x = torch.full((2, 4100), fill, device=device)
    torch.testing.assert_close(run(x, method), torch.full_like(x, 1 / 4100), rtol=1e-6, atol=0)
    x[:, 3] += abs(fill) + 200
    assert run(x, method)[:, 3].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("method", METHODS)
def test_special_values_stay_in_their_row(method, device):
    x = normal(6, 5000, device=device)
    x[0, 4500] = float("nan")
    x[1, 0] = float("inf")
    x[2] = float("-inf")
    x[3, :4096] = float("-inf")  # a first tile without weight
    y = run(x, method)
    assert y[:3].isnan().all() and y[3:].isfinite().all()
    assert_softmax(x, method)


@pytest.mark.parametrize("method", METHODS)
def test_empty_strided_and_short_rows(method, device):
    for shape in ((0, 5), (3, 0), (2, 0, 4)):
        for backend in ("torch", "triton"):
            assert run(torch.empty(shape, device=device), method, backend).shape == shape
    wide = normal(4, 300, device=device)
    for x in (wide[:, :130], wide[::2, 1:], wide[:, :9].t(), wide[:, ::2], wide[0]):
        assert_softmax(x, method)


def test_bad_arguments_are_named(device):
    x = torch.zeros(2, 3, device=device)
    with pytest.raises(SchemeError, match="method='three_pass': expected one of two_pass, online"):
        softmax(x, method="three_pass")
    with pytest.raises(UnsupportedDtypeError, match="x.dtype=torch.int64"):
        softmax(x.long())
    with pytest.raises(ShapeMismatchError, match=r"x.shape=\(\)"):
        softmax(torch.zeros((), device=device))


def test_gradient(device):
    x = normal(3, 50, device=device).requires_grad_()
    weight = normal(3, 50, device=device)
    (found,) = torch.autograd.grad((softmax(x) * weight).sum(), x)
    (wanted,) = torch.autograd.grad((torch.softmax(x, -1) * weight).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_opcheck(device, check_op):
    for method in METHODS:
        check_op(torch.ops.oss_fused.softmax.default, (normal(3, 64, device=device), method))
