# SPDX-License-Identifier: MIT
"""quantize_fp8 and dequantize_fp8: codes and scales equal the reference's, bit for bit."""

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused import dequantize_fp8, fp8_gemm, quantize_fp8
from oss_fused.errors import NumericalOverflowError, SchemeError, UnsupportedDtypeError
from oss_fused.kernels import op as registration
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.quantize import triton as launchers

FP8 = torch.float8_e4m3fn


def both(op, *args):
    return get_kernel("torch", op)(*args), get_kernel("triton", op)(*args)


def assert_same(ours, expected):
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if got.dtype == FP8:
            got, want = got.view(torch.uint8), want.view(torch.uint8)
            # one NaN is as good as another
            got, want = ((t & 127 == 127).logical_not() * t for t in (got, want))
        assert (
            torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
            if got.is_floating_point()
            else torch.equal(got, want)
        )


def awkward(shape, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.logspace(-4, 3, shape[-1])
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "token", "channel"])
@pytest.mark.parametrize("shape", [(3, 5), (7, 576), (2, 3, 130), (1, 20000), (0, 64)])
def test_equal_to_reference(shape, strategy, dtype, device):
    expected, ours = both("quantize_fp8", awkward(shape, dtype, device), None, strategy)
    assert_same(ours, expected)


def test_static_scales_and_saturation(device):
    x = awkward((6, 200), torch.float32, device)
    for scale in (torch.tensor([0.05]), torch.rand(6, 1) + 0.01):
        expected, ours = both("quantize_fp8", x, scale.to(device), "tensor")
        assert_same(ours, expected)
        assert ours[0].float().abs().max() == 448


def test_all_codes_round_trip(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).view(2, 128)
    one = torch.ones(1, device=device)
    for backend in ("torch", "triton"):
        values = get_kernel(backend, "dequantize_fp8")(codes, one, torch.float32)
        assert torch.equal(values.nan_to_num(999.0), codes.float().nan_to_num(999.0))
        again, _ = get_kernel(backend, "quantize_fp8")(values, one, "tensor")
        assert_same((again,), (codes,))


def test_ties_round_to_even(device):
    finite = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middle = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([middle, -middle]).to(device).view(1, -1)
    expected, ours = both("quantize_fp8", x, torch.ones(1, device=device), "tensor")
    assert_same(ours, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_never_becomes_a_number(bad, device):
    x = torch.ones(3, 96, device=device)
    x[1, 17] = bad
    for backend in ("torch", "triton"):
        q, scale = get_kernel(backend, "quantize_fp8")(x, None, "token")
        assert not scale[1].isfinite().any() and scale[0].isfinite().all()
        assert (q.float() * scale)[1].isnan().all()
        q, _ = get_kernel(backend, "quantize_fp8")(x, torch.ones(1, device=device), "tensor")
        assert q.float()[1, 17].isnan() and q.float().isnan().sum() == 1


def test_zero_and_tiny_rows(device):
    x = torch.zeros(3, 64, device=device)
    x[1] = 1e-40
    x[2] = -3e38
    expected, ours = both("quantize_fp8", x, None, "token")
    assert_same(ours, expected)
    assert ours[1][0] == 1 and ours[1][1] == 2.0**-126


def test_strided_input(device):
    wide = awkward((9, 256), torch.bfloat16, device)
    for x in (wide[::2, 64:192], wide.t(), wide[:, ::2]):
        expected, ours = both("quantize_fp8", x, None, "token")
        assert_same(ours, expected)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_equal_to_reference(out_dtype, device):
    q, scale = get_kernel("torch", "quantize_fp8")(
        awkward((5, 200), torch.float32, device), None, "token"
    )
    expected, ours = both("dequantize_fp8", q, scale, out_dtype)
    assert torch.equal(expected, ours)


def test_round_trip_error_is_bounded(device):
    x = awkward((4, 333), torch.float32, device)
    q, scale = quantize_fp8(x, strategy="token")
    error = (dequantize_fp8(q, scale) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale * 2.0**-10)).all()


