# SPDX-License-Identifier: MIT
"""Operands that the kernel ahead rewrites, on a GPU: no stale content is read.

A slow kernel lets the next one start at once and rewrites one of its operands meanwhile, in a graph
that is replayed with other contents each time (programmatic dependent launch).
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_layer import Layer

import oss_fused.kernels  # noqa: F401  (registers the operators)
from oss_fused.kernels.gemm.triton import PREFETCHING, kernels
from oss_fused.kernels.launch import runs_gluon

ops = torch.ops.oss_fused
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@triton.jit(do_not_specialize=["count", "delay"])
def _rewrite_kernel(source, target, count, delay, BLOCK: tl.constexpr):
    """Let the next kernel start at once; after ``delay`` ns copy ``count`` bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < delay:
        now = tl.extra.cuda.globaltimer()
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offset = at + tl.arange(0, BLOCK)
        value = tl.load(source + offset, mask=offset < count)
        tl.store(target + offset, value, mask=offset < count)


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def rewrite(source, target):
    count = target.numel() * target.element_size()
    _rewrite_kernel[(8,)](
        as_bytes(source), as_bytes(target), count, 20_000, BLOCK=4096, launch_pdl=True
    )


class Data:
    """Random operands on the GPU; another seed, other contents of the same shapes."""

    def __init__(self, seed):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def randn(self, *shape, dtype=BF16):
        return torch.randn(*shape, generator=self.generator, device="cuda").to(dtype)

    def scale(self, *shape):
        return torch.rand(*shape, generator=self.generator, device="cuda") + 0.5

    def integers(self, low, high, *shape, dtype=torch.int64):
        shape = {"generator": self.generator, "device": "cuda", "size": shape}
        return torch.randint(low, high, **shape).to(dtype)


def product(rows, n=2048, k=1024):
    def build(d):
        return (
            *(d.randn(rows, k, dtype=FP8), d.randn(n, k, dtype=FP8), d.scale(rows, 1)),
            *(d.scale(n, 1), d.randn(n), BF16),
        )

    return build


def linear(rows, n=2048, k=1024):
    def build(d):
        return (d.randn(rows, k), d.randn(n, k, dtype=FP8), d.scale(n, 1), None, d.randn(n))

    return build


def weight_only(rows, n=2048, k=1024):
    def build(d):
        return (d.randn(rows, k), d.randn(n, k, dtype=FP8), d.scale(n, 1), d.randn(n))

    return build


def rope(d, rows, dim=64):
    # 4 heads of q, 2 of k and of v
    caches = [torch.zeros(4, 16, 2, dim, dtype=BF16, device="cuda") for _ in range(2)]
    slots = torch.arange(rows, device="cuda")
    table = (d.integers(0, 64, rows), d.randn(64, dim), 4, True)
    return (*table, *caches, slots, None, None, None, None, 1e-6)


def qkv(rows):
    def build(d):
        return (*product(rows, n=512)(d), *rope(d, rows))

    return build


def gated(rows, fp8):
    def build(d):
        dtype = FP8 if fp8 else BF16
        scales = [d.scale(512, 1) / 64 if fp8 else None for _ in range(2)]
        weights = [d.randn(512, 1024, dtype=dtype) for _ in range(2)]
        return (d.randn(rows, 1024), *weights, *scales, "silu", "gate")

    return build


def gate_up(rows):
    def build(d):
        a, b, a_scale, b_scale, _, dtype = product(rows)(d)
        return (a, b, a_scale, b_scale / 64, dtype, "silu")

    return build


def mlp_norm(tokens, hidden=256, inter=8192, outputs=2304):
    """From 33 tokens on the down projection's sums are in two parts."""

    def build(d):
        x, weight = d.randn(tokens, hidden, dtype=FP8), d.randn(2 * inter, hidden, dtype=FP8)
        down = d.randn(outputs, inter, dtype=FP8)
        scales = (d.scale(tokens, 1), d.scale(2 * inter, 1) / 64, down, d.scale(outputs, 1) / 64)
        norm = (d.randn(tokens, outputs), d.randn(outputs), 1e-5, None, "silu")
        return (x, weight, *scales, d.randn(outputs), *norm)

    return build


