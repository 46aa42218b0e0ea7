# SPDX-License-Identifier: MIT
"""cuBLASLt's product as a kernel of fp8_gemm: when it is taken, and with which operands."""

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused.kernels import tiles
from oss_fused.kernels.gemm import triton
from oss_fused.kernels.gemm.cublaslt import fits_cublaslt, gemm_cublaslt, runs_cublaslt
from oss_fused.kernels.op import get_kernel

ops = torch.ops.oss_fused
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# one rounding to 16 bits, and the tensor cores' own accumulator
TOLERANCE = 5e-3


def operands(m, n, k, device=CPU, rows=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=g).to(FP8)
    b = torch.randn(n, k, generator=g).to(FP8)
    a_scale = torch.rand(m if rows else 1, 1, generator=g) + 0.5
    b_scale = torch.rand(n, 1, generator=g) + 0.5
    bias = torch.randn(n, generator=g).to(BF16)
    return tuple(tensor.to(device) for tensor in (a, b, a_scale, b_scale, bias))


def exact(a, b, a_scale, b_scale, bias):
    out = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().view(1, -1)
    return out if bias is None else out + bias.double()


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


class Library:
    """``torch._scaled_mm`` with scales of rows: checks as on Hopper, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, a, b, a_scale, b_scale, bias, out_dtype, use_fast_accum, out):
        (m, k), n = a.shape, b.shape[1]
        assert a.stride() == (k, 1) and b.stride() == (1, k) and out.stride() == (n, 1)
        assert n % 16 == k % 16 == 0 and use_fast_accum
        assert a_scale.shape == (m, 1) and b_scale.shape == (1, n)
        assert a_scale.is_contiguous() and b_scale.is_contiguous()
        assert out_dtype == out.dtype == BF16 and (bias is None or bias.dtype == BF16)
        out.copy_(exact(a, b.t(), a_scale, b_scale, bias))
        self.calls += 1


@pytest.fixture
def library(monkeypatch, device):
    """A stand-in for cuBLASLt, taken from 4 rows on."""
    found = Library()
    monkeypatch.setattr(torch, "_scaled_mm", found)
    monkeypatch.setattr(triton, "runs_cublaslt", lambda device: True)
    monkeypatch.setattr(tiles, "CUBLASLT_ROWS", 4)
    caches = (triton.kernels, tiles.gemm_rule)
    for cache in caches:
        cache.cache_clear()
    yield found
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def test_the_rule_takes_it_for_many_rows():
    least = tiles.CUBLASLT_ROWS
    for bucket in tiles.ROW_BUCKETS:
        for gluon in (False, True):
            found = tiles.gemm_rule(bucket, 4096, 2880, gluon, True)
            usual = tiles.gemm_rule(bucket, 4096, 2880, gluon)
            assert found == ({"kernel": "cublaslt"} if bucket >= least else usual)
            assert usual["kernel"] != "cublaslt"
    assert least in tiles.ROW_BUCKETS, "rows of a bucket share a kernel, which warm-up compiles"
    # a last tile that is not full
    assert tiles.gemm_rule(8192, 4160, 4096, True, True) == tiles.gemm_rule(8192, 4160, 4096, True)
    for k in (4104, 0):
        assert tiles.gemm_rule(8192, 4096, k, True, True) == {"kernel": "tile"}


def test_a_table_may_name_it(monkeypatch):
    known = {"kernel": "cublaslt"}
    monkeypatch.setattr(tiles, "lookup", lambda *_: known)
    for gluon in (False, True):
        assert tiles.choose_gemm_config(CPU, 600, 4096, 4096, gluon, True) is known
        other = tiles.choose_gemm_config(CPU, 600, 4096, 4096, gluon)
        assert other == tiles.gemm_rule(1024, 4096, 4096, gluon)
    known["kernel"] = "stream"
    other = tiles.choose_gemm_config(CPU, 600, 4096, 4096, False, True)
    assert other["kernel"] == "large", "cuBLASLt runs where Gluon does not"


@pytest.mark.parametrize("m,n,k", [(5, 128, 64), (19, 384, 96)])
def test_product(library, device, m, n, k):
    args = operands(m, n, k, device)
    for bias in (None, args[4]):
        got = get_kernel("triton", "fp8_gemm")(*args[:4], bias, BF16)
        assert got.dtype == BF16
        assert relative_error(got, exact(*args[:4], bias)) < TOLERANCE
    assert library.calls == 2


def test_linear_and_few_rows(library, device):
    linear = get_kernel("triton", "fp8_linear")
    _, weight, _, scale, _ = operands(1, 128, 128, device)
    for rows, calls in ((2, 0), (7, 1)):
        x = torch.randn(rows, 128, dtype=BF16).to(device)
        want = get_kernel("torch", "fp8_linear")(x.cpu(), weight.cpu(), scale.cpu(), None, None)
        got = linear(x, weight, scale, None, None)
        assert relative_error(got.cpu(), want.double()) < TOLERANCE
        assert library.calls == calls


def wide(codes):
    """The same rows as a part of longer ones."""
    return torch.cat([codes.view(torch.uint8)] * 2, 1).view(FP8)[:, : codes.shape[1]]


def shifted(tensor):
    """The same values, one element behind a boundary of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