def test_overflow_policies(device):
    x = torch.full((2, 8), 1000.0, device=device)
    small = torch.ones(1, device=device)
    q, scale = quantize_fp8(x, scale=small)
    assert torch.equal(dequantize_fp8(q, scale), x)
    q, scale = quantize_fp8(x, scale=small, on_overflow="saturate")
    assert scale == 1 and (q.float() == 448).all()
    with pytest.raises(NumericalOverflowError, match="scale=1.0"):
        quantize_fp8(x, scale=small, on_overflow="raise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 576), (2, 3, 130), (1, 20000), (0, 64), (3, 0), (5,)])
def test_adjusted_scales_equal_the_reference(shape, dtype, device):
    x = awkward(shape, dtype, device) if shape[-1] else torch.zeros(shape, device=device)
    if x.numel() > 3:
        x.view(-1)[1], x.view(-1)[2] = float("nan"), float("-inf")
    rows = x.shape[:-1].numel()
    least = torch.logspace(-6, 3, rows).view(rows, 1)
    for scale in (torch.tensor([1e-4]), torch.tensor([900.0]), least, least[:1].expand(rows, 1)):
        expected, ours = both("quantize_fp8_adjusted", x, scale.to(device))
        assert_same(ours, expected)
        finite = x.float().nan_to_num(0.0, 0.0, 0.0)
        per_row = scale.numel() > 1
        amax = finite.view(rows, -1).abs().amax(-1, True) if x.numel() else torch.zeros(rows, 1)
        amax = amax if per_row else amax.amax().view(1) if rows else torch.zeros(1)
        fitted = torch.maximum(scale.to(device), amax.to(device) / 448)
        torch.testing.assert_close(ours[1], fitted, rtol=1e-6, atol=0)


def test_a_scale_that_fits_is_kept_and_gives_the_same_codes(device):
    x = awkward((5, 96), torch.float32, device)
    for scale in (torch.tensor([50.0]), torch.full((5, 1), 50.0)):
        kept = get_kernel("triton", "quantize_fp8_adjusted")(x, scale.to(device))
        assert_same(kept, get_kernel("triton", "quantize_fp8")(x, scale.to(device), "token"))


def test_a_scale_that_is_a_view_is_read_by_its_strides(device):
    x = awkward((4, 64), torch.float32, device)
    wide = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]], device=device)
    for operation, rest in (("quantize_fp8", ("token",)), ("quantize_fp8_adjusted", ())):
        for scale in (wide[:, :1], wide[:1, :1].expand(4, 1)):
            expected, ours = both(operation, x, scale, *rest)
            dense = get_kernel("triton", operation)(x, scale.contiguous(), *rest)
            assert_same(ours, expected)
            assert_same(ours, dense)
    codes, dense = x.nan_to_num(1.0).clamp(-4, 4).to(FP8), wide[:, :1].contiguous()
    strided = fp8_gemm(codes, codes.t(), a_scale=wide[:, :1], b_scale=wide[:, :1])
    assert torch.equal(strided, fp8_gemm(codes, codes.t(), a_scale=dense, b_scale=dense))


