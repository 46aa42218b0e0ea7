# SPDX-License-Identifier: MIT
"""Which batches and layers take our decode attention, and what it is told of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from oss_fused.layers.vllm import attention, warmup
from oss_fused.layers.vllm.attention import FP8, OssAttentionImpl, adopt_attention

ROWS, HEADS, KV_HEADS, SIZE, PAGE, PAGES = 3, 4, 2, 16, 16, 9
LENGTHS = (37, 1, 48)
Q_SCALE, K_SCALE, V_SCALE = 0.5, 0.25, 2.0


def implementation(window=None, fp8=False, sinks=False):
    """FlashAttention's, as vLLM makes it for a decoder, without a GPU."""
    impl = FlashAttentionImpl.__new__(FlashAttentionImpl)
    impl.attn_type, impl.alibi_slopes, impl.logits_soft_cap = AttentionType.DECODER, None, 0
    impl.dcp_world_size, impl.head_size, impl.scale = 1, SIZE, 0.3
    impl.vllm_flash_attn_version, impl.kv_sharing_target_layer_name = 3, None
    impl.num_heads, impl.num_kv_heads = HEADS, KV_HEADS
    impl.kv_cache_dtype = "fp8" if fp8 else "auto"
    impl.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    impl.sinks = torch.randn(HEADS).bfloat16() if sinks else None
    return impl


class Layer(Attention):
    """An attention layer that vLLM has not built."""

    def __init__(self, impl):
        nn.Module.__init__(self)
        self.impl = impl
        self.register_parameter("weight", nn.Parameter(torch.zeros(1)))
        self._q_scale, self._k_scale, self._v_scale = map(torch.tensor, (Q_SCALE, K_SCALE, V_SCALE))


def adopted(*impls, rows=ROWS, drafts=None, sequences=1, **parallel):
    layers = [Layer(impl) for impl in impls]
    adopt_attention(
        nn.ModuleList(layers),
        SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            cache_config=SimpleNamespace(block_size=PAGE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=rows, max_num_seqs=sequences),
            speculative_config=(
                None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts)
            ),
        ),
    )
    return layers


