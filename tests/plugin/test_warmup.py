# SPDX-License-Identifier: MIT
"""Warm-up meets every kernel that a batch can need; the GPU's part is in test_gpu.py."""

import functools
import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from torch import nn
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

from oss_fused.kernels.eviction import activation_policy
from oss_fused.kernels.moe.config import (
    ExpertShape,
    choose_config,
    fp8_rows,
    fp8_variant,
    is_unrouted,
    mxfp4_variant,
    placing_chunk,
    router_part,
    router_variant,
    routing_block,
)
from oss_fused.kernels.op import set_observer
from oss_fused.kernels.tiles import ROW_BUCKETS, row_bucket
from oss_fused.layers.vllm import warmup
from oss_fused.layers.vllm.experts import choice as moe
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.warmup import first_of_each, row_counts, warm_batches

LIMITS = (1, 64, 300, 2048, 8192)
# experts of a rank and of all, top_k: gpt-oss 20b and 120b, on two ranks, Mixtral, Qwen-MoE; many
EXPERTS = (
    (32, 32, 4),
    (128, 128, 4),
    (64, 128, 4),
    (4, 4, 2),
    (8, 8, 2),
    (60, 60, 4),
    (256, 256, 8),
)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("experts", "of_all", "top_k"), EXPERTS)
@pytest.mark.parametrize("fp8_from", [256, 512, 1 << 30])
def test_every_tile_of_mxfp4_experts(experts, of_all, top_k, fp8_from, limit):
    shape = ExpertShape(top_k, experts, of_all, 2880, 2880)
    warmed = first_of_each(limit, lambda t: mxfp4_variant(t, shape, t >= fp8_from))

    def kernels(tokens, gluon):
        fp8 = tokens >= fp8_from
        config = choose_config(tokens, shape, fp8, gluon)
        blocks = tuple(routing_block(tokens, of_all, coded) for coded in (True, False))
        chunk = config.sorted_codes and placing_chunk(tokens, top_k)
        # one and two tokens have kernels of their own (moe/few.py)
        few = min(tokens, 3), is_unrouted(tokens, of_all), activation_policy(tokens)
        return fp8, config, chunk, few, blocks

    for gluon in (False, True):
        met = {kernels(tokens, gluon) for tokens in warmed}
        assert {kernels(tokens, gluon) for tokens in range(1, limit + 1)} <= met
    assert len(warmed) <= 30, "each costs time while the model loads"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("experts", "of_all", "top_k"), EXPERTS)
def test_every_tile_of_fp8_experts(experts, of_all, top_k, limit):
    warmed = first_of_each(limit, lambda t: fp8_variant(t, top_k, experts, of_all))

    def kernels(tokens):
        blocks = tuple(routing_block(tokens, of_all, coded) for coded in (True, False))
        return fp8_rows(tokens * top_k, experts), activation_policy(tokens), blocks

    met = {kernels(tokens) for tokens in warmed}
    assert {kernels(tokens) for tokens in range(1, limit + 1)} <= met


@pytest.mark.parametrize("limit", LIMITS)
def test_every_bucket_of_rows(limit):
    met = {row_bucket(rows) for rows in row_counts(limit, 2)}
    assert met == {row_bucket(rows) for rows in range(1, limit + 1)}


def test_every_router():
    for experts, last in ((4, 128), (32, 128), (64, 64), (128, 32)):
        warmed = first_of_each(8192, functools.partial(router_variant, experts=experts))
        assert {1, 17, last + 1} <= {*warmed} and len(warmed) <= 4

        def kernel(tokens, experts=experts):
            return router_part(tokens, experts), activation_policy(tokens)

        assert {kernel(tokens) for tokens in range(1, 8193)} == {*map(kernel, warmed)}


class OnGpu(torch.Tensor):
    """A CPU's tensor that says otherwise."""

    is_cuda = True


@pytest.mark.parametrize("plain", [True, False])
def test_router_is_compiled_for_few_and_for_many(plain, monkeypatch):
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(moe, "GateLinear", SimpleNamespace)
    weight = torch.randn(4, 64, dtype=torch.bfloat16)
    router = SimpleNamespace(weight=weight, bias=None, is_unquantized=plain)
    gain = torch.ones(64, dtype=torch.bfloat16).as_subclass(OnGpu)
    norm = SimpleNamespace(weight=gain, variance_epsilon=1e-5)
    ran = []
    set_observer(lambda name, *_: ran.append(name))
    try:
        moe.warm_router(norm, SimpleNamespace(router=router, is_sequence_parallel=False), 500)
    finally:
        set_observer(None)
    assert ran == ["add_rms_norm_router"] * 4 * plain


