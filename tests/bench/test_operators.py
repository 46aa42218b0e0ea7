# SPDX-License-Identifier: MIT
"""The suite's rows of softmax, LayerNorm, attention and convolution; wrong kernels get no time."""

import pytest
import torch
import torch.nn.functional as F

from oss_fused.attention import flash_attention
from oss_fused.bench.problems import (
    AttentionInput,
    ConvolutionInput,
    LayerNormInput,
    SoftmaxInput,
)
from oss_fused.bench.roofline import Ceilings
from oss_fused.bench.runner import verify
from oss_fused.bench.suite import BenchmarkSuite

CEILINGS = Ceilings("test", 10.0, {"bfloat16": 0.1, "float32": 0.1})


def suite():
    return BenchmarkSuite(1, 20, device="cpu", ceilings=CEILINGS, compile_baseline=False)


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_are_verified_and_timed(name):
    bench = suite()
    rows = getattr(bench, f"benchmark_{name}")([(6, 40)])
    assert len(rows) == 3 and {row.status for row in rows} == {"ok"}, rows
    assert rows[1].name == f"{name}/6x40/oss_fused" and rows[1].speedup and rows[1].p99_ms
    assert len(bench.points) == 3 and "softmax" in {p.name.split("/")[0] for p in bench.points} | {
        "softmax"
    }


def test_convolution_and_attention_have_rows():
    bench = suite()
    rows = bench.benchmark_convolution([(1, 8, 8, 6)])
    rows += bench.benchmark_flash_attention([(1, 2, 20, 16)])
    assert {row.status for row in rows} == {"ok"}, rows
    names = [row.name for row in rows if row.implementation == "oss_fused"]
    assert names == [
        "convolution/1x8x8x6x3 nhwc/oss_fused",
        "convolution/1x8x8x6x3 nchw/oss_fused",
        "flash_attention/1x2x20x16/oss_fused",
        "flash_attention/1x2x20x16 causal/oss_fused",
    ]


def test_bytes_of_a_convolution():
    one = ConvolutionInput(2, 3, 5, 4, dtype=torch.float32)
    made = one.make()
    result = 4 * 2 * 5 * 4 * 4
    inputs = sum(4 * made[name].numel() for name in ("x", "w"))
    assert one.num_bytes == inputs + 4 * 5 + result
    assert one.unfused_bytes == (inputs + result) + (result + 4 * 5 + result) + 2 * result
    assert one.expanded_bytes == 4 * 2 * 4 * 4 * 3 * 9
    for shape in ((32, 64, 64, 56), (32, 512, 512, 7)):
        assert ConvolutionInput(*shape).saved > 0.25


def no_last_column(x):
    return F.pad(torch.softmax(x[:, :-1], -1), (0, 1))


def sample_variance(x, weight, bias):
    spread = (x.var(-1, keepdim=True) + 1e-5).sqrt()
    return (x - x.mean(-1, keepdim=True)) / spread * weight + bias


WRONG = {
    "skips the last column": (SoftmaxInput(5, 40), no_last_column),
    "no maximum": (SoftmaxInput(5, 40), lambda x: x.exp() / x.exp().sum(-1, keepdim=True)),
    "over columns": (SoftmaxInput(5, 40), lambda x: torch.softmax(x, 0)),
    "sample variance": (LayerNormInput(5, 40), sample_variance),
    "another eps": (
        LayerNormInput(5, 40),
        lambda x, weight, bias: F.layer_norm(x, (40,), weight, bias, 1e-6),
    ),
    "no relu": (
        ConvolutionInput(1, 4, 4, 5),
        lambda x, w, bias: F.conv2d(x, w, bias, padding=1),
    ),
    "mirrored window": (
        ConvolutionInput(1, 4, 4, 5),
        lambda x, w, bias: F.conv2d(x, w.flip(-1), bias, padding=1).relu(),
    ),
    "never causal": (
        AttentionInput(1, 2, 9, 8, causal=True),
        lambda q, k, v, causal: flash_attention(q, k, v),
    ),
    "no bias": (LayerNormInput(5, 40), lambda x, weight, bias: F.layer_norm(x, (40,), weight)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_operator_is_rejected(case):
    problem, function = WRONG[case]
    assert not verify(function, problem).passed
