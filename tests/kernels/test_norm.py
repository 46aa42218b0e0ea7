# SPDX-License-Identifier: MIT
"""add_rms_norm_quant against its reference and against the unfused operations."""

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.norm.triton import sums_norm_quant
from oss_fused.kernels.op import get_kernel

EPS = 1e-5


def inputs(rows, hidden, dtype, device, residual=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g).to(dtype)
    r = (torch.randn(rows, hidden, generator=g) * 3).to(dtype) if residual else None
    w = (torch.rand(hidden, generator=g) + 0.5).to(dtype)
    return tuple(None if t is None else t.to(device) for t in (x, r, w))


def run(backend, *args):
    return get_kernel(backend, "add_rms_norm_quant")(*args)


def assert_close(ours, expected, dtype):
    """The sum's order may move a value by one unit of x's dtype, and its code by one step."""
    q, scale, residual, normed, _ = ours
    assert torch.equal(residual, expected[2])
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(normed.float(), expected[3].float(), rtol=unit, atol=1e-30)
    torch.testing.assert_close(scale, expected[1], rtol=unit, atol=0)
    same = (q.view(torch.uint8) == expected[0].view(torch.uint8)).float().mean()
    assert same > 0.99
    torch.testing.assert_close(
        q.float() * scale,
        expected[0].float() * expected[1],
        rtol=0.14,
        atol=float(scale.max()) / 64,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [576, 2880, 4096, 130])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_equal_to_reference(dtype, hidden, residual, static, device):
    x, r, w = inputs(5, hidden, dtype, device, residual)
    scale = torch.full((1,), 0.01, device=device) if static else None
    args = (x, r, w, EPS, scale)
    assert_close(run("triton", *args), run("torch", *args), dtype)


def test_codes_are_those_of_the_normed_row(device):
    x, r, w = inputs(4, 576, torch.bfloat16, device)
    q, scale, _, normed, _ = run("triton", x, r, w, EPS, None)
    again, again_scale = get_kernel("triton", "quantize_fp8")(normed, None, "token")
    assert torch.equal(scale, again_scale)
    assert torch.equal(q.view(torch.uint8), again.view(torch.uint8))


def test_a_row_has_the_same_bits_in_batches_that_stream(device):
    x, r, w = inputs(1026, 40, torch.bfloat16, device)
    many = run("triton", x, r, w, EPS, None)
    few = run("triton", x[1020:], r[1020:], w, EPS, None)
    for ours, theirs in zip(many, few):
        assert torch.equal(ours[1020:].view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("hidden", [130, 4096])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("tokens", [3, 65])
def test_parts_of_a_sum_are_rounded_together(hidden, static, tokens, device):
    """Float32 parts far larger than their sum, which is rounded before the residual comes."""
    x, r, w = inputs(tokens, hidden, torch.float32, device)
    r, w = r.bfloat16(), w.bfloat16()
    large = 256.0 * torch.randint(-8, 9, x.shape).to(device)
    parts = torch.stack([large, x - large])
    x = parts.sum(0).bfloat16()
    scale = torch.full((1,), 0.01, device=device) if static else None
    got = sums_norm_quant(parts, r, w, EPS, scale, False, 0)
    want = run("triton", x, r, w, EPS, scale, False)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_rows_are_nan_after_dequantisation(backend, bad, device):
    x, r, w = inputs(3, 576, torch.bfloat16, device)
    x[1, 7] = bad
    q, scale, *_ = run(backend, x, r, w, EPS, None)
    values = q.float() * scale
    assert values[1].isnan().any() and not scale[1].isfinite().any()
    assert values[0].isfinite().all() and values[2].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_empty_and_without_normed(backend, device):
    x, r, w = inputs(0, 64, torch.bfloat16, device)
    assert [t.shape[0] for t in run(backend, x, r, w, EPS, None)] == [0, 0, 0, 0, 0]
    x, r, w = inputs(2, 64, torch.bfloat16, device)
    full, lean = run(backend, x, r, w, EPS, None), run(backend, x, r, w, EPS, None, False)
    assert lean[3].numel() == 0
    assert torch.equal(full[0].view(torch.uint8), lean[0].view(torch.uint8))


def test_strided_rows_and_leading_dimensions(device):
    x, r, w = inputs(6, 256, torch.bfloat16, device)
    wide = torch.cat([x, x], -1)
    want = run("triton", x, r, w, EPS, None)
    got = run("triton", wide[:, :256].view(2, 3, 256), r.view(2, 3, 256), w, EPS, None)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert a.shape[:2] == (2, 3)
        assert torch.equal(a.flatten(0, 1).float(), b.float())


def test_bad_arguments_are_named(device):
    x, r, w = inputs(2, 64, torch.bfloat16, device)
    with pytest.raises(ShapeMismatchError, match="weight.shape"):
        run("triton", x, r, w[:32], EPS, None)
    with pytest.raises(ShapeMismatchError, match="residual.shape"):
        run("torch", x, r[:1], w, EPS, None)


def test_opcheck(device, check_op):
    x, r, w = inputs(3, 64, torch.bfloat16, device)
    op = torch.ops.oss_fused.add_rms_norm_quant.default
    check_op(op, (x, r, w, EPS, None))
    check_op(op, (x, None, w, EPS, torch.ones(1, device=device), False))
