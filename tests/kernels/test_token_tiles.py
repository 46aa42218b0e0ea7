# SPDX-License-Identifier: MIT
"""Tiles of tokens that end behind the last token: in memory that may be read, and read in vain."""

from __future__ import annotations

import pytest
import torch
from test_gluon import CONFIGS, CUDA, operands

from oss_fused.kernels.checks import FP8
from oss_fused.kernels.gemm import triton as gemm
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.quantize.triton import quantize_levels
from oss_fused.kernels.token_tiles import empty_token_codes
from tests.kernels.test_qkv import codes_of, problem, run

NAN = 0x7F


@pytest.fixture
def hopper():
    if not runs_gluon(CUDA):
        pytest.skip("needs a Hopper GPU and Gluon")


def rows_of(codes):
    """Rows that the storage of codes [..., C] holds."""
    return codes.untyped_storage().nbytes() / codes.shape[-1]


def followed_by_nan(codes, held=512):
    """``codes`` [M, K] in a storage whose other rows are NaN."""
    bits = torch.full((held, codes.shape[1]), NAN, dtype=torch.uint8, device=codes.device)
    bits[: len(codes)] = codes.view(torch.uint8)
    return bits.view(FP8)[: len(codes)]


@pytest.mark.parametrize(
    ("rows", "held"),
    [(0, 16), (1, 16), (16, 16), (17, 32), (72, 128), (128, 128), (129, 256), (1000, 1024),
     (1024, 1024), (1025, 1025)],
)  # fmt: skip
def test_storage_of_codes_holds_whole_tiles(rows, held):
    codes = empty_token_codes((rows, 130), torch.device("cpu"))
    assert codes.shape == (rows, 130) and codes.dtype == FP8 and codes.is_contiguous()
    assert rows_of(codes) == held


@pytest.mark.parametrize(
    ("shape", "held"),
    [((3, 7, 10), 32 * 10), ((9,), 16 * 9), ((70000,), 70000), ((), 1), ((3, 0), 0)],
)
def test_rows_are_those_of_all_dimensions_but_the_last(shape, held):
    """A row that is too long for a token, and one number, are alone."""
    codes = empty_token_codes(shape, torch.device("cpu"))
    assert codes.shape == shape and codes.untyped_storage().nbytes() == held


