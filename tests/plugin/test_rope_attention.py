# SPDX-License-Identifier: MIT
"""The operator in front of attention, with a stand-in for vLLM's forward context."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.utils.torch_utils import _encode_layer_name

from oss_fused.kernels.op import get_kernel
from oss_fused.layers.vllm import rope_attention
from oss_fused.layers.vllm.attention import FP8, OssAttentionImpl
from oss_fused.layers.vllm.decoder import norm_for
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.quant.scheme import FP8_DYNAMIC

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 16, 5


@pytest.fixture
def context(monkeypatch):
    """One attention module in vLLM's forward context; attention itself copies q."""
    seen = {}

    def unified(query, key, value, output, layer_name):
        assert key.shape == value.shape == (TOKENS, KV_HEADS, SIZE)
        seen.update(query=query, key=key, value=value)
        output.copy_(query)

    def start(fp8=False, norm=False, slots=True, reads_rows=False):
        layer = SimpleNamespace(
            impl=SimpleNamespace(reads_rows=lambda metadata: reads_rows and metadata == "metadata"),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            head_size_v=SIZE,
            kv_cache_dtype="fp8" if fp8 else "auto",
            kv_cache_torch_dtype=torch.bfloat16,
            kv_sharing_target_layer_name=None,
            query_quant=SimpleNamespace(group_shape=SimpleNamespace(is_per_tensor=lambda: True))
            if fp8
            else None,
            _q_scale=torch.tensor(0.02),
            _k_scale=torch.tensor(0.03),
            _v_scale=torch.tensor(0.04),
        )
        gains = [
            SimpleNamespace(weight=torch.rand(SIZE).bfloat16(), variance_epsilon=1e-6)
            for _ in range(2 * norm)
        ]
        attention = SimpleNamespace(
            attn=layer,
            rotary_emb=SimpleNamespace(
                cos_sin_cache=torch.randn(40, SIZE).bfloat16(), is_neox_style=True
            ),
            **dict(zip(("q_norm", "k_norm"), gains)),
        )
        layer.impl.rope = rope_attention.RopeAndCache(attention)
        cache = torch.zeros(3, KV_HEADS, 16, 2 * SIZE, dtype=torch.uint8 if fp8 else torch.bfloat16)
        mapping = torch.tensor([5, 33, -1, 2, -1]) if slots else None
        monkeypatch.setattr(
            rope_attention,
            "get_attention_context",
            lambda name: ("metadata", layer, cache, mapping),
        )
        return attention, cache, mapping

    monkeypatch.setattr(rope_attention, "unified_attention_with_output", unified)
    start.seen = seen
    return start


def run():
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16()
    positions = torch.randint(0, 40, (TOKENS,))
    output = torch.zeros(TOKENS, HEADS, SIZE, dtype=torch.bfloat16)
    torch.ops.oss_fused.rope_attention(qkv, positions, output, _encode_layer_name("layer"))
    return qkv, positions, output


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rotates_writes_and_attends(fp8, norm, context):
    attention, cache, slots = context(fp8, norm)
    qkv, positions, output = run()
    scales = (torch.tensor([s]) if fp8 else None for s in (0.03, 0.04))
    want_cache = torch.zeros_like(cache)
    view = want_cache.view(FP8) if fp8 else want_cache
    want = get_kernel("torch", "rope_kv")(
        *(qkv, positions, attention.rotary_emb.cos_sin_cache, HEADS, True),
        *view.transpose(1, 2).split(SIZE, -1),
        *(slots, *scales),
        *((attention.q_norm.weight, attention.k_norm.weight) if norm else (None, None)),
        1e-6 if norm else 0.0,
        torch.tensor([0.02]) if fp8 else None,
    )
    assert context.seen["query"].dtype == (FP8 if fp8 else torch.bfloat16)
    assert torch.equal(output.view(TOKENS, -1), want.to(torch.bfloat16))
    assert torch.equal(cache, want_cache)
    written = cache.transpose(1, 2).reshape(3 * 16, -1).float().abs().sum(1) > 0
    assert written.nonzero().flatten().tolist() == [2, 5, 33]