def router(rows):
    def build(d):
        norm = (d.randn(rows, 2880), d.randn(rows, 2880), d.randn(2880), 1e-5)
        return (*norm, d.randn(32, 2880), d.randn(32))

    return build


def experts(tokens, fp8, hidden=256, inter=128):
    def build(d):
        x, logits = d.randn(tokens, hidden), d.randn(tokens, 8)
        if fp8:
            w13 = (d.randn(8, 256, 256, dtype=FP8), d.scale(8, 256, 1) / 16, d.randn(8, 256))
            w2 = (d.randn(8, 256, 128, dtype=FP8), d.scale(8, 256, 1) / 16, d.randn(8, 256))
            return (x, logits, *w13, *w2, 4, True)
        layer = Layer(hidden, inter, 8, d.generator.initial_seed()).to(torch.device("cuda"))
        return (x, logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, 4, True)

    return build


def block(tokens, hidden=256, inter=128):
    """Experts between two norms, with room for expected logits."""

    def build(d):
        x, _, *packed = experts(tokens, False, hidden, inter)(d)[:8]
        norm = (x, d.randn(tokens, hidden), d.randn(hidden), 1e-5, d.randn(8, hidden), d.randn(8))
        arrivals = torch.zeros(16 + 8, dtype=torch.int32, device="cuda")
        return (*norm, *packed, 4, True, -1, d.randn(hidden), 1e-5, None, arrivals)

    return build


def attention(rows, dim):
    def build(d):
        caches = [d.randn(4 * rows, 16, 2, dim) for _ in range(2)]
        table = torch.randperm(4 * rows, generator=d.generator, device="cuda").view(rows, 4).int()
        lens = d.integers(20, 64, rows, dtype=torch.int32)
        out = torch.zeros(rows, 8, dim, dtype=BF16, device="cuda")
        arrivals = torch.zeros(2 * rows, dtype=torch.int32, device="cuda")
        rest = (0.125, 0, d.randn(8), None, None, None)
        return (d.randn(rows, 8, dim), *caches, table, lens, out, arrivals, *rest)

    return build


# name -> (operator, operands, those that a caller may vouch for)
_OPERATIONS = {
    **{f"fp8_gemm-{m}": ("fp8_gemm", product(m), (1, 3, 4)) for m in (1, 2, 8, 40, 300, 1100)},
    **{f"fp8_linear-{m}": ("fp8_linear", linear(m), (1, 2, 4)) for m in (1, 8, 300)},
    **{
        f"weight_only_linear-{m}": ("weight_only_linear", weight_only(m), (1, 2, 3))
        for m in (1, 2, 8, 300, 2100)
    },
    "quantize_fp8": ("quantize_fp8", lambda d: (d.randn(64, 1024), None, "channel"), ()),
    "quantize_fp8-static": (
        "quantize_fp8",
        lambda d: (d.randn(64, 1024), d.scale(1), "tensor"),
        (),
    ),
    "dequantize_fp8": (
        "dequantize_fp8",
        lambda d: (d.randn(64, 1024, dtype=FP8), d.scale(64, 1), BF16),
        (),
    ),
    "add_rms_norm_quant": (
        "add_rms_norm_quant",
        lambda d: (d.randn(4, 2880), d.randn(4, 2880), d.randn(2880), 1e-5, None, True),
        (2,),
    ),
    "act_mul_quant": ("act_mul_quant", lambda d: (d.randn(4, 8192), "silu", None), ()),
    **{f"gate_up_quant-{m}": ("gate_up_quant", gate_up(m), (1, 3)) for m in (1, 2, 8, 64, 300)},
    **{f"mlp_norm-{m}": ("mlp_norm", mlp_norm(m), (1, 3, 4, 5, 6, 8)) for m in (1, 64, 128)},
    **{
        f"gated_mlp-{m}-{fp8}": ("gated_mlp", gated(m, fp8), ())
        for m in (8, 300)
        for fp8 in (True, False)
    },
    "rmsnorm_rope": (
        "rmsnorm_rope",
        lambda d: (d.randn(1, 64, 1024), d.randn(1024), d.randn(64, 64), d.randn(64, 64), 1e-6),
        (),
    ),
    "rope_kv": ("rope_kv", lambda d: (d.randn(4, 512), *rope(d, 4)), ()),
    **{f"qkv_rope_kv-{m}": ("qkv_rope_kv", qkv(m), (1, 3, 4)) for m in (4, 40)},
    **{f"add_rms_norm_router-{m}": ("add_rms_norm_router", router(m), (2, 4, 5)) for m in (2, 200)},
    "moe_route": ("moe_route", lambda d: (d.randn(4, 32), 4, True), ()),
    **{
        f"moe_mxfp4-{m}": ("moe_mxfp4", experts(m, False), (2, 3, 4, 5, 6, 7))
        for m in (1, 40, 1000)
    },
    **{
        f"norm_moe_norm-{m}": ("norm_moe_norm", block(m), (2, 4, 5, 6, 7, 8, 9, 10, 11, 15))
        for m in (1, 3, 40, 200)
    },
    # few.py's w13, which reads logits of the residual before its wait
    "norm_moe_norm-1-few": (
        "norm_moe_norm",
        block(1, 1344, 160),
        (2, 4, 5, 6, 7, 8, 9, 10, 11, 15),
    ),
    **{f"moe_fp8-{m}": ("moe_fp8", experts(m, True), ()) for m in (1, 40)},
    **{
        f"decode_attention-{rows}-{dim}": ("decode_attention", attention(rows, dim), (3, 4, 9))
        for rows, dim in ((2, 64), (300, 64), (300, 128))
    },
}