def test_bits16_layers_are_warmed_beside_others(monkeypatch):
    monkeypatch.setattr(warmup, "_done", set())
    weight = torch.empty(4, 64, 1).as_subclass(OnGpu)
    shape = {"w13_weight": weight, "w2_weight": torch.empty(4, 32, 1)}
    sizes = {"global_num_experts": 4, "top_k": 2, "activation": "swigluoai"}
    layer = SimpleNamespace(**shape, **sizes)
    ran = []

    def warm(fp8_min_tokens):
        method = OssMxfp4MoEMethod.__new__(OssMxfp4MoEMethod)
        method.fp8_min_tokens = fp8_min_tokens
        method.apply_monolithic = lambda layer, x, logits: ran.append(x.shape[0])
        ran.clear()
        warmup.warm_routed(method, layer, torch.bfloat16, 2048)
        return list(ran)

    bits16, fp8, again = warm(-1), warm(512), warm(512)
    assert 512 in fp8 and 512 not in bits16 and not again


@pytest.mark.parametrize("static", [False, True])
def test_linear_layers_run_every_bucket_with_the_scales_of_serving(static, monkeypatch):
    """The largest bucket takes cuBLASLt only with a scale for each row; static ones have one."""
    monkeypatch.setattr(warmup, "_done", set())
    layer = SimpleNamespace(
        weight=torch.zeros(128, 64).to(torch.float8_e4m3fn).as_subclass(OnGpu),
        weight_scale=torch.ones(128, 1),
        input_scale=torch.ones(1) if static else None,
        oss_max_tokens=8192,
    )

    def apply(layer, x, bias):
        scales = (layer.weight_scale, layer.input_scale)
        return torch.ops.oss_fused.fp8_linear(x, layer.weight, *scales, bias, True)

    met = {"fp8_linear": [], "fp8_gemm": []}

    def observe(name, args):
        if name == "fp8_gemm":
            met[name].append((args[0].shape[0], args[2].numel()))
        elif name == "fp8_linear":
            met[name].append((args[0].shape[0], args[3] is not None))

    set_observer(observe)
    try:
        warmup.warm_linear(layer, apply, torch.bfloat16, False)
    finally:
        set_observer(None)
    assert met["fp8_linear"] == [(rows, static) for rows in ROW_BUCKETS]
    assert met["fp8_gemm"] == [(rows, 1 if static else rows) for rows in ROW_BUCKETS]


def test_layers_of_two_levels_run_both_forms(monkeypatch):
    """Codes of one level come from activations, and those of more rows from norms."""
    monkeypatch.setattr(warmup, "_done", set())
    layer = QKVParallelLinear.__new__(QKVParallelLinear)
    nn.Module.__init__(layer)
    layer.weight = torch.zeros(128, 64).to(torch.float8_e4m3fn).as_subclass(OnGpu)
    layer.weight_scale, layer.oss_max_tokens = torch.ones(128, 1), 64
    layer._input_quant_key = None
    # by operator, the number of rows and whether they have two levels; args end before defaults
    place = {"fp8_gemm": 7, "add_rms_norm_quant": 7}
    met = {name: [] for name in place}

    def observe(name, args):
        if name in met:
            met[name].append((args[0].shape[0], len(args) > place[name]))

    def warm(bf16_rows):
        for ran in met.values():
            ran.clear()
        warmup.warm_linear(layer, lambda *_: None, torch.bfloat16, False, bf16_rows)
        return set(met["fp8_gemm"]), set(met["add_rms_norm_quant"])

    counts = [rows for rows in ROW_BUCKETS if rows <= 64]
    one_level = {(rows, False) for rows in counts}
    # eight is no bucket's last row
    all_counts, few = {*counts, 8}, {(rows, True) for rows in (1, 2, 4, 8)}
    set_observer(observe)
    try:
        expected = one_level | few | {(8, False)}
        assert warm(8) == (expected, {(rows, True) for rows in all_counts})
        assert warm(8) == (set(), set())
        # with one level a layer of the same shape is another
        assert warm(0) == (one_level, one_level)
    finally:
        set_observer(None)