@pytest.mark.parametrize("norm", [False, True])
def test_attention_of_rows_gets_rotated_keys(norm, context):
    """Also of padding, whose keys the cache does not have."""
    attention, cache, slots = context(norm=norm, reads_rows=True)
    qkv, positions, output = run()
    gains = (attention.q_norm.weight, attention.k_norm.weight) if norm else (None, None)
    want_cache = torch.zeros_like(cache)
    want = get_kernel("torch", "rope_kv")(
        *(qkv, positions, attention.rotary_emb.cos_sin_cache, HEADS, True),
        *want_cache.transpose(1, 2).split(SIZE, -1),
        *(slots, None, None, *gains, 1e-6 if norm else 0.0, None, True),
    ).view(TOKENS, HEADS + KV_HEADS, SIZE)
    seen = context.seen
    assert torch.equal(seen["query"], want[:, :HEADS]) and torch.equal(output, want[:, :HEADS])
    assert torch.equal(seen["key"], want[:, HEADS:])
    assert torch.equal(seen["value"], qkv.view(TOKENS, -1, SIZE)[:, HEADS + KV_HEADS :])
    assert torch.equal(cache, want_cache)


@pytest.mark.parametrize("few", [True, False])
def test_projection_joins_for_few_tokens(few, context, monkeypatch):
    attention, cache, _ = context(fp8=True)
    monkeypatch.setattr(rope_attention, "FEW_TOKENS", TOKENS if few else TOKENS - 1)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * SIZE, 32)
    codes, scale = torch.ops.oss_fused.quantize_fp8(weight, None, "channel")
    attention.qkv_proj = SimpleNamespace(weight=codes, weight_scale=scale, bias=None)
    x, x_scale = torch.ops.oss_fused.quantize_fp8(torch.randn(TOKENS, 32), None, "token")
    positions = torch.randint(0, 40, (TOKENS,))
    args = (x, codes, x_scale, scale, None, torch.bfloat16)
    qkv = torch.ops.oss_fused.project_unless_fused(*args)
    want = torch.ops.oss_fused.fp8_gemm(*args)
    assert qkv.shape == want.shape and (few or torch.equal(qkv, want))
    outputs = []
    for first, rest in ((want, ()), (qkv.fill_(torch.nan) if few else qkv, (x, x_scale))):
        cache.zero_()
        output = torch.zeros(TOKENS, HEADS, SIZE, dtype=torch.bfloat16)
        name = _encode_layer_name("layer")
        torch.ops.oss_fused.rope_attention(first, positions, output, name, *rest)
        outputs.append((output, cache.clone()))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


def test_few_tokens_reach_the_projection_in_both_levels(context):
    """Where there are fewer levels than tokens, nothing of them is read."""
    torch.manual_seed(0)
    attention, cache, slots = context()
    attention.attn.impl.rope.joins, attention.attn.layer_name = True, "layer"
    attention.o_proj = lambda x: (x, None)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * SIZE, 256)
    codes, scale = torch.ops.oss_fused.quantize_fp8(weight, None, "channel")
    norm = SimpleNamespace(weight=torch.ones(256).bfloat16(), variance_epsilon=1e-6)
    x, positions = torch.randn(TOKENS, 256).bfloat16(), torch.randint(0, 40, (TOKENS,))
    normed = get_kernel("torch", "add_rms_norm_quant")(x, None, norm.weight, 1e-6, None)[3]

    def results(bf16_rows):
        method = OssFp8LinearMethod(FP8_DYNAMIC, True, "qkv_proj")
        method.bf16_rows = bf16_rows
        attention.qkv_proj = SimpleNamespace(
            weight=codes, weight_scale=scale, bias=None,
            quant_method=method, _input_quant_key=kFp8DynamicTokenSym,
        )  # fmt: skip
        cache.zero_()
        activation, _ = norm_for(norm, attention.qkv_proj, x, None)
        return rope_attention.attend(attention, positions, activation).float(), cache.float()

    qkv = (normed.float() @ (codes.float() * scale).t()).bfloat16()
    want = get_kernel("torch", "rope_kv")(
        *(qkv, positions, attention.rotary_emb.cos_sin_cache, HEADS, True),
        *torch.zeros_like(cache).transpose(1, 2).split(SIZE, -1),
        *(slots, None, None, None, None, 0.0, None),
    ).float()
    one_level, both, fewer = results(0), results(TOKENS), results(TOKENS - 1)
    assert (both[0] - want).norm() < 0.005 * want.norm()
    assert (both[0] - want).norm() * 3 < (one_level[0] - want).norm()
    assert all(torch.equal(a, b) for a, b in zip(fewer, one_level))


@pytest.fixture
def warmed(context, monkeypatch):
    """(most rows of two levels) -> what ``warm_up`` projects, and the cache's pages."""
    return functools.partial(_warmed, context, monkeypatch)


