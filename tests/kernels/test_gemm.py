# SPDX-License-Identifier: MIT
"""fp8_gemm and fp8_linear against float64 and against each other."""

import pytest
import torch

from oss_fused import fp8_gemm
from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.checks import has_aligned_rows
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
# one rounding to the output format; float32: what the tensor cores' own accumulator drops
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-4}


def operands(m, n, k, device, rows=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=g).to(FP8)
    b = torch.randn(n, k, generator=g).to(FP8)
    a_scale = torch.rand(*((m, 1) if rows else (1,)), generator=g) + 0.5
    b_scale = torch.rand(*((n, 1) if rows else (1,)), generator=g) + 0.5
    bias = torch.randn(n, generator=g).to(torch.bfloat16)
    return tuple(t.to(device) for t in (a, b, a_scale, b_scale, bias))


def exact(a, b, a_scale, b_scale, bias):
    out = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().view(1, -1)
    return out if bias is None else out + bias.double()


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "m,n,k",
    [
        (1, 64, 128),
        (1, 100, 576),
        (2, 96, 272),
        (4, 33, 160),
        (7, 65, 96),
        (17, 130, 48),
        (33, 31, 17),
    ],
)
@pytest.mark.parametrize("rows", [True, False])
def test_gemm(backend, m, n, k, rows, device):
    args = operands(m, n, k, device, rows)
    for bias in (None, args[4]):
        got = get_kernel(backend, "fp8_gemm")(*args[:4], bias, torch.bfloat16)
        assert got.dtype == torch.bfloat16
        assert relative_error(got, exact(*args[:4], bias)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
def test_gemm_out_dtypes(out_dtype, device):
    args = operands(5, 48, 64, device)
    got = get_kernel("triton", "fp8_gemm")(*args, out_dtype)
    assert relative_error(got, exact(*args)) < TOLERANCE[out_dtype]


@pytest.mark.parametrize("m", [1, 3, 20])
def test_identity_is_exact(m, device):
    a = torch.randn(m, 64).to(FP8).to(device)
    eye = torch.eye(64).to(FP8).to(device)
    one = torch.ones(1, device=device)
    got = get_kernel("triton", "fp8_gemm")(a, eye, one, one, None, torch.float32)
    assert torch.equal(got, a.float())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("m", [1, 2, 20])
def test_nan_stays_in_its_row(backend, m, device):
    a, b, a_scale, b_scale, _ = operands(m + 1, 40, 64, device)
    codes = a.view(torch.uint8).clone()
    codes[m, 5] = 0x7F
    got = get_kernel(backend, "fp8_gemm")(
        codes.view(FP8), b, a_scale, b_scale, None, torch.bfloat16
    )
    assert got[m].isnan().all() and got[:m].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_empty(backend, device):
    a, b, a_scale, b_scale, bias = operands(0, 40, 64, device)
    out = get_kernel(backend, "fp8_gemm")(a, b, a_scale, b_scale, bias, torch.bfloat16)
    assert out.shape == (0, 40)
    a, b, a_scale, b_scale, bias = operands(5, 48, 0, device)
    out = get_kernel(backend, "fp8_gemm")(a, b, a_scale, b_scale, bias, torch.bfloat16)
    assert torch.equal(out, bias.to(out.dtype).expand(5, 48))


@pytest.mark.parametrize("m", [1, 3, 20])
def test_strided_rows(m, device):
    a, b, a_scale, b_scale, bias = operands(m, 40, 64, device)
    wide_a = torch.zeros(m, 96, dtype=torch.uint8, device=device).view(FP8)
    wide_a.view(torch.uint8)[:, 16:80] = a.view(torch.uint8)
    gemm = get_kernel("triton", "fp8_gemm")
    want = gemm(a, b, a_scale, b_scale, bias, torch.bfloat16)
    assert torch.equal(want, gemm(wide_a[:, 16:80], b, a_scale, b_scale, bias, torch.bfloat16))


@pytest.mark.parametrize("m", [1, 2, 5, 20])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_is_quantise_then_gemm(m, static, dtype, device):
    _, w, _, w_scale, bias = operands(1, 72, 144, device)
    x = (torch.randn(m, 2, 144) * 3).to(dtype).to(device)
    input_scale = torch.full((1,), 0.01, device=device) if static else None
    linear = get_kernel("triton", "fp8_linear")(x, w, w_scale, input_scale, bias)
    q, scale = get_kernel("triton", "quantize_fp8")(
        x.view(-1, 144), input_scale, "tensor" if static else "token"
    )
    split = get_kernel("triton", "fp8_gemm")(q, w, scale, w_scale, bias, dtype)
    assert linear.shape == (m, 2, 72) and linear.dtype == dtype
    assert relative_error(linear.view(-1, 72), split.double()) < TOLERANCE[dtype]
    twin = get_kernel("torch", "fp8_linear")(x, w, w_scale, input_scale, bias)
    assert relative_error(linear, twin.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_in_one_launch(m, dtype, device, monkeypatch):
    """K a multiple of the block: the kernel quantises, to the codes that two launches give."""
    monkeypatch.setattr("oss_fused.kernels.gemm.triton.FUSED_ROWS", 2)
    _, w, _, w_scale, bias = operands(1, 20, 2048, device)
    x = (torch.randn(m, 2048) * 3).to(dtype).to(device)
    x[0, 5] = 0.0
    got = get_kernel("triton", "fp8_linear")(x, w, w_scale, None, bias)
    q, scale = get_kernel("triton", "quantize_fp8")(x, None, "token")
    want = get_kernel("triton", "fp8_gemm")(q, w, scale, w_scale, bias, dtype)
    assert relative_error(got, want.double()) < 2**-9
    twin = get_kernel("torch", "fp8_linear")(x, w, w_scale, None, bias)
    assert relative_error(got, twin.double()) < TOLERANCE[dtype]
    x[m - 1, 7] = float("inf")
    got = get_kernel("triton", "fp8_linear")(x, w, w_scale, None, bias)
    assert got[m - 1].isnan().all() and got[: m - 1].isfinite().all()


@pytest.mark.parametrize(
    ("m", "n", "k", "levels", "slices"),
    [
        (1, 4096, 4096, 2, 1),
        (1, 4096, 14336, 1, 2),
        # more rows, weights that all fit shared memory, more columns than registers, two waves
        (2, 4096, 4096, 2, None),
        (1, 2880, 4096, 2, None),
        (1, 4096, 16400, 1, None),
        (1, 28672, 8192, 2, None),
        (0, 4096, 4096, 2, None),
        (1, 4096, 0, 2, None),
    ],
)
def test_a_product_quantises_a_row_while_weights_arrive(monkeypatch, m, n, k, levels, slices):
    from oss_fused.kernels.gemm import triton as gemm

    monkeypatch.setattr(gemm, "runs_gluon", lambda device: True)
    row, weight = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=FP8)
    tile = gemm._one_launch(row, weight, levels)
    if slices is None:
        assert tile is None
        return
    assert tile is not None and tile["kernel"] == "stream" and tile.get("slices", 1) == slices
    assert gemm._one_launch(row.float(), weight, levels) is None
    assert (
        gemm._one_launch(torch.empty(1, 2 * k, dtype=torch.bfloat16)[:, 1 : k + 1], weight, levels)
        is None
    )


def test_reference_takes_unpacked_weights():
    a, w, _, w_scale, bias = operands(3, 24, 64, "cpu")
    x = a.float()
    linear = get_kernel("torch", "fp8_linear")
    assert torch.equal(linear(x, w, w_scale, None, bias), linear(x, w.float(), w_scale, None, bias))


def test_functional_quantises_what_is_not_fp8(device):
    a = torch.randn(6, 64).to(torch.bfloat16).to(device)
    b = torch.randn(64, 40).to(torch.bfloat16).to(device)
    got = fp8_gemm(a, b)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, a.double() @ b.double()) < 0.05


