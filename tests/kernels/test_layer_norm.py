# SPDX-License-Identifier: MIT
"""LayerNorm, its statistics and its dropout against PyTorch and against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from oss_fused import layer_norm, layer_norm_dropout, layer_norm_stats
from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.random_mask import drop_threshold, fold_seed, keep_mask

METHODS = ["two_pass", "welford"]
EPS = 1e-5
# float32: the bar, relative to values of 1; halves: one rounding, and a tie that sums may cross
TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4},
}


def inputs(*shape, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g) * 2 + 1
    weight = torch.rand(shape[-1], generator=g) + 0.5
    bias = torch.randn(shape[-1], generator=g)
    return tuple(t.to(dtype).to(device) for t in (x, weight, bias))


def run(name, *args, backend="triton"):
    return get_kernel(backend, name)(*args)


def wanted_norm(x, weight, bias):
    wide = (None if t is None else t.double() for t in (weight, bias))
    return F.layer_norm(x.double(), x.shape[-1:], *wide, EPS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 1), (3, 2, 100), (200, 7), (2, 4096), (2, 9000)])
def test_equal_to_pytorch(method, dtype, shape, device):
    x, weight, bias = inputs(*shape, dtype=dtype, device=device)
    for pair in ((weight, bias), (None, None)):
        for backend in ("torch", "triton"):
            y = run("layer_norm", x, *pair, EPS, method, backend=backend)
            assert y.dtype == dtype and y.shape == x.shape
            torch.testing.assert_close(y.double(), wanted_norm(x, *pair), **TOLERANCE[dtype])


@pytest.mark.parametrize("method", METHODS)
def test_rows_beyond_registers(method, device):
    x, weight, bias = inputs(2, 70001, device=device)
    y = run("layer_norm", x, weight, bias, EPS, method)
    torch.testing.assert_close(y.double(), wanted_norm(x, weight, bias), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("columns", [100, 4096, 9000])
def test_stats(method, columns, device):
    # a mean far above the spread: a sum of squares would lose all of the variance
    x = (torch.randn(3, columns, generator=torch.Generator().manual_seed(1)) + 1000).to(device)
    for backend in ("torch", "triton"):
        mean, var = run("layer_norm_stats", x, method, backend=backend)
        assert mean.dtype == var.dtype == torch.float32 and mean.shape == var.shape == (3,)
        torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=1e-6, atol=0)
        variance = x.double().var(-1, correction=0)
        torch.testing.assert_close(var.double(), variance, rtol=2e-5, atol=0)
    found = layer_norm_stats(x.view(3, 1, columns), method=method)
    assert found[0].shape == (3, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-7, 65000.0, 1e6])
def test_constant_rows_give_the_bias(method, fill, device):
    x, weight, bias = inputs(2, 4100, device=device)
    y = run("layer_norm", torch.full_like(x, fill), weight, bias, EPS, method)
    # rounding of the mean of equal values, over sqrt(eps)
    slack = abs(fill) * 2e-7 / EPS**0.5 * 2
    torch.testing.assert_close(y, bias.expand_as(y), rtol=1e-6, atol=1e-6 + slack)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_special_values_stay_in_their_row(method, bad, device):
    x, weight, bias = inputs(3, 5000, device=device)
    x[1, 4999] = bad
    y = run("layer_norm", x, weight, bias, EPS, method)
    assert y[1].isnan().all() and y[0].isfinite().all() and y[2].isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_empty_and_strided(method, device):
    x, weight, bias = inputs(4, 300, device=device)
    for backend in ("torch", "triton"):
        empty = run("layer_norm", x[:0], weight, bias, EPS, method, backend=backend)
        assert empty.shape == (0, 300)
        assert run("layer_norm_stats", x[:0], method, backend=backend)[0].shape == (0,)
    for part in (x[:, :130], x[::2, 1:], x[:, :9].t(), x[:, ::2], x[0]):
        pair = (weight[: 2 * part.shape[-1] : 2][: part.shape[-1]], None)
        if pair[0].numel() != part.shape[-1]:
            pair = (None, None)
        y = run("layer_norm", part, *pair, EPS, method)
        torch.testing.assert_close(y.double(), wanted_norm(part, *pair), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(40, 70), (2, 33000)])
def test_dropout_is_the_mask_times_the_norm(backend, shape, device):
    x, weight, bias = inputs(*shape, device=device)
    dropped = run("layer_norm_dropout", x, weight, bias, EPS, 0.25, 7, backend=backend)
    rows = torch.arange(shape[0], device=device)[:, None]
    mask = keep_mask(7, rows, torch.arange(shape[1], device=device), 0.25)
    y = wanted_norm(x, weight, bias) / 0.75
    torch.testing.assert_close(dropped.double(), y.where(mask, 0.0), rtol=1e-5, atol=5e-6)
    again = run("layer_norm_dropout", x, weight, bias, EPS, 0.25, 7, backend=backend)
    other = run("layer_norm_dropout", x, weight, bias, EPS, 0.25, 8, backend=backend)
    assert torch.equal(dropped, again) and not torch.equal(dropped, other)


def test_the_mask_drops_its_share_without_pattern():
    rows, columns = torch.arange(512)[:, None], torch.arange(512)
    for p in (0.0, 0.1, 0.5, 0.9):
        keep = keep_mask(3, rows, columns, p).double()
        # five standard deviations of a share of 2**18 coins
        assert abs(float(keep.mean()) - (1 - p)) <= 5 * (p * (1 - p)) ** 0.5 / 512
        if p:
            for other in (
                keep.roll(1, 0),
                keep.roll(1, 1),
                keep.t(),
                keep_mask(4, rows, columns, p),
            ):
                both = float((keep * other).mean())
                assert abs(both - (1 - p) ** 2) < 0.01
    # rows beyond 2**32 and seeds of 64 bits have masks of their own
    far = keep_mask(3, rows + (1 << 32), columns, 0.5)
    assert 0.45 < float((far == keep_mask(3, rows, columns, 0.5)).double().mean()) < 0.55
    assert fold_seed(3) != fold_seed(3 + (1 << 32)) and -(2**31) <= fold_seed(2**63 - 1) < 2**31
    assert drop_threshold(0.0) == 0 and drop_threshold(0.5) == 2**31


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gradients(p, device):
    x, weight, bias = (t.requires_grad_() for t in inputs(4, 33, device=device))
    grad = torch.randn(4, 33, generator=torch.Generator().manual_seed(5)).to(device)
    if p:
        y = layer_norm_dropout(x, weight, bias, EPS, p=p, seed=9)
    else:
        y = layer_norm(x, weight, bias, EPS)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    rows = torch.arange(4, device=device)[:, None]
    mask = keep_mask(9, rows, torch.arange(33, device=device), p) / (1 - p)
    formula = F.layer_norm(x, (33,), weight, bias, EPS) * mask
    for ours, theirs in zip(found, torch.autograd.grad(formula, (x, weight, bias), grad)):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_mixed_dtypes_and_missing_weights(device):
    x, weight, _ = inputs(4, 33, device=device)
    x = x.bfloat16().requires_grad_()
    weight = weight.requires_grad_()
    dx, dw = torch.autograd.grad(layer_norm(x, weight).sum(), (x, weight))
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    (alone,) = torch.autograd.grad(layer_norm(x).float().pow(2).sum(), x)
    assert alone.isfinite().all()


def test_bad_arguments_are_named(device):
    x, weight, bias = inputs(2, 64, device=device)
    with pytest.raises(ShapeMismatchError, match="weight.shape"):
        layer_norm(x, weight[:3])
    with pytest.raises(ShapeMismatchError, match=r"x.shape=\(2, 0\): expected hidden at least 1"):
        layer_norm(x[:, :0])
    with pytest.raises(UnsupportedDtypeError, match="bias.dtype"):
        layer_norm(x, weight, bias.long())
    with pytest.raises(SchemeError, match="eps=-1.0"):
        layer_norm(x, eps=-1.0)
    with pytest.raises(SchemeError, match="method='naive'"):
        layer_norm_stats(x, method="naive")
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(SchemeError, match="p="):
            layer_norm_dropout(x, p=p, seed=0)
