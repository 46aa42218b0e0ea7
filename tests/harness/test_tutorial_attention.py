# SPDX-License-Identifier: MIT
"""The levels of attention of the tutorial against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from harness.tutorial_attention import attention_a, attention_b

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError

# float32: sums in another order; bfloat16: logits and weights are rounded on the way
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def operands(n, m, d, dv, dtype, device):
    g = torch.Generator().manual_seed(n)
    shapes = ((1, 2, n, d), (1, 2, m, d), (1, 2, m, dv))
    return tuple(torch.randn(s, generator=g).to(dtype).to(device) for s in shapes)


@pytest.mark.parametrize("level", [attention_a, attention_b])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((33, 45, 20, 8), torch.float32), ((32, 64, 16, 40), torch.bfloat16)],
)
def test_levels_equal_pytorch(level, shape, dtype, device):
    tensors = operands(*shape, dtype, device)
    out = level(*tensors)
    wanted = F.scaled_dot_product_attention(*(t.double() for t in tensors))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    assert level(*(t[:0] for t in tensors)).shape == (0, 2, shape[0], shape[3])


def test_bad_arguments_are_named(device):
    q, k, v = operands(4, 5, 8, 8, torch.float32, device)
    with pytest.raises(ShapeMismatchError, match=r"k.shape=\(1, 2, 5, 8\), v.shape=\(1, 2, 4, 8\)"):
        attention_a(q, k, v[:, :, :4])
    with pytest.raises(ShapeMismatchError, match="of one D"):
        attention_b(q, k[..., :4], v)
    with pytest.raises(UnsupportedDtypeError, match="v.dtype"):
        attention_b(q, k, v.half())
