# SPDX-License-Identifier: MIT
"""Which steps read keys and values from their rows, and what FlashAttention is told of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from oss_fused.layers.vllm.fresh_rows import note_fresh
from tests.plugin.test_attention_impl import (
    HEADS,
    KV_HEADS,
    ROWS,
    SIZE,
    adopted,
    implementation,
    inputs,
    metadata,
)

# tokens of three prompts, and behind them what a graph pads a step with
_FRESH, _PADDED = (70, 1, 80), 160


def fresh(**changes):
    """Of a step in which all sequences begin."""
    starts = torch.tensor((0, *_FRESH)).cumsum(0).int()
    told = metadata(
        **{
            "max_query_len": max(_FRESH),
            "num_actual_tokens": sum(_FRESH),
            "query_start_loc": starts,
            "seq_lens": torch.tensor(_FRESH, dtype=torch.int32),
        }
        | changes
    )
    note_fresh(told)
    return told


@pytest.fixture
def flash(monkeypatch):
    """Calls of FlashAttention over rows, which vLLM for a CPU does not have."""
    seen = []
    module = SimpleNamespace(flash_attn_varlen_func=lambda **arguments: seen.append(arguments))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    # a PyTorch for CPUs cannot say
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


@pytest.mark.parametrize("window", [None, 129])
def test_a_step_in_which_all_sequences_begin_reads_its_rows(window, flash, monkeypatch):
    (layer,) = adopted(implementation(window, sinks=True))
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **kw: pytest.fail("cache"))
    query, told = torch.randn(_PADDED, HEADS, SIZE), fresh()
    key, value = torch.randn(2, _PADDED, KV_HEADS, SIZE)
    output = torch.zeros_like(query)
    assert layer.impl.reads_rows(told)
    layer.impl.forward(layer, query, key, value, None, told, output)
    (call,) = flash
    for name, rows in (("q", query), ("k", key), ("v", value), ("out", output)):
        assert torch.equal(call[name], rows[: sum(_FRESH)])
    assert call["out"].data_ptr() == output.data_ptr()
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is told.query_start_loc
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 80
    assert call["causal"] is True and call["fa_version"] == 3
    assert call["s_aux"] is layer.impl.sinks and call["softmax_scale"] == 0.3
    assert call["window_size"] == [-1, -1] if window is None else [128, 0]


@pytest.mark.parametrize(
    ("changes", "of_layer"),
    [
        ({}, {"vllm_flash_attn_version": 2}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}),
        # each sequence has no more tokens than a step that decodes or verifies drafts
        ({"max_query_len": 4}, {"max_queries": 4}),
        ({"num_actual_tokens": 128}, {}),
        ({"causal": False}, {}),
        ({"rswa_prefix_lens": torch.zeros(ROWS)}, {}),
        ({}, {"sliding_window": (19, 0)}),
    ],
)
def test_steps_that_read_the_cache_though_all_begin(changes, of_layer, flash):
    (layer,) = adopted(implementation())
    assert layer.impl.reads_rows(fresh()) and not layer.impl.reads_rows(metadata())
    vars(layer.impl).update(of_layer)
    assert not layer.impl.reads_rows(fresh(**changes)) and not layer.impl.reads_rows(None)


def test_a_recorded_graph_reads_the_cache(flash, monkeypatch):
    """Its replays have other sequences, whatever the metadata says."""
    (layer,) = adopted(implementation())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not layer.impl.reads_rows(fresh())


def test_a_quantised_output_is_not_of_rows(flash, monkeypatch):
    (layer,) = adopted(implementation())
    seen = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **kw: seen.append(kw))
    query, cache = inputs(False, sum(_FRESH))
    rest = (cache, fresh(), torch.empty_like(query))
    layer.impl.forward(layer, query, query, query, *rest, output_scale=torch.ones(1))
    assert len(seen) == 1 and not flash