@pytest.mark.parametrize(("rank", "skip"), [(0, False), (1, False), (0, True)])
def test_ranks_run_with_the_bias_of_serving(monkeypatch, rank, skip):
    """The first rank adds the bias for all; a skipped one is the caller's."""
    monkeypatch.setattr(warmup, "_done", set())
    layer = RowParallelLinear.__new__(RowParallelLinear)
    nn.Module.__init__(layer)
    layer.weight = torch.zeros(128, 64).to(torch.float8_e4m3fn).as_subclass(OnGpu)
    layer.weight_scale, layer.oss_max_tokens = torch.ones(128, 1), 2
    layer.bias, layer.tp_rank, layer.skip_bias_add = torch.zeros(128), rank, skip
    given, rows = [], []

    def observe(name, args):
        if name == "fp8_linear":
            given.append(args[4])
            rows.append(args[0].shape[0])
        if name == "fp8_gemm":
            given.append(args[4])

    set_observer(observe)
    try:
        warmup.warm_linear(layer, lambda layer, x, bias: given.append(bias), torch.bfloat16, False)
    finally:
        set_observer(None)
    expected = None if rank or skip else layer.bias
    # one row also as a dense MLP gives it
    assert rows == [1] and len(given) == 5
    assert all(bias is expected for bias in given)


def test_once_for_each_key(monkeypatch):
    monkeypatch.setattr(warmup, "_done", set())
    ran = []
    for key in ("a", "a", "b"):
        warm_batches(key, 100, lambda tokens: tokens > 30, ran.append)
    assert ran == [1, 31, 1, 31]


def test_a_method_tells_batches_apart(monkeypatch):
    method = OssMxfp4MoEMethod.__new__(OssMxfp4MoEMethod)
    method.fp8_min_tokens = 512
    layer = type("Layer", (), {"top_k": 4, "global_num_experts": 128})
    layer.w13_weight = layer.w2_weight = torch.empty(128, 64, 1)
    assert method.variant(layer, 400) != method.variant(layer, 384)
    assert method.variant(layer, 400) != method.variant(layer, 512)
    method.fp8_min_tokens = -1
    assert method.variant(layer, 511) == method.variant(layer, 512)


def test_experts_see_the_tokens_of_all_data_parallel_ranks(monkeypatch):
    monkeypatch.setattr(warmup, "max_tokens", lambda: 2048)
    assert warmup.max_routed_tokens(SimpleNamespace(dp_size=4)) == 8192


def test_warm_ups_wait_until_all_layers_are_ready(monkeypatch):
    """All of them are compiled together first, then run; later ones run at once."""
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(warmup, "_collected", None)
    ran, inside = [], []

    @contextmanager
    def compiling_only(threads):
        assert threads >= 1
        inside.append(True)
        yield
        inside.clear()

    monkeypatch.setitem(
        sys.modules, "oss_fused.kernels.ahead", SimpleNamespace(compiling_only=compiling_only)
    )
    warmup.collect()
    for key in ("a", "a", "b"):
        warm_batches(key, 100, lambda tokens: tokens > 30, lambda t: ran.append((bool(inside), t)))
    warmup.when_ready(lambda: ran.append((bool(inside), "one")))
    assert ran == []
    warmup.finish()
    both = [1, 31, 1, 31, "one"]
    assert ran == [*((True, each) for each in both), *((False, each) for each in both)]
    warmup.finish()
    # another model of this process, or a reload: few kernels are new
    warmup.collect()
    warm_batches("c", 1, lambda tokens: tokens, ran.append)
    assert ran[10:] == [1]


def test_a_load_that_failed_leaves_nothing(monkeypatch):
    """The next model of this process warms up anew; the failed one's layers are not kept."""
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(warmup, "_collected", None)
    monkeypatch.setitem(sys.modules, "oss_fused.kernels.ahead", None)
    monkeypatch.setattr(warmup.logger, "warning", lambda *_: None)
    ran, layer = [], nn.Linear(1, 1)
    kept = weakref.ref(layer)
    warmup.collect()
    warm_batches("a", 1, lambda tokens: 0, lambda tokens, layer=layer: ran.append("failed"))
    del layer
    warmup.collect()
    assert kept() is None
    warm_batches("a", 1, lambda tokens: 0, lambda tokens: ran.append("served"))
    assert ran == []
    warmup.finish()
    assert ran == ["served"]


def test_larger_steps_of_a_second_engine_are_warmed_up(monkeypatch):
    monkeypatch.setattr(warmup, "_done", set())
    ran = []
    for limit in (20, 100, 20):
        warm_batches("a", limit, lambda tokens: tokens > 30, ran.append)
    assert ran == [1, 1, 31]


def test_without_a_parallel_compiler_kernels_are_compiled_in_turn(monkeypatch):
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(warmup, "_collected", None)
    monkeypatch.setitem(sys.modules, "oss_fused.kernels.ahead", None)
    said, ran = [], []
    monkeypatch.setattr(warmup.logger, "warning", lambda text, *a: said.append(text % a))
    warmup.collect()
    warmup.when_ready(lambda: ran.append(1))
    warmup.finish()
    assert ran == [1] and "one after the other" in said[0]