def test_overflow_is_found_without_looking_at_the_tensor_twice(device, monkeypatch):
    """A given scale costs no pass of torch's over the tensor: the kernels find the amax."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "amax", lambda *a, **k: seen.append("amax"))
    monkeypatch.setattr(torch.Tensor, "abs", lambda *a, **k: seen.append("abs"))
    monkeypatch.setattr(registration, "default_backend", lambda device: "triton")
    x = torch.full((2, 8), 1000.0, device=device)
    q, scale = quantize_fp8(x, scale=torch.ones(1, device=device))
    assert seen == [] and scale.item() == pytest.approx(1000 / 448)
    assert (q.float() == 448).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
@pytest.mark.parametrize("on_overflow", ["adjust", "saturate", "raise"])
def test_unusable_scales_are_refused(bad, on_overflow, device):
    x = torch.ones(2, 8, device=device)
    for scale in (torch.tensor([bad]), torch.tensor([[1.0], [bad]])):
        with pytest.raises(NumericalOverflowError, match=r"^scale\[[01]\]="):
            quantize_fp8(x, scale=scale.to(device), on_overflow=on_overflow)


def test_a_scale_is_checked_again_after_a_change_in_place(device):
    x, scale = torch.ones(2, 8, device=device), torch.ones(1, device=device)
    quantize_fp8(x, scale=scale)
    scale.zero_()
    with pytest.raises(NumericalOverflowError, match=r"scale\[0\]=0\.0"):
        quantize_fp8(x, scale=scale)
    with torch.inference_mode():
        scale = torch.ones(1, device=device)
        quantize_fp8(x, scale=scale)
        scale.zero_()
        with pytest.raises(NumericalOverflowError, match=r"scale\[0\]=0\.0"):
            quantize_fp8(x, scale=scale)


def test_a_nan_scale_of_our_own_propagates(device):
    """Quantising NaN gives a NaN scale, which a product takes: the NaN reaches the result."""
    x = torch.ones(2, 16, device=device)
    x[0, 0] = float("nan")
    q, scale = quantize_fp8(x, strategy="token")
    assert dequantize_fp8(q, scale)[0].isnan().all()
    out = fp8_gemm(q, torch.ones(16, 16, device=device), a_scale=scale)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_raise_refuses_what_is_not_finite(bad, device):
    x = torch.ones(2, 8, device=device)
    x[1, 3] = bad
    for scale in (None, torch.ones(1, device=device)):
        with pytest.raises(NumericalOverflowError, match="NaN or Inf"):
            quantize_fp8(x, scale=scale, on_overflow="raise")


def test_raise_is_refused_where_no_value_can_be_seen():
    x = torch.ones(2, 8, device="meta")
    with pytest.raises(SchemeError, match="on_overflow='raise'"):
        quantize_fp8(x, scale=torch.ones(1, device="meta"), on_overflow="raise")
    # checks of values are left out there, and nothing breaks the graph
    compiled = torch.compile(quantize_fp8, backend="aot_eager", fullgraph=True)
    x, scale = torch.full((2, 8), 1000.0), torch.ones(1)
    for got, want in zip(compiled(x, scale=scale), quantize_fp8(x, scale=scale), strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33])
def test_adjusting_is_captured_in_a_graph(rows):
    """No value is looked at on the host: a replay adjusts for the values of the day."""
    x = torch.ones(rows, 256, device="cuda")
    scale = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    quantize_fp8(x, scale=scale)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        q, found = quantize_fp8(x, scale=scale)
    for size in (1000.0, 2.0, 5000.0):
        x.fill_(size)
        graph.replay()
        want = quantize_fp8(x, scale=scale)
        assert_same((q, found), want)


def test_bad_arguments_are_named(device):
    with pytest.raises(UnsupportedDtypeError, match="t.dtype"):
        quantize_fp8(torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(SchemeError, match="strategy='block'"):
        quantize_fp8(torch.zeros(2, 2, device=device), strategy="block")


@pytest.mark.parametrize("strategy", ["tensor", "token"])
def test_opcheck(strategy, device, check_op):
    x = awkward((3, 32), torch.float32, device)
    check_op(torch.ops.oss_fused.quantize_fp8.default, (x, None, strategy))
    least = torch.full((3, 1) if strategy == "token" else (1,), 0.01, device=device)
    check_op(torch.ops.oss_fused.quantize_fp8_adjusted.default, (x, least))
    q, scale = torch.ops.oss_fused.quantize_fp8(x, None, strategy)
    check_op(torch.ops.oss_fused.dequantize_fp8.default, (q, scale, torch.bfloat16))


@pytest.mark.parametrize("shape", [(2, 3, 1), (6,), (1, 6), (6, 1)])
@pytest.mark.parametrize("rows", [(2, 3, 16), (6, 6)])
def test_a_scale_a_row_has_any_shape(shape, rows, device):
    x = torch.randn(rows, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    column = (torch.arange(1.0, 7.0) / 50)[:, None].to(device)
    # every second value of a buffer: dense it is not
    scale = column.repeat(1, 2).view(*shape, 2)[..., 0]
    weight = torch.randn(8, x.shape[-1]).to(FP8).to(device)
    one = torch.ones(1, device=device)
    for backend in ("torch", "triton"):
        for operation, rest in (("quantize_fp8", ("token",)), ("quantize_fp8_adjusted", ())):
            run = get_kernel(backend, operation)
            codes, used = run(x, scale, *rest)
            expected, in_column = run(x, column, *rest)
            assert_same((codes, used), (expected, in_column.view(shape)))
        linear = get_kernel(backend, "fp8_linear")
        wanted = linear(x, weight, one, column, None)
        assert torch.equal(linear(x, weight, one, scale, None), wanted)


class _Grids(list):
    """Stands for a kernel and notes its grids."""

    def __getitem__(self, grid):
        self.append(grid)
        return lambda *arguments, **options: None


@pytest.mark.parametrize(("shape", "programs"), [((2**28 + 4096,), 65537), ((70000, 3), 70000)])
def test_long_rows_and_many_rows_are_launched(shape, programs, monkeypatch):
    """CUDA allows 65535 programs along the second axis."""
    grids = _Grids()
    for name in ("amax", "static", "noting", "requantize", "dequantize"):
        (kernel,) = (k for k in vars(launchers) if name in k and k.endswith("_kernel"))
        monkeypatch.setattr(launchers, kernel, grids)
    monkeypatch.setattr(launchers, "_scale_kernel", _Grids())
    x, one = torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.ones(1, device="meta")
    launchers.quantize_fp8(x, None, "tensor")
    launchers.quantize_fp8_adjusted(x, one)
    launchers.dequantize_fp8(x.to(FP8), one, torch.bfloat16)
    assert grids == [(programs,)] * 5


def test_rows_of_several_blocks(device):
    x = awkward((3, 9000), torch.bfloat16, device)
    for scale in (torch.tensor([0.05]), torch.rand(3, 1) + 0.01):
        for operation, rest in (("quantize_fp8", ("tensor",)), ("quantize_fp8_adjusted", ())):
            expected, ours = both(operation, x, scale.to(device), *rest)
            assert_same(ours, expected)
        assert_same(*((each,) for each in both("dequantize_fp8", ours[0], ours[1], torch.float32)))
    expected, ours = both("quantize_fp8", x, None, "tensor")
    assert_same(ours, expected)
