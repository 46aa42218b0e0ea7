# SPDX-License-Identifier: MIT
"""Llama's MLP in decoder layers: one operator, or the separate ones."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import RowParallelLinear

from oss_fused.layers.vllm import decoder, linear
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.quant.scheme import FP8_DYNAMIC

TOKENS, HIDDEN, INNER = 5, 48, 32


class Projection:
    """What the decoder sees of a gate_up projection on a GPU."""

    def __init__(self, bias=None, method=OssFp8LinearMethod):
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(2 * INNER, HIDDEN, generator=draw)
        self.weight_scale = weight.abs().amax(1, keepdim=True) / 448
        self.codes = (weight / self.weight_scale).to(torch.float8_e4m3fn)
        self.weight = SimpleNamespace(is_cuda=True)
        self.bias, self.quant_method = bias, method.__new__(method)
        self.calls = self.joined = 0

    def __call__(self, x):
        self.calls += 1
        rows, scale = x.data.view(-1, HIDDEN), x.scale.view(-1, 1)
        out = torch.ops.oss_fused.fp8_gemm(
            rows, self.codes, scale, self.weight_scale, None, x.orig_dtype, True
        )
        return out.view(*x.orig_shape[:-1], -1), None


class Down:
    """The down projection behind it, of a rank of two."""

    input_is_parallel, skip_bias_add, reduce_results, return_bias = True, False, False, True
    tp_size = 2
    __call__ = RowParallelLinear.forward

    def __init__(self, method=OssFp8LinearMethod, rank=0):
        self.tp_rank = rank
        draw = torch.Generator().manual_seed(2)
        weight = torch.randn(HIDDEN, INNER, generator=draw)
        self.weight_scale = weight.abs().amax(1, keepdim=True) / 448
        self.weight = (weight / self.weight_scale).to(torch.float8_e4m3fn)
        self.quant_method = method(FP8_DYNAMIC, True, "down_proj")
        self.bias = torch.linspace(-1, 1, HIDDEN).bfloat16()


def run(projection, monkeypatch, down=None):
    key = decoder.kFp8DynamicTokenSym
    monkeypatch.setattr(decoder, "get_input_quant_key", lambda layer: key)
    joined = torch.ops.oss_fused.mlp_fp8

    def mlp_fp8(codes, weight, *rest):
        assert weight is projection.weight
        projection.joined += 1
        return joined(codes, projection.codes, *rest)

    monkeypatch.setattr(linear, "_mlp_fp8", mlp_fp8)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = x.float().abs().amax(2, keepdim=True) / 448
    quantised = decoder.QuantizedActivation(
        data=(x.float() / scale).to(torch.float8_e4m3fn),
        scale=scale,
        orig_dtype=x.dtype,
        orig_shape=x.shape,
        quant_key=key,
    )
    mlp = SimpleNamespace(
        gate_up_proj=projection,
        act_fn=SiluAndMul.__new__(SiluAndMul),
        down_proj=down or Down(),
    )
    return decoder.gated_mlp(mlp, quantised)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_operator_gives_what_the_separate_ones_give(monkeypatch, rank):
    """Only the first rank adds the bias of the down projection."""
    joined, separate = Projection(), Projection(bias=torch.zeros(1))
    got, want = (run(one, monkeypatch, Down(rank=rank)) for one in (joined, separate))
    assert (joined.calls, joined.joined, separate.calls, separate.joined) == (0, 1, 1, 0)
    assert torch.equal(got, want)
    assert got.dtype == torch.bfloat16 and got.shape == (1, TOKENS, HIDDEN)


class Other(OssFp8LinearMethod):
    """A method that may change what it computes."""


def test_another_method_keeps_its_own_product(monkeypatch):
    projection = Projection(method=Other)
    run(projection, monkeypatch)
    assert (projection.calls, projection.joined) == (1, 0)
    projection = Projection()
    run(projection, monkeypatch, Down(Other))
    assert (projection.calls, projection.joined) == (1, 0)