# place of an operand -> what cuBLASLt cannot read, or would read as something else
UNFIT = {
    "rows of longer ones": (0, wide),
    "weights of longer rows": (1, wide),
    "rows off a boundary": (0, shifted),
    "weights off a boundary": (1, shifted),
    "scales off a boundary": (2, shifted),
    "bias off a boundary": (4, shifted),
    "bias in float32": (4, torch.Tensor.float),
    "one scale of all rows": (2, lambda scale: scale[:1].clone()),
    "one scale of all weights": (3, lambda scale: scale[:1].clone()),
}


@pytest.mark.parametrize("case", UNFIT)
def test_other_operands_take_another_kernel(library, device, case):
    place, change = UNFIT[case]
    args = list(operands(6, 128, 64, device))
    assert fits_cublaslt(*args, torch.empty(6, 128, dtype=BF16))
    args[place] = change(args[place])
    assert not fits_cublaslt(*args, torch.empty(6, 128, dtype=BF16))
    got = get_kernel("triton", "fp8_gemm")(*args, BF16)
    assert library.calls == 0 and relative_error(got, exact(*args)) < TOLERANCE


def test_other_results_take_another_kernel(library, device):
    args = operands(6, 128, 64, device)
    for dtype in (torch.float32, torch.float16):
        got = get_kernel("triton", "fp8_gemm")(*args[:4], None, dtype)
        assert relative_error(got, exact(*args[:4], None)) < TOLERANCE
    # a table may name it for any shape
    odd = operands(6, 40, 64, device)
    assert not fits_cublaslt(*odd, torch.empty(6, 40, dtype=BF16))
    narrow = operands(6, 128, 40, device)
    assert not fits_cublaslt(*narrow, torch.empty(6, 128, dtype=BF16))
    assert library.calls == 0


def test_it_runs_on_hopper(monkeypatch):
    assert not runs_cublaslt(CPU)
    uncached = runs_cublaslt.__wrapped__
    for cuda in ("13.0", "12.9", "12.8", None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for capability in ((8, 9), (9, 0), (10, 0)):
            found = {CUDA: capability}
            monkeypatch.setattr(torch.cuda, "get_device_capability", found.get)
            assert uncached(CUDA) is (capability == (9, 0) and cuda in ("13.0", "12.9"))


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or not runs_cublaslt(CUDA):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m,n,k", [(1, 16, 16), (130, 320, 144), (1025, 2880, 4096), (3001, 5120, 2880)]
)
def test_every_shape_on_a_gpu(hopper, m, n, k):
    args = operands(m, n, k, CUDA)
    for bias in (None, args[4]):
        out = torch.full((m, n), float("nan"), dtype=BF16, device=CUDA)
        assert fits_cublaslt(*args[:4], bias, out)
        gemm_cublaslt(*args[:4], bias, out)
        assert relative_error(out, exact(*args[:4], bias)) < TOLERANCE


@pytest.mark.gpu
def test_nan_stays_in_its_row(hopper):
    args = operands(tiles.CUBLASLT_ROWS, 256, 512, CUDA)
    args[0].view(torch.uint8)[3, 7] = 0x7F
    out = ops.fp8_gemm(*args, BF16)
    assert out[3].isnan().all() and out.isnan().sum() == 256


@pytest.mark.gpu
def test_compiled_and_recorded(hopper, check_op):
    m = tiles.CUBLASLT_ROWS + 1
    args = operands(m, 256, 512, CUDA)
    want = ops.fp8_gemm(*args, BF16)
    assert relative_error(want, exact(*args)) < TOLERANCE

    def step(*tensors):
        return ops.fp8_gemm(*tensors, BF16) + 0

    assert torch.equal(torch.compile(step, fullgraph=True)(*args), want)
    check_op(ops.fp8_gemm.default, (*args, BF16, False))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ops.fp8_gemm(*args, BF16)
    args[2].mul_(2)
    graph.replay()
    assert torch.equal(recorded, ops.fp8_gemm(*args, BF16))
