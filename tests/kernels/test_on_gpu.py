# SPDX-License-Identifier: MIT
"""What only a GPU shows: graphs, torch.compile, late compilation, leaks, the models' own shapes."""

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.tiles import ROW_BUCKETS

pytestmark = pytest.mark.gpu
ops = torch.ops.oss_fused
FP8 = torch.float8_e4m3fn


def layer(n, k):
    weight, scale = ops.quantize_fp8(
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16), None, "channel"
    )
    return weight, scale


def decode_step(x, residual, gain, weight, scale):
    q, token, hidden, *_ = ops.add_rms_norm_quant(x, residual, gain, 1e-5, None, False)
    gate_up = ops.fp8_gemm(q, weight, token, scale, None, x.dtype)
    q, token = ops.act_mul_quant(gate_up, "silu", None)
    out = ops.fp8_gemm(
        q,
        weight[: x.shape[1], : q.shape[1]].contiguous(),
        token,
        scale[: x.shape[1]],
        None,
        x.dtype,
    )
    return out, ops.fp8_linear(hidden, weight, scale, None, None)


@pytest.mark.parametrize("rows", [1, 2, 3, 40, 100, 300])
def test_graph_replay_equals_eager(rows):
    """Captured with programmatic dependent launch, replayed with new inputs, bit for bit."""
    weight, scale = layer(2048, 1024)
    inputs = [torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    args = (*inputs, torch.rand(1024, device="cuda").bfloat16(), weight, scale)
    decode_step(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_step(*args)
    for seed in range(5):
        torch.manual_seed(seed)
        for tensor in inputs:
            tensor.normal_()
        graph.replay()
        replayed = [t.clone() for t in captured]
        for got, want in zip(replayed, decode_step(*args), strict=True):
            assert torch.equal(got, want)


def test_compiles_in_one_graph():
    weight, scale = layer(2048, 1024)
    x, residual = (torch.randn(5, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    args = (x, residual, torch.rand(1024, device="cuda").bfloat16(), weight, scale)
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=True)
    for got, want in zip(compiled(*args), decode_step(*args), strict=True):
        assert torch.equal(got, want)


def test_nothing_compiles_after_warm_up():
    """Row counts inside a bucket share kernels: vLLM warns about any later compilation."""
    from triton import knobs

    weight, scale = layer(2048, 1024)
    gain = torch.rand(1024, device="cuda").bfloat16()

    def step(rows):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        decode_step(x, x, gain, weight, scale)

    for rows in ROW_BUCKETS:
        step(rows)
    compiled = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *a, **k: compiled.append(k.get("repr"))
    try:
        for rows in (1, 2, 3, 5, 7, 16, 17, 31, 33, 48, 65, 100, 129, 300, 513, 1000, 1500, 4097):
            step(rows)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_a_thousand_calls_leak_nothing():
    weight, scale = layer(512, 256)
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    ops.fp8_linear(x, weight, scale, None, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        ops.fp8_linear(x, weight, scale, None, None)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("n,k", [(5120, 2880), (2880, 4096), (640, 2880), (2880, 512), (720, 2880)])
@pytest.mark.parametrize("rows", [1, 2, 4, 13, 33, 64, 128, 200, 512, 1100])
def test_model_and_shard_shapes(n, k, rows):
    weight, scale = layer(n, k)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    got = ops.fp8_linear(x, weight, scale, None, bias)
    want = get_kernel("torch", "fp8_linear")(x, weight, scale, None, bias)
    assert (got.double() - want.double()).norm() / want.double().norm() < 3e-3
