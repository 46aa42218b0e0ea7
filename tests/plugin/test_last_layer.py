# SPDX-License-Identifier: MIT
"""The last decoder layer of steps with prompts: sampled rows alone, and which steps these are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.aux_output import AuxOutputConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from oss_fused.layers.vllm import sampled_rows as module
from oss_fused.layers.vllm.attention import FP8, OssAttentionImpl
from oss_fused.layers.vllm.experts.mxfp4 import OssMxfp4MoEMethod
from oss_fused.layers.vllm.sampled_rows import note_rows, noted_rows, rows_of_step, take_rows
from oss_fused.plugin.last_layer import mark_last_layer, sampled_rows
from oss_fused.plugin.model_state import OssModelState
from oss_fused.quant.settings import ServingOptions
from tests.plugin.test_attention_impl import (
    HEADS,
    LENGTHS,
    SIZE,
    adopted,
    expected,
    implementation,
    inputs,
    metadata,
)

# tokens of each sequence in the step: LENGTHS are the positions with them
NEW = (20, 1, 13)
SAMPLED = torch.tensor([19, 20, 33])


def prompts(**changes):
    """Metadata of a step that reads two prompts while a third sequence decodes."""
    starts = torch.tensor((0, *NEW)).cumsum(0).int()
    told = metadata(max_query_len=max(NEW), num_actual_tokens=sum(NEW), query_start_loc=starts)
    note_rows(told, SAMPLED)
    return SimpleNamespace(**(vars(told) | changes))


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_the_sampled_rows(window, fp8, sinks, monkeypatch):
    (layer,) = adopted(implementation(window, fp8, sinks))
    layer.impl.is_last = True
    (query, cache), told = inputs(fp8, sum(NEW)), prompts()
    output = torch.full((sum(NEW), HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    # graphs in pieces, which have recorded all rows behind attention
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
    assert layer.impl.forward(layer, query, None, None, cache, told, output) is output
    assert context.cudagraph_runtime_mode == CUDAGraphMode.NONE
    few = query.float()[SAMPLED].to(query.dtype)
    want = expected(few, cache, told.block_table, window, fp8, layer.impl.sinks, LENGTHS)
    torch.testing.assert_close(output[SAMPLED], want, rtol=2**-7, atol=2**-7)
    others = torch.ones(sum(NEW), dtype=torch.bool).index_fill(0, SAMPLED, False)
    # what memory held goes no further
    assert output[others].eq(0).all()


@pytest.mark.parametrize("last, changes", [(False, {}), (True, {"causal": False})])
def test_other_layers_and_masks_attend_from_all_rows(last, changes, monkeypatch):
    (layer,) = adopted(implementation())
    layer.impl.is_last, seen = last, []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args, **_: seen.append(args[2]))
    query, cache = inputs(False, sum(NEW))
    told = prompts(**changes)
    layer.impl.forward(layer, query, None, None, cache, told, torch.empty_like(query))
    assert len(seen) == 1 and seen[0] is query


def method_of(attention):
    """The method of a layer whose experts double each row and note how many they get."""
    method = OssMxfp4MoEMethod.__new__(OssMxfp4MoEMethod)
    method.last_attention, method.seen = attention, []

    def run(layer, x, logits):
        method.seen.append(len(x))
        return 2 * x + logits.sum(-1, keepdim=True)

    method._run = run
    return method


def test_experts_of_the_sampled_rows(monkeypatch):
    context = SimpleNamespace(attn_metadata={"last": prompts(), "other": metadata()})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
    x, logits = torch.randn(sum(NEW), 5), torch.randn(sum(NEW), 3)
    whole = method_of(None).apply_monolithic(None, x, logits)
    method = method_of("last")
    some = method.apply_monolithic(None, x, logits)
    assert some.shape == whole.shape and method.seen == [len(SAMPLED)]
    assert torch.equal(some[SAMPLED], whole[SAMPLED])
    # a step that names no rows, and one without metadata, as when memory is measured
    for context.attn_metadata in ({"last": metadata()}, None):
        assert torch.equal(method.apply_monolithic(None, x, logits), whole)
    assert method.seen == [len(SAMPLED), sum(NEW), sum(NEW)]
    assert rows_of_step("last") is None


def test_experts_warm_up_before_any_step():
    x, logits = torch.randn(4, 5), torch.randn(4, 3)
    method = method_of("last")
    assert method.apply_monolithic(None, x, logits).shape == x.shape and method.seen == [4]


def test_takes_rows_of_fp8_queries():
    x = torch.randn(7, 2, 4).to(FP8)
    taken = take_rows(x, torch.tensor([5, 0]))
    assert taken.dtype == FP8
    assert torch.equal(taken.float(), x.float()[[5, 0]])


def config(**changes):
    fields = {
        "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1),
        "speculative_config": None,
        "aux_output_config": AuxOutputConfig(),
    }
    return SimpleNamespace(**(fields | changes))


def decoder(kind=OssAttentionImpl, attention="attn", method=OssMxfp4MoEMethod):
    """A model of two layers, the last of which has a native attention and experts."""
    impl, experts = kind.__new__(kind), method.__new__(method)
    layer = SimpleNamespace(impl=impl, layer_name="layers.1.attn")
    mlp = SimpleNamespace(
        experts=SimpleNamespace(routed_experts=SimpleNamespace(quant_method=experts))
    )
    last = SimpleNamespace(**{attention: SimpleNamespace(attn=layer)}, mlp=mlp)
    return SimpleNamespace(layers=[SimpleNamespace(), last]), impl, experts


@pytest.mark.parametrize("attention", ["attn", "self_attn"])
def test_marks_the_last_layer(attention):
    model, impl, experts = decoder(attention=attention)
    assert mark_last_layer(model, config(), ServingOptions()) == "layers.1.attn"
    assert impl.is_last and experts.last_attention == "layers.1.attn"


def test_marks_attention_where_experts_are_vllms():
    model, impl, experts = decoder(method=SimpleNamespace)
    assert mark_last_layer(model, config(), ServingOptions()) == "layers.1.attn"
    assert impl.is_last and not hasattr(experts, "last_attention")


@pytest.mark.parametrize(
    ("changes", "options", "kind"),
    [
        (
            {"parallel_config": SimpleNamespace(world_size=2, data_parallel_size=1)},
            {},
            OssAttentionImpl,
        ),
        (
            {"parallel_config": SimpleNamespace(world_size=1, data_parallel_size=2)},
            {},
            OssAttentionImpl,
        ),
        ({"speculative_config": object()}, {}, OssAttentionImpl),
        (
            {"aux_output_config": AuxOutputConfig(enable_return_routed_experts=True)},
            {},
            OssAttentionImpl,
        ),
        ({}, {"monitor_every": 5}, OssAttentionImpl),
        ({}, {}, FlashAttentionImpl),
    ],
)
def test_marks_no_layer_whose_other_rows_are_read(changes, options, kind):
    model, impl, experts = decoder(kind)
    assert mark_last_layer(model, config(**changes), ServingOptions(**options)) is None
    assert not getattr(impl, "is_last", False) and experts.last_attention is None


def test_a_layer_of_another_kind_is_left_alone():
    model = SimpleNamespace(layers=[SimpleNamespace()])
    assert mark_last_layer(model, config(), ServingOptions()) is None


def runner(uses=(False, False, True), scores=(), **changes):
    """Requests 0, 1 and 3 of four are in the step, and 0 decodes; ``uses`` is of 0, 1 and 2."""
    fields = {
        "model": SimpleNamespace(last_attention="last"),
        "use_aux_hidden_state_outputs": False,
        "aux_output_connector": None,
        "prompt_logprobs_worker": SimpleNamespace(
            uses_prompt_logprobs=np.array([*uses, False]),
            token_id_scores=dict.fromkeys(scores),
        ),
    }
    return SimpleNamespace(**(fields | changes))


def batch(**changes):
    fields = {
        "logits_indices": SAMPLED, "has_prefill": True, "num_draft_tokens": 0, "num_reqs": 3,
        "num_tokens": 34, "idx_mapping_np": np.array([3, 0, 1]),
        "is_prefilling_np": np.array([True, False, True]),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_rows_of_a_step_with_prompts():
    assert sampled_rows(runner(), batch(), CUDAGraphMode.NONE) is SAMPLED
    assert sampled_rows(runner(), batch(num_tokens=6), CUDAGraphMode.NONE) is SAMPLED
    # more tokens: the piece behind the last attention runs without its graph
    assert sampled_rows(runner(), batch(num_tokens=4097), CUDAGraphMode.PIECEWISE) is SAMPLED
    # a request that decodes has its prompt's log-probabilities
    assert sampled_rows(runner(uses=(True, False, False)), batch(), CUDAGraphMode.NONE) is SAMPLED


@pytest.mark.parametrize(
    ("of_runner", "of_batch", "mode"),
    [
        ({}, {"num_tokens": 4096}, "PIECEWISE"),
        ({}, {}, "FULL"),
        ({}, {"num_tokens": 4097}, "FULL"),
        ({}, {"has_prefill": False}, "NONE"),
        ({}, {"num_draft_tokens": 1}, "NONE"),
        ({}, {"num_tokens": 5}, "NONE"),
        ({"uses": (False, True, False)}, {}, "NONE"),
        ({"scores": ["a"]}, {}, "NONE"),
        ({"prompt_logprobs_worker": None}, {}, "NONE"),
        ({"use_aux_hidden_state_outputs": True}, {}, "NONE"),
        ({"aux_output_connector": object()}, {}, "NONE"),
        ({"model": SimpleNamespace(last_attention=None)}, {}, "NONE"),
        # of another class
        ({"model": SimpleNamespace()}, {}, "NONE"),
    ],
)
def test_other_steps_compute_all_rows(of_runner, of_batch, mode):
    assert sampled_rows(runner(**of_runner), batch(**of_batch), CUDAGraphMode[mode]) is None


def test_the_model_state_names_the_rows_of_the_step(monkeypatch):
    made = {"last": SimpleNamespace(), "draft": SimpleNamespace()}
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: made)
    state = OssModelState.__new__(OssModelState)
    state.metadata_is_read = False
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    state.vllm_config = SimpleNamespace(compilation_config=compilation)
    state.model = SimpleNamespace(last_attention="last")
    batch = SimpleNamespace(num_computed_tokens_np=np.ones(1, np.int32))
    state.prepare_attn(batch, CUDAGraphMode.NONE, ())
    assert noted_rows(made["last"]) is None
    state.sampled = SAMPLED
    state.prepare_attn(batch, CUDAGraphMode.NONE, ())
    assert noted_rows(made["last"]) is SAMPLED and noted_rows(made["draft"]) is None
    made["last"] = SimpleNamespace()
    state.prepare_attn(batch, CUDAGraphMode.PIECEWISE, ())
    assert noted_rows(made["last"]) is SAMPLED
    made["last"] = SimpleNamespace()
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        state.prepare_attn(batch, mode, (), for_capture=True)
    assert noted_rows(made["last"]) is None
    # graphs that call attention between their pieces have recorded its inputs for all rows
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    state.prepare_attn(batch, CUDAGraphMode.PIECEWISE, ())
    assert noted_rows(made["last"]) is None
