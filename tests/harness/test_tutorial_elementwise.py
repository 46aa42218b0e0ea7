# SPDX-License-Identifier: MIT
"""The tutorial's elementwise kernels against PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from harness.tutorial_elementwise import add_scalar, gelu_tanh, relu

from oss_fused.errors import UnsupportedDtypeError


def add_three_tenths(x, **options):
    return add_scalar(x, 0.3, **options)


PAIRS = [
    pytest.param(relu, F.relu, id="relu"),
    pytest.param(gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), id="gelu"),
    pytest.param(add_three_tenths, lambda x: x + 0.3, id="add"),
]


@pytest.mark.parametrize(("kernel", "formula"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 127, 3000])
def test_equal_to_pytorch(kernel, formula, dtype, n, device):
    x = (3 * torch.randn(n, generator=torch.Generator().manual_seed(n))).to(dtype).to(device)
    unit = torch.finfo(dtype).eps
    wanted = formula(x.double()).to(dtype)
    torch.testing.assert_close(kernel(x, BLOCK_SIZE=128), wanted, rtol=8 * unit, atol=2 * unit)


@pytest.mark.parametrize(("kernel", "formula"), PAIRS)
def test_special_values_shapes_and_empty(kernel, formula, device):
    x = torch.tensor([[float("nan"), float("inf"), -200.0], [0.0, 1e6, -1e-7]], device=device)
    torch.testing.assert_close(kernel(x), formula(x), equal_nan=True)
    torch.testing.assert_close(kernel(x.t()[::2]), formula(x.t()[::2]), equal_nan=True)
    assert kernel(x[:0]).shape == (0, 3)
    with pytest.raises(UnsupportedDtypeError, match="x.dtype=torch.int64"):
        kernel(x.long())