def test_bad_arguments_are_named(device):
    a, b, a_scale, b_scale, _ = operands(3, 8, 16, device)
    gemm = get_kernel("triton", "fp8_gemm")
    with pytest.raises(ShapeMismatchError, match=r"b.shape=\(8, 8\): .* with N=8, K=16"):
        gemm(a, b[:, :8], a_scale, b_scale, None, torch.bfloat16)
    with pytest.raises(ShapeMismatchError, match="b_scale.shape"):
        gemm(a, b, a_scale, b_scale[:4], None, torch.bfloat16)
    with pytest.raises(UnsupportedDtypeError, match="a.dtype"):
        gemm(a.float(), b, a_scale, b_scale, None, torch.bfloat16)
    with pytest.raises(UnsupportedDtypeError, match="out_dtype"):
        gemm(a, b, a_scale, b_scale, None, torch.int8)


def test_opcheck(device, check_op):
    args = operands(3, 24, 32, device)
    check_op(torch.ops.oss_fused.fp8_gemm.default, (*args, torch.bfloat16))
    x = torch.randn(2, 3, 32, device=device, dtype=torch.bfloat16)
    check_op(torch.ops.oss_fused.fp8_linear.default, (x, args[1], args[3], None, args[4]))


def test_rows_that_16_byte_loads_and_descriptors_address():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert has_aligned_rows(x) and has_aligned_rows(x[:, :24]) and has_aligned_rows(x[1:, 8:])
    codes = torch.zeros(8, 48, dtype=torch.uint8)
    assert has_aligned_rows(codes) and not has_aligned_rows(codes[:, 8:])
    for bad in (x[:1].expand(8, 64), x[:, 4:], x.t(), torch.zeros(8, 6).half()):
        assert not has_aligned_rows(bad), (bad.shape, bad.stride())
