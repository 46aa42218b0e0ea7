# SPDX-License-Identifier: MIT
"""Copies of images between NCHW and NHWC."""

import pytest
import torch

from oss_fused.kernels.convolution.transpose import from_channels_last, to_channels_last

LAST = torch.channels_last
SHAPES = [(2, 5, 3, 4), (1, 70, 9, 8), (3, 33, 1, 1), (0, 8, 2, 2), (2, 64, 7, 7), (1, 130, 13, 5)]


def views(shape, dtype):
    """The values of one tensor, lying in memory in four ways."""
    x = torch.randn(shape).to(dtype)
    yield x
    yield x.transpose(2, 3).contiguous().transpose(2, 3)
    yield torch.cat([x, x, x], dim=1)[:, shape[1] : 2 * shape[1]]
    yield x.contiguous(memory_format=LAST)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_bit_for_bit(shape, dtype, device):
    for x in views(shape, dtype):
        x = x.to(device)
        last = to_channels_last(x)
        assert torch.equal(last, x) and last.is_contiguous(memory_format=LAST)
        out = torch.full(shape, float("nan"), dtype=dtype, device=device)
        from_channels_last(last, out)
        assert torch.equal(out, x)


def test_special_values_keep_their_bits(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]).repeat(7)
    x = x.view(1, 5, 7, 1).to(device)
    last = to_channels_last(x)
    assert torch.equal(last.contiguous().view(torch.int32), x.view(torch.int32))
