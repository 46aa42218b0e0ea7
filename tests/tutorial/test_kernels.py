# SPDX-License-Identifier: MIT
"""The kernels of the tutorial's chapters against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.chapters import chapter

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError

elementwise = chapter("05-elementwise-and-reduction")
steps = chapter("06-matmul")
rows = chapter("07-softmax-and-layernorm")
convolution = chapter("08-convolution")
attention = chapter("09-attention")

PLAIN = [steps.matmul_v0, steps.matmul_v1, steps.matmul_v2, steps.matmul_v3]
SHAPES = [(1, 1, 1), (9, 130, 33), (35, 20, 17)]
# the interpreter runs the inner loop of v0 in Python
PRODUCTS = [(steps.matmul_v0, (3, 130, 5))] + [(f, shape) for f in PLAIN[1:] for shape in SHAPES]


def add_three_tenths(x, **options):
    return elementwise.add_scalar(x, 0.3, **options)


PAIRS = [
    pytest.param(elementwise.relu, F.relu, id="relu"),
    pytest.param(elementwise.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), id="gelu"),
    pytest.param(add_three_tenths, lambda x: x + 0.3, id="add"),
]


@pytest.mark.parametrize(("kernel", "formula"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 127, 3000])
def test_elementwise_equals_pytorch(kernel, formula, dtype, n, device):
    x = (3 * torch.randn(n, generator=torch.Generator().manual_seed(n))).to(dtype).to(device)
    unit = torch.finfo(dtype).eps
    wanted = formula(x.double()).to(dtype)
    torch.testing.assert_close(kernel(x, BLOCK_SIZE=128), wanted, rtol=8 * unit, atol=2 * unit)


@pytest.mark.parametrize(("kernel", "formula"), PAIRS)
def test_special_values_shapes_and_empty_tensors(kernel, formula, device):
    x = torch.tensor([[float("nan"), float("inf"), -200.0], [0.0, 1e6, -1e-7]], device=device)
    torch.testing.assert_close(kernel(x), formula(x), equal_nan=True)
    torch.testing.assert_close(kernel(x.t()[::2]), formula(x.t()[::2]), equal_nan=True)
    assert kernel(x[:0]).shape == (0, 3)
    with pytest.raises(UnsupportedDtypeError, match="x.dtype=torch.int64"):
        kernel(x.long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_example_adds(dtype, device):
    a, b = (torch.randn(1500, dtype=dtype, device=device) for _ in range(2))
    assert torch.equal(elementwise.add(a, b, BLOCK_SIZE=256), a + b)
    assert torch.equal(elementwise.add(a[::2], b[::2]), a[::2] + b[::2])
    assert elementwise.add(a[:0], b[:0]).numel() == 0
    with pytest.raises(ShapeMismatchError, match=r"b\.shape=\(1499,\)"):
        elementwise.add(a, b[1:])
    with pytest.raises(UnsupportedDtypeError, match=r"b\.dtype"):
        elementwise.add(a, b.half())


def test_the_sum_of_any_length_is_the_same_on_every_run(device):
    for n in (1, 100, 300):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device)
        found = elementwise.total(x, 16)
        torch.testing.assert_close(found.double(), x.double().sum(), rtol=1e-5, atol=1e-5)
        assert torch.equal(found, elementwise.total(x, 16))
    assert elementwise.total(torch.zeros(0, device=device)) == 0
    assert elementwise.total(torch.full((1,), 3.0, dtype=torch.bfloat16, device=device)) == 3


def operands(m, n, k, dtype, device):
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, k, generator=generator).to(dtype).to(device)
    b = torch.randn(n, k, generator=generator).to(dtype).to(device)
    return a, b.t()


@pytest.mark.parametrize(("function", "shape"), PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_step_is_the_product(function, shape, dtype, device):
    a, b = operands(*shape, dtype, device)
    for layout in (b, b.contiguous()):
        result = check_accuracy(function(a, layout).cpu(), (a.double() @ b.double()).cpu())
        assert result.passed, result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_epilogue_is_bias_and_silu(shape, device):
    a, b = operands(*shape, torch.float32, device)
    bias = torch.randn(shape[1], device=device)
    expected = torch.nn.functional.silu(a.double() @ b.double() + bias.double())
    assert check_accuracy(steps.matmul_v4(a, b, bias).cpu(), expected.cpu()).passed
    with pytest.raises(ShapeMismatchError, match="bias"):
        steps.matmul_v4(a, b, bias[:0])


def test_nothing_to_multiply_and_bad_operands(device):
    empty = torch.empty(0, 4, device=device)
    four = torch.ones(4, 3, device=device)
    for function in PLAIN:
        assert function(empty, four).shape == (0, 3)
        assert (function(torch.ones(2, 0, device=device), four[:0]) == 0).all()
        with pytest.raises(ShapeMismatchError, match=r"a\.shape=\(4, 3\)"):
            function(four, four)
        with pytest.raises(UnsupportedDtypeError, match=r"b\.dtype"):
            function(four.t(), four.half())


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("n", "block"), [(1, 16), (65, 32), (64, 64)])
def test_softmax_of_both_forms(online, n, block, device):
    x = 30 * torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(device)
    found = rows.softmax(x, online, block)
    torch.testing.assert_close(found.double(), x.double().softmax(-1), rtol=1e-5, atol=1e-6)
    assert rows.softmax(x[:0], online, block).shape == (0, n)
    with pytest.raises(UnsupportedDtypeError, match="x.dtype=torch.int64"):
        rows.softmax(x.long())


@pytest.mark.parametrize("welford", [False, True])
def test_layer_norm_of_both_forms(welford, device):
    g = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(s, generator=g).to(device) for s in ((3, 70), (70,), (70,)))
    found = rows.layer_norm(x + 100, weight, bias, welford=welford, block=32)
    wanted = F.layer_norm((x + 100).double(), (70,), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", [convolution.conv_direct, convolution.conv_im2col])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (1, 2, 2)])
def test_convolution_with_stride_padding_and_dilation(way, stride, padding, dilation, device):
    g = torch.Generator().manual_seed(stride)
    x, w = (torch.randn(s, generator=g).to(device) for s in ((2, 3, 7, 6), (4, 3, 3, 2)))
    found = way(x, w, stride, padding, dilation)
    wanted = F.conv2d(x.double(), w.double(), None, stride, padding, dilation)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


# float32: sums in another order; bfloat16: logits and weights are rounded on the way
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def heads(n, m, d, dv, dtype, device):
    g = torch.Generator().manual_seed(n)
    shapes = ((1, 2, n, d), (1, 2, m, d), (1, 2, m, dv))
    return tuple(torch.randn(s, generator=g).to(dtype).to(device) for s in shapes)


@pytest.mark.parametrize("level", [attention.attention_a, attention.attention_b])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((33, 45, 20, 8), torch.float32), ((32, 64, 16, 40), torch.bfloat16)],
)
def test_levels_equal_pytorch(level, shape, dtype, device):
    tensors = heads(*shape, dtype, device)
    out = level(*tensors)
    wanted = F.scaled_dot_product_attention(*(t.double() for t in tensors))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    assert level(*(t[:0] for t in tensors)).shape == (0, 2, shape[0], shape[3])


def test_bad_arguments_of_attention_are_named(device):
    q, k, v = heads(4, 5, 8, 8, torch.float32, device)
    with pytest.raises(ShapeMismatchError, match=r"k.shape=\(1, 2, 5, 8\), v.shape=\(1, 2, 4, 8\)"):
        attention.attention_a(q, k, v[:, :, :4])
    with pytest.raises(ShapeMismatchError, match="of one D"):
        attention.attention_b(q, k[..., :4], v)
    with pytest.raises(UnsupportedDtypeError, match="v.dtype"):
        attention.attention_b(q, k, v.half())


def test_a_gated_mlp_of_two_accumulators(device):
    g = torch.Generator().manual_seed(5)
    shapes = ((5, 40), (33, 40), (33, 40))
    x, gate, up = (torch.randn(s, generator=g).to(torch.bfloat16).to(device) for s in shapes)
    found = chapter("12-epilogue-patterns").gated(x, gate, up)
    wanted = F.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    assert check_accuracy(found, wanted).passed


def test_rows_of_codes_are_those_of_the_package(device):
    from oss_fused import quantize_fp8

    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(6)).to(device)
    x[1], x[2, 3], x[3, 0] = 0.0, float("nan"), 1e6
    q, scale = chapter("13-mixed-precision").quantize_rows(x, 32)
    wanted, wanted_scale = quantize_fp8(x, strategy="token")
    assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(scale, wanted_scale, rtol=0, atol=0, equal_nan=True)