@pytest.mark.parametrize("tokens", [3, 40])
def test_codes_that_products_read_fill_tiles(tokens, device):
    """Those of norms, of quantisation and of an MLP."""
    x = torch.randn(tokens, 256, device=device).bfloat16()
    gain = torch.ones(256, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    quantize = get_kernel("triton", "quantize_fp8")
    found = {
        "norm": get_kernel("triton", "add_rms_norm_quant")(x, None, gain, 1e-5, None)[0],
        "own scale": quantize(x, None, "token")[0],
        "static scale": quantize(x, one, "token")[0],
        "mlp": get_kernel("triton", "act_mul_quant")(x, "silu", None)[0],
    }
    held = {3: 16, 40: 64}[tokens]
    assert {name: rows_of(codes) for name, codes in found.items()} == dict.fromkeys(found, held)
    assert rows_of(quantize_levels(x)[0]) == {3: 16, 40: 128}[tokens]


@pytest.mark.parametrize("static", [False, True])
def test_a_linear_layer_quantises_into_tiles(static, device, monkeypatch):
    seen = []
    product = gemm.fp8_gemm
    monkeypatch.setattr(gemm, "fp8_gemm", lambda q, *rest: seen.append(q) or product(q, *rest))
    weight = torch.randn(64, 256, device=device).to(FP8)
    scale = torch.ones(1, device=device) if static else None
    x = torch.randn(40, 256, device=device).bfloat16()
    gemm.fp8_linear(x, weight, torch.ones(64, 1, device=device), scale, None)
    assert [rows_of(q) for q in seen] == [64]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_codes_of_weights_end_with_them(strategy, device):
    """What a layer keeps, and what a file gets."""
    weight = torch.randn(100, 48, device=device)
    assert rows_of(get_kernel("triton", "quantize_fp8")(weight, None, strategy)[0]) == 100


def test_one_number_is_quantised(device):
    codes, scale = get_kernel("triton", "quantize_fp8")(
        torch.tensor(3.0, device=device), None, "token"
    )
    assert codes.shape == () and codes.float() * scale == 3


def test_boxes_read_on_in_the_storage_and_no_further():
    pipeline = pytest.importorskip("oss_fused.kernels.pipeline")

    def rows(held, first, count, stride=256):
        codes = torch.zeros(held * stride, dtype=torch.uint8).view(FP8).view(held, stride)
        return pipeline.token_descriptor(codes[first : first + count, :128], 64, 128).shape[0]

    assert rows(128, 0, 72) == 128
    assert rows(128, 0, 64) == 64
    # as many as there are behind the first one
    assert rows(100, 0, 72) == 100
    assert rows(100, 20, 72) == 80
    assert rows(72, 0, 72) == 72
    assert rows(512, 0, 72) == 128
    # the last row of a wider tensor ends before its stride does
    codes = torch.zeros(72 * 256, dtype=torch.uint8).view(FP8).view(72, 256)
    assert pipeline.token_descriptor(codes[:70, 128:], 64, 128).shape[0] == 72


@pytest.mark.gpu
@pytest.mark.parametrize("name,config", CONFIGS)
@pytest.mark.parametrize("m", [5, 72, 130])
def test_products_leave_out_what_lies_behind_the_tokens(hopper, name, config, m):
    a, b, *scales = operands(m, 192, 1040)
    results = []
    for tokens in (a, followed_by_nan(a)):
        out = torch.full((m + 200, 192), 3.0, device=CUDA, dtype=torch.bfloat16)
        gemm.kernels(CUDA)[name](tokens, b, *scales, None, out[:m], **config)
        results.append(out)
    assert torch.equal(*results) and (results[1][m:] == 3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 2])
def test_levels_and_parts_of_sums_leave_it_out_too(hopper, slices):
    levels, b, _, b_scale = operands(10, 192, 1040)
    a_scale = torch.rand(5, 1, device=CUDA) + 0.5
    config = {"block_m": 16, "block_k": 256, "ctas": 1, "slices": slices}
    both = []
    for tokens in (levels, followed_by_nan(levels)):
        out = torch.empty(5, 192, device=CUDA, dtype=torch.bfloat16)
        gemm.kernels(CUDA)["stream"](tokens, b, a_scale, b_scale, None, out, levels=2, **config)
        sums = torch.full((2, 10, 192), float("nan"), device=CUDA)
        gemm.kernels(CUDA)["stream"](tokens, b, a_scale[:1], b_scale, None, sums, **config)
        both.append((out, sums))
    for alone, followed in zip(*both, strict=True):
        assert torch.equal(alone, followed) and alone.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 40, 64])
def test_activations_leave_it_out_too(hopper, m):
    from oss_fused.kernels.mlp.gate_up_stream import gate_up_stream

    a, b, *scales = operands(m, 192, 1040)
    rest = (*scales, torch.bfloat16, "silu", True)
    for alone, followed in zip(
        gate_up_stream(a, b, *rest), gate_up_stream(followed_by_nan(a), b, *rest), strict=True
    ):
        assert torch.equal(alone, followed)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 40, 72])
def test_queries_and_the_cache_leave_it_out_too(hopper, m):
    codes, scale = codes_of(torch.randn(m, 256, device=CUDA).bfloat16())
    arguments = problem(m, 4, 2, 64, 256, torch.bfloat16, CUDA)
    alone = run("triton", codes.clone(), scale, arguments, torch.bfloat16)
    followed = run("triton", followed_by_nan(codes), scale, arguments, torch.bfloat16)
    for one, other in zip(alone, followed, strict=True):
        assert torch.equal(one, other)