def metadata(**changes):
    """Of a decode step: sequences whose pages lie in any order."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).int().view(ROWS, -1)
    fields = {
        "num_actual_tokens": ROWS, "max_query_len": 1, "causal": True, "block_table": order,
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32), "rswa_prefix_lens": None,
        "mm_prefix_query_range_tensor": None, "query_start_loc": None,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def inputs(fp8, rows=ROWS):
    torch.manual_seed(1)
    dtype = FP8 if fp8 else torch.bfloat16
    query = torch.randn(rows, HEADS, SIZE).to(dtype)
    cache = torch.randn(PAGES, KV_HEADS, PAGE, 2 * SIZE).to(dtype)
    return query, cache.view(torch.uint8) if fp8 else cache


def expected(query, cache, table, window, fp8, sinks, lengths=LENGTHS):
    """Attention as in the textbook, with one query and head at a time."""
    scales = (Q_SCALE, K_SCALE, V_SCALE) if fp8 else (1.0, 1.0, 1.0)
    if fp8:
        cache = cache.view(FP8)
    q, stored = query.float() * scales[0], cache.float()
    out = torch.empty(len(query), HEADS, SIZE)
    for row, length in enumerate(lengths):
        last = length - 1
        seen = [at for at in range(length) if window is None or last - at < window]
        for head in range(HEADS):
            both = torch.stack(
                [
                    stored[table[row, at // PAGE], head // (HEADS // KV_HEADS), at % PAGE]
                    for at in seen
                ]
            )
            keys, values = both[:, :SIZE] * scales[1], both[:, SIZE:] * scales[2]
            logits = keys @ q[row, head] * 0.3
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].float()[None]])
            out[row, head] = logits.softmax(0)[: len(seen)] @ values
    return out.bfloat16()


@pytest.mark.parametrize("window", [None, 1, 16, 20])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode_step(window, fp8, sinks):
    (layer,) = adopted(implementation(window, fp8, sinks))
    (query, cache), told = inputs(fp8), metadata()
    # a graph's batch has rows beyond those of the step
    query = torch.cat([query, query[:1]])
    output = torch.full((ROWS + 1, HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    got = layer.impl.forward(layer, query, None, None, cache, told, output)
    want = expected(query[:ROWS], cache, told.block_table, window, fp8, layer.impl.sinks)
    assert got is output
    # bf16 results of sums in another order
    torch.testing.assert_close(output[:ROWS], want, rtol=2**-7, atol=2**-7)
    assert output[ROWS:].eq(7).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("counts", [(4, 1, 4), (2, 1, 3)], ids=str)
def test_verification_of_drafts(counts, fp8):
    (layer,) = adopted(implementation(20, fp8, sinks=True), drafts=3, sequences=ROWS)
    rows = sum(counts)
    query, cache = inputs(fp8, rows + 1)
    starts = torch.tensor((0, *counts)).cumsum(0).int()
    told = metadata(max_query_len=max(counts), num_actual_tokens=rows, query_start_loc=starts)
    output = torch.full((rows + 1, HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    layer.impl.forward(layer, query, None, None, cache, told, output)
    # each draft sees the positions up to its own
    lengths = [
        length - count + 1 + at for length, count in zip(LENGTHS, counts) for at in range(count)
    ]
    table = told.block_table.repeat_interleave(torch.tensor(counts), 0)
    want = expected(query[:rows], cache, table, 20, fp8, layer.impl.sinks, lengths)
    torch.testing.assert_close(output[:rows], want, rtol=2**-7, atol=2**-7)
    assert output[rows:].eq(7).all()


def test_every_number_of_drafts_is_one_kernel(monkeypatch):
    (layer,) = adopted(implementation(), drafts=3, sequences=ROWS)
    seen = []
    monkeypatch.setattr(
        torch.ops.oss_fused, "decode_attention", lambda *arguments: seen.append(arguments[14:])
    )
    query, cache = inputs(False)
    for most in (1, 2, 4):
        told = metadata(max_query_len=most, query_start_loc="starts")
        layer.impl.forward(layer, query, None, None, cache, told, torch.empty_like(query))
    assert seen == [(None, 1), ("starts", 4), ("starts", 4)]


def test_warm_up_compiles_both(monkeypatch):
    (layer,) = adopted(implementation(), drafts=3, sequences=4, rows=8)
    seen = []
    monkeypatch.setattr(
        torch.ops.oss_fused,
        "decode_attention",
        lambda *arguments: seen.append((len(arguments[0]), *arguments[15:])),
    )
    monkeypatch.setattr(warmup, "_done", set())
    attention._warm_up(layer.impl, torch.bfloat16)
    # 16 rows of scratch: four sequences of four tokens
    assert seen == [(1,), (1, 4), (2,), (2, 4), (4,), (4, 4), (8,), (16,)]


def test_warm_up_ends_with_the_largest_batch(monkeypatch):
    (layer,) = adopted(implementation(), sequences=16)
    layer.impl.max_rows, seen = 13, []
    monkeypatch.setattr(
        torch.ops.oss_fused, "decode_attention", lambda query, *_: seen.append(len(query))
    )
    monkeypatch.setattr(warmup, "_done", set())
    attention._warm_up(layer.impl, torch.bfloat16)
    assert seen == [1, 2, 4, 8, 13]


def test_warm_up_ends_with_the_largest_batch_of_drafts(monkeypatch):
    (layer,) = adopted(implementation(), drafts=3, sequences=16)
    layer.impl.max_rows, seen = 52, []
    monkeypatch.setattr(
        torch.ops.oss_fused,
        "decode_attention",
        lambda *arguments: seen.append((len(arguments[0]), *arguments[15:])),
    )
    monkeypatch.setattr(warmup, "_done", set())
    attention._warm_up(layer.impl, torch.bfloat16)
    assert [rows for rows, *drafts in seen if drafts] == [1, 2, 4, 8, 13]
    assert [rows for rows, *drafts in seen if not drafts] == [1, 2, 4, 8, 16, 32, 52]


def test_too_many_drafts_are_flash_attentions_and_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(attention.logger, "warning_once", lambda text, *a: said.append(text % a))
    layers = adopted(implementation(), implementation(), drafts=8, sequences=ROWS)
    assert [layer.impl.max_queries for layer in layers] == [1, 1]
    (text,) = said
    assert "num_speculative_tokens=8" in text and text.endswith("7 drafts run FlashAttention")
    (layer,) = adopted(implementation(), drafts=7, sequences=ROWS)
    assert layer.impl.max_queries == 8 and len(said) == 1


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        # a prompt beside sequences that decode
        ({"max_query_len": 2, "num_actual_tokens": ROWS + 1}, {}),
        ({"causal": False}, {}),
        ({"causal": torch.tensor([True])}, {}),
        ({"rswa_prefix_lens": torch.zeros(ROWS)}, {}),
        ({"mm_prefix_query_range_tensor": torch.zeros(ROWS)}, {}),
        ({}, {"output_scale": torch.ones(1)}),
        ({}, {"output_block_scale": torch.ones(1)}),
        (None, {}),
    ],
)
def test_other_batches_are_flash_attentions(changes, options, monkeypatch):
    (layer,) = adopted(implementation())
    seen = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **kw: seen.append((args, kw)))
    query, cache = inputs(False, ROWS + 1)
    output = torch.zeros(ROWS + 1, HEADS, SIZE, dtype=torch.bfloat16)
    told = None if changes is None else metadata(**changes)
    layer.impl.forward(layer, query, query, query, cache, told, output, **options)
    ((args, kw),) = seen
    arguments = (layer.impl, layer, query, query, query, cache, told, output)
    assert all(a is b for a, b in zip(args, arguments, strict=True))
    assert kw == {"output_scale": None, "output_block_scale": None} | options
    assert output.eq(0).all()


# so many tokens of a prompt each, the last of the sequences' positions
_PROMPTS = (30, 1, 17)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [1, 20])
def test_prompts_in_a_short_window(window, fp8, monkeypatch):
    """A prompt from its first token, one behind a cached part, a sequence that decodes."""
    (layer,) = adopted(implementation(window, fp8, sinks=True))
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **kw: pytest.fail("flash"))
    rows = sum(_PROMPTS)
    query, cache = inputs(fp8, rows + 1)
    starts = torch.tensor((0, *_PROMPTS)).cumsum(0).int()
    told = metadata(
        max_query_len=30,
        num_actual_tokens=rows,
        query_start_loc=starts,
        seq_lens=torch.tensor((30, 33, 48), dtype=torch.int32),
    )
    output = torch.full((rows + 1, HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    layer.impl.forward(layer, query, None, None, cache, told, output)
    lengths = [*range(1, 31), 33, *range(32, 49)]
    table = told.block_table.repeat_interleave(torch.tensor(_PROMPTS), 0)
    want = expected(query[:rows], cache, table, window, fp8, layer.impl.sinks, lengths)
    torch.testing.assert_close(output[:rows], want, rtol=2**-7, atol=2**-7)
    assert output[rows:].eq(7).all()


@pytest.mark.parametrize(
    ("window", "tokens"), [(None, 48), (129, 48), (20, 47)], ids=["none", "long", "short prompts"]
)
def test_prompts_that_flash_attention_keeps(window, tokens, monkeypatch):
    (layer,) = adopted(implementation(window))
    seen = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **kw: seen.append(args))
    query, cache = inputs(False, tokens)
    told = metadata(max_query_len=40, num_actual_tokens=tokens)
    layer.impl.forward(layer, query, query, query, cache, told, torch.empty_like(query))
    assert len(seen) == 1


def test_warm_up_compiles_a_short_window(monkeypatch):
    layers = adopted(implementation(20), implementation(), implementation(129), rows=1)
    seen = []
    run = torch.ops.oss_fused.window_attention
    monkeypatch.setattr(
        torch.ops.oss_fused,
        "window_attention",
        lambda *arguments: (seen.append(arguments[8]), run(*arguments)),
    )
    monkeypatch.setattr(warmup, "_done", set())
    for layer in layers:
        attention._warm_up(layer.impl, torch.bfloat16)
    assert seen == [20]


def test_scratch_holds_the_largest_step():
    """One buffer for layers alike; as many rows as a step may have."""
    layers = adopted(implementation(), implementation(20), rows=ROWS)
    assert layers[0].impl.arrivals is layers[1].impl.arrivals
    assert layers[0].impl.arrivals.dtype == torch.int32
    assert layers[0].impl.arrivals.eq(0).all() and layers[0].impl.max_rows == ROWS
    query, cache = inputs(False)
    output = torch.empty(ROWS, HEADS, SIZE, dtype=torch.bfloat16)
    layers[0].impl.forward(layers[0], query, None, None, cache, metadata(), output)
    assert layers[0].impl.arrivals.numel() == ROWS * KV_HEADS


def test_scratch_holds_every_programs_counter_with_drafts():
    (layer,) = adopted(implementation(), rows=ROWS, drafts=3, sequences=ROWS)
    assert layer.impl.arrivals.numel() == ROWS * 4 * KV_HEADS


def test_layers_of_other_shapes_have_scratch_of_their_own():
    more = implementation()
    more.num_kv_heads = 2 * KV_HEADS
    layers = adopted(implementation(), more)
    assert [layer.impl.arrivals.numel() for layer in layers] == [
        ROWS * KV_HEADS,
        2 * ROWS * KV_HEADS,
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_type", AttentionType.ENCODER_ONLY),
        ("alibi_slopes", [1.0]),
        ("logits_soft_cap", 30.0),
        ("dcp_world_size", 2),
        ("head_size", 512),
    ],
)
def test_layers_that_stay_flash_attentions(name, value):
    impl = implementation()
    setattr(impl, name, value)
    other, ours = adopted(impl, implementation())
    assert type(other.impl) is FlashAttentionImpl and type(ours.impl) is OssAttentionImpl


def test_none_is_adopted_where_steps_overlap():
    (layer,) = adopted(implementation(), use_ubatching=True)
    assert type(layer.impl) is FlashAttentionImpl