def _warmed(context, monkeypatch, most):
    attention, _, _ = context(fp8=True)
    linear = SimpleNamespace(weight=torch.zeros(16, 32), _input_quant_key=kFp8DynamicTokenSym)
    attention.qkv_proj = linear
    attention.attn.impl.page_size = 32
    projections, pages = [], set()

    def call(rope, layer, projected, positions, cache, slots, with_keys=False):
        projections.append(projected)
        pages.add(cache.shape[2])

    monkeypatch.setattr(rope_attention, "bf16_rows_of", lambda reader: most)
    monkeypatch.setattr(rope_attention.RopeAndCache, "__call__", call)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rope = rope_attention.RopeAndCache(attention)
        rope.joins = True
        rope.warm_up(torch.bfloat16, 300)
    finally:
        torch.set_default_dtype(before)
    return projections, pages


@pytest.mark.parametrize("most", [0, 8])
def test_every_tile_of_the_joined_kernel_is_warmed(most, warmed):
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.qkv.stream import _tile

    def tile(rows):
        levels = 2 if rows <= most else 1
        return levels, [_tile(rows * levels, k, levels) for k in (64, 2880, 4096, 8192)]

    joined = [projected[0] for projected in warmed(most)[0] if len(projected) == 3]
    compiled = [tile(codes.shape[0]) for codes in joined]
    assert all(tile(rows) in compiled for rows in range(1, rope_attention.FEW_TOKENS + 1))


@pytest.mark.parametrize("most", [0, 8])
def test_warm_up_calls_what_serving_calls(most, warmed):
    """Weights load under the model's dtype: a scale in it would compile a kernel nobody uses."""
    projections, pages = warmed(most)
    joined = [projected for projected in projections if len(projected) == 3]
    rows = [codes.shape[0] for codes, *_ in joined]
    assert rows == [*([1, 4, 8, 9] if most else [1]), 16, 32, 64, rope_attention.FEW_TOKENS]
    assert {(codes.dtype, scale.dtype) for codes, scale, _ in joined} == {(FP8, torch.float32)}
    assert {levels.shape[0] for *_, levels in joined} == {2 * most}
    assert [qkv.shape[0] for (qkv,) in (p for p in projections if len(p) == 1)] == [1, 128, 300]
    assert pages == {32}


@pytest.mark.parametrize("fp8", [False, True])
def test_warm_up_rotates_with_keys_unless_the_cache_is_fp8(fp8, context, monkeypatch):
    attention, _, _ = context(fp8=fp8)
    attention.attn.impl.page_size, seen = 16, []
    attention.qkv_proj = SimpleNamespace()
    rope = attention.attn.impl.rope
    rope.joins = False

    def call(rope, layer, projected, positions, cache, slots, with_keys=False):
        seen.append((len(projected[0]), with_keys))

    monkeypatch.setattr(rope_attention.RopeAndCache, "__call__", call)
    rope.warm_up(torch.bfloat16, 600)
    counts, both = rope_attention.ROPE_COUNTS, (False,) if fp8 else (False, True)
    assert seen == [(rows, with_keys) for rows in counts for with_keys in both]


def test_warm_up_meets_every_launch_of_rope_kv():
    pytest.importorskip("triton")
    from oss_fused.kernels.rope.rope_kv import _config

    for pairs in (32, 64, 128):
        met = {_config(rows, pairs) for rows in rope_attention.ROPE_COUNTS}
        assert met == {_config(rows, pairs) for rows in range(1, 8193)}


def test_profiling_run_has_no_cache(context):
    _, cache, _ = context(slots=False)
    run()
    assert cache.abs().sum() == 0


def test_which_modules_fit(context):
    attention, _, _ = context()
    attention.attn.impl = OssAttentionImpl.__new__(OssAttentionImpl)
    rope = RotaryEmbedding.__new__(RotaryEmbedding)
    nn.Module.__init__(rope)
    rope.head_size, rope.use_flashinfer = SIZE, False
    attention.rotary_emb = rope
    # Qwen2 says whether it has norms per head; with and without
    for attention.qk_norm in (True, False):
        assert rope_attention._fits(attention, torch.bfloat16)
    assert not rope_attention._fits(attention, torch.float16)
    for owner, name, value in (
        (attention.attn, "kv_sharing_target_layer_name", "model.layers.0"),
        (attention.attn, "kv_cache_dtype", "fp8_per_token_head"),
        (attention.attn, "head_size_v", 8),
        (attention, "do_llama_4_scaling", True),
        (attention, "rotary_emb", nn.Identity()),
        (attention.attn, "impl", object()),
    ):
        if name == "kv_cache_dtype":
            attention.attn.kv_cache_torch_dtype = torch.uint8
        old = getattr(owner, name, None)
        setattr(owner, name, value)
        assert not rope_attention._fits(attention, torch.bfloat16), name
        setattr(owner, name, old)
        attention.attn.kv_cache_torch_dtype = torch.bfloat16