def prefetch_option(operator):
    arguments = getattr(ops, operator).default._schema.arguments
    return next((a.name for a in arguments if a.name.startswith("prefetch")), None)


def compare_replays(run, build, skip=()):
    """Each operand in turn: rewritten just before ``run``, in a graph, with two contents."""
    first, second = (build(Data(seed)) for seed in (0, 1))

    def copies():
        return [a.clone() if isinstance(a, torch.Tensor) else a for a in first]

    checked = []
    for index, operand in enumerate(first):
        if index in skip or not isinstance(operand, torch.Tensor):
            continue
        contents, wanted = (operand, second[index]), []
        for content in contents:
            args = copies()
            args[index] = content.clone()
            torch.cuda.synchronize()
            wanted.append([as_bytes(t).clone() for t in run(args)])
            torch.cuda.synchronize()
        if all(torch.equal(*pair) for pair in zip(*wanted, strict=True)):
            # a cache or a result that is written and not read
            continue
        args, staged = copies(), operand.clone()
        rewrite(staged, args[index])
        run(args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rewrite(staged, args[index])
            captured = run(args)
        for turn in range(20):
            staged.copy_(contents[turn % 2])
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            same = [
                torch.equal(as_bytes(got), want)
                for got, want in zip(captured, wanted[turn % 2], strict=True)
            ]
            assert all(same), f"operand {index} of replay {turn}: stale contents were read"
        checked.append(index)
    assert checked


@pytest.mark.gpu
@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("case", _OPERATIONS)
def test_an_operand_rewritten_just_before(case, vouched):
    """Every operand; where a caller vouches for weights or tables, every other one."""
    operator, build, trusted = _OPERATIONS[case]
    option = prefetch_option(operator)
    if vouched and option is None:
        pytest.skip("nothing to vouch for")

    def run(args):
        result = getattr(ops, operator)(*args, **({option: True} if vouched else {}))
        if result is None:
            result = args[5]
        return result if isinstance(result, tuple) else (result,)

    compare_replays(run, build, trusted if vouched else ())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["gemv", "large", "pingpong", "cooperative", "stream", "swap", "cublaslt"]
)
@pytest.mark.parametrize("vouched", [False, True])
def test_every_product_kernel(name, vouched):
    """By name: which of them an operator takes depends on the device's table."""
    device = torch.device("cuda")
    if name not in kernels(device) or (vouched and name not in PREFETCHING):
        pytest.skip(f"no such kernel or no prefetch here; runs_gluon: {runs_gluon(device)}")
    options = {"prefetch_weights": True} if vouched else {}
    rows = {"gemv": 2, "stream": 16, "swap": 16}.get(name, 300)

    def run(args):
        *operands, dtype = args
        out = torch.empty(rows, 2048, dtype=dtype, device=device)
        kernels(device)[name](*operands, out, **options)
        return (out,)

    compare_replays(run, product(rows), (1, 3, 4) if vouched else ())
