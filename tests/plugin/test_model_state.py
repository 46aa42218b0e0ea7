# SPDX-License-Identifier: MIT
"""What a decode step leaves out, and when it does not; vLLM's V2 runner itself needs a GPU."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from oss_fused.kernels.op import set_observer
from oss_fused.layers.vllm import lm_head
from oss_fused.layers.vllm.fresh_rows import is_fresh
from oss_fused.layers.vllm.linear import OssFp8LinearMethod
from oss_fused.layers.vllm.lm_head import HeadGraphs
from oss_fused.plugin import model_state as module
from oss_fused.plugin.model_state import OssModelState, OssSampler


def batch(*computed):
    """A step whose sequences have so many tokens before it."""
    return SimpleNamespace(num_computed_tokens_np=np.array(computed, np.int32))


def test_metadata_of_a_graph_with_prompts(monkeypatch):
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: {"layer": 1})
    state = OssModelState.__new__(OssModelState)
    state.metadata_is_read = False
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    state.vllm_config = SimpleNamespace(compilation_config=compilation)
    state.decodes = False
    assert state.prepare_attn(None, CUDAGraphMode.FULL, ()) == {"layer": 1}


@pytest.mark.parametrize(
    ("mode", "configured", "for_capture", "read", "left_out"),
    [
        ("FULL", "FULL_AND_PIECEWISE", False, False, True),
        ("FULL", "FULL_DECODE_ONLY", False, False, True),
        # a graph being recorded, graphs that hold prefills too, no graph, a draft model
        ("FULL", "FULL_DECODE_ONLY", True, False, False),
        ("FULL", "FULL", False, False, False),
        ("PIECEWISE", "FULL_AND_PIECEWISE", False, False, False),
        ("NONE", "FULL_DECODE_ONLY", False, False, False),
        ("FULL", "FULL_DECODE_ONLY", False, True, False),
    ],
)
def test_metadata_only_where_it_is_read(mode, configured, for_capture, read, left_out, monkeypatch):
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: {"layer": 1})
    state = OssModelState.__new__(OssModelState)
    state.metadata_is_read, state.draft_may_ask = read, False
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[configured])
    state.vllm_config = SimpleNamespace(compilation_config=compilation)
    got = state.prepare_attn(batch(7), CUDAGraphMode[mode], (), for_capture=for_capture)
    assert got == ({} if left_out else {"layer": 1})


@pytest.mark.parametrize(
    ("mode", "computed", "for_capture", "fresh"),
    [
        ("NONE", (0, 0), False, True),
        # its pieces have recorded what attention, which is called between them, gets
        ("BREAKABLE", (0,), False, False),
        ("PIECEWISE", (0,), False, True),
        # a prompt's second part or cached beginning, a sequence that decodes
        ("NONE", (0, 16), False, False),
        ("NONE", (16, 0), False, False),
        # vLLM records a graph, replays one, or runs one without sequences of its own
        ("NONE", (0, 0), True, False),
        ("FULL", (0, 0), False, False),
        ("FULL", (0, 0), True, False),
    ],
)
def test_a_step_in_which_all_sequences_begin_is_noted(
    mode, computed, for_capture, fresh, monkeypatch
):
    made = {"layer": SimpleNamespace(), "other": SimpleNamespace()}
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: made)
    state = OssModelState.__new__(OssModelState)
    state.metadata_is_read = True
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    state.vllm_config = SimpleNamespace(compilation_config=compilation)
    if mode == "BREAKABLE":
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        mode = "PIECEWISE"
    found = state.prepare_attn(batch(*computed), CUDAGraphMode[mode], (), for_capture=for_capture)
    assert [is_fresh(each) for each in found.values()] == [fresh, fresh]


class Made:
    """Counts how often metadata is made."""

    def __init__(self, monkeypatch):
        self.times = 0
        monkeypatch.setattr(DefaultModelState, "prepare_attn", self.make)

    def make(self, *_, **__):
        self.times += 1
        return {"layer": 1, "draft": 2}


@pytest.mark.parametrize(
    ("planned", "block"), [((False, False), None), ((False, True), None), ((False, False), 16)]
)
def test_an_eagle_model_may_ask_for_metadata(planned, block, monkeypatch):
    made = Made(monkeypatch)
    state = OssModelState.__new__(OssModelState)
    state.metadata_is_read, state.draft_may_ask = False, True
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    state.vllm_config = SimpleNamespace(compilation_config=compilation)
    builders = [SimpleNamespace(aot_schedule=plan) for plan in planned]
    groups = [
        [SimpleNamespace(get_metadata_builder=lambda _, b=b: b, kernel_block_size=block)]
        for b in builders
    ]
    found = state.prepare_attn(None, CUDAGraphMode.FULL, "tables", "slots", groups, "cache")
    # the draft's graph reads a plan, and a table of smaller blocks, that are made for every step
    assert made.times == (any(planned) or block is not None)
    assert found["draft"] == 2 and found["layer"] == 1 and made.times == 1
    # graphs that are recorded, and steps without one
    state.prepare_attn(None, CUDAGraphMode.FULL, *range(4), for_capture=True)
    state.prepare_attn(batch(7), CUDAGraphMode.PIECEWISE, *range(4))
    assert made.times == 3


def drafts(number, method="ngram"):
    return SimpleNamespace(
        num_speculative_tokens=number, method=method, use_ngram=lambda: method == "ngram"
    )


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, False),
        ({"kv_transfer_config": 1}, True),
        ({"speculative_config": drafts(1, "dflash")}, True),
        # asks for it where it reads it
        ({"speculative_config": drafts(1, "eagle3")}, False),
        ({"speculative_config": drafts(8, "eagle3")}, True),
        # nothing reads it: drafts are looked up in the text
        ({"speculative_config": drafts(7)}, False),
        # more query tokens than the native kernel takes: FlashAttention plans each step
        ({"speculative_config": drafts(8)}, True),
        ({"rswa_window": 64}, True),
        ({"is_mm_prefix_lm": True}, True),
    ],
)
def test_who_reads_metadata(changes, read, monkeypatch):
    monkeypatch.setattr(DefaultModelState, "__init__", lambda *_: None)
    fields = {
        "kv_transfer_config": None,
        "speculative_config": None,
        "rswa_window": None,
        "is_mm_prefix_lm": False,
    } | changes
    config = SimpleNamespace(model_config=SimpleNamespace(**fields), **fields)
    state = OssModelState(config)
    assert state.metadata_is_read is read
    assert state.draft_may_ask is (getattr(fields["speculative_config"], "method", "") == "eagle3")


def _sampler(monkeypatch, logprobs=None):
    sampler = OssSampler.__new__(OssSampler)
    sampler.compute_nans = sampler.return_sampling_mask = False
    sampler.trace_replay_state = None
    sampler.max_num_reqs, sampler.counts, sampler.arrivals = 4, None, None
    _set_states(sampler, [0.5, 1.0, 0.0, 0.0])
    seen = {}

    def sample(logits, *arguments):
        seen["positions"], seen["ids"] = arguments[3], arguments[4]
        return logits.argmax(-1), logits

    monkeypatch.setattr(Sampler, "__call__", lambda *_: "vLLM's")
    monkeypatch.setattr(sampler, "sample", sample, raising=False)
    monkeypatch.setattr(sampler, "get_logprobs_dims", lambda _: logprobs, raising=False)
    return sampler, seen


def _set_states(sampler, temperatures, processing=()):
    temperature = SimpleNamespace(np=np.array(temperatures, dtype=np.float32))
    sampler.sampling_states = SimpleNamespace(temperature=temperature)
    sampler.needs_logits_processing = np.zeros(len(temperatures), dtype=bool)
    sampler.needs_logits_processing[list(processing)] = True


def _batch(**changes):
    fields = {
        "num_reqs": 2, "num_tokens": 2, "num_draft_tokens": 0, "has_prefill": False,
        "positions": torch.tensor([7, 9, 0]), "input_ids": torch.tensor([3, 4, 0]),
        "idx_mapping": None, "idx_mapping_np": np.array([0, 1]), "expanded_idx_mapping": None,
        "expanded_local_pos": None, "seq_lens_cpu_upper_bound": torch.from_numpy(np.ones(2)),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_a_decode_batch_takes_a_token_each(monkeypatch):
    sampler, seen = _sampler(monkeypatch)
    output = sampler(torch.tensor([[0.0, 2.0], [3.0, 1.0]]), _batch())
    assert output.sampled_token_ids.tolist() == [[1], [0]]
    assert output.num_sampled.tolist() == [1, 1] and output.num_rejected.tolist() == [0, 0]
    assert seen["positions"].tolist() == [7, 9] and seen["ids"].tolist() == [3, 4]


def test_nothing_of_the_sampler_is_allocated_while_the_model_loads(monkeypatch):
    # sleep at level 2 discards what is allocated then
    state = OssModelState.__new__(OssModelState)
    state.max_num_reqs, state.device = 4, torch.device("cpu")
    sampler = Sampler.__new__(Sampler)
    state.custom_sampler(sampler)
    assert type(sampler) is OssSampler
    assert vars(sampler) == {"counts": None, "arrivals": None, "max_num_reqs": 4}
    _set_states(sampler, [0.7, 0.7])
    sampler.compute_nans = sampler.return_sampling_mask = False
    sampler.trace_replay_state = None
    monkeypatch.setattr(sampler, "sample", lambda logits, *_: (logits.argmax(-1), logits))
    monkeypatch.setattr(sampler, "get_logprobs_dims", lambda _: None)
    output = sampler(torch.zeros(2, 2), _batch())
    assert output.num_sampled.tolist() == [1, 1] and output.num_rejected.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "processing", "operator"),
    [
        ([2, 3], (), True),
        # a request that draws, and one whose logits a bias or a penalty changes
        ([1, 2], (), False),
        ([2, 3], (3,), False),
    ],
)
def test_a_greedy_batch_takes_the_operator(rows, processing, operator, monkeypatch):
    sampler, seen = _sampler(monkeypatch)
    _set_states(sampler, [0.5, 1.0, 0.0, 0.0], processing)
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    output = sampler(logits, _batch(idx_mapping_np=np.array(rows)))
    assert output.sampled_token_ids.tolist() == [[1], [0]]
    assert bool(seen) is not operator


@pytest.mark.parametrize(
    "changes", [{"has_prefill": True}, {"num_tokens": 5}, {"num_draft_tokens": 1}]
)
def test_other_batches_are_vllms(changes, monkeypatch):
    sampler, _ = _sampler(monkeypatch)
    assert sampler(torch.zeros(2, 2), _batch(**changes)) == "vLLM's"


def test_logprobs_are_vllms(monkeypatch):
    sampler, _ = _sampler(monkeypatch, logprobs=(1, 0))
    assert sampler(torch.zeros(2, 2), _batch()) == "vLLM's"


@pytest.mark.parametrize(
    "graphs", ["unset", None, SimpleNamespace(hidden_states=None), SimpleNamespace(hidden_states=1)]
)
@pytest.mark.parametrize(
    ("ranks", "adapters", "quantised"), [(1, 0, 1), (2, 0, 1), (1, 1, 1), (1, 0, 0)]
)
def test_the_head_is_recorded_in_place_behind_the_models_graphs(
    graphs, ranks, adapters, quantised, monkeypatch
):
    asked, inner = [], []
    monkeypatch.setattr(
        DefaultModelState, "capture_inner_cudagraphs", lambda self, *args: inner.append(args)
    )
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    state = OssModelState.__new__(OssModelState)
    method = OssFp8LinearMethod.__new__(OssFp8LinearMethod) if quantised else object()
    state.model = SimpleNamespace(
        lm_head=SimpleNamespace(quant_method=method),
        run_head="the head",
        head_graphs=SimpleNamespace(capture=lambda *args: asked.append(args)),
    )
    state.vllm_config = SimpleNamespace(
        lora_config=adapters or None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
    )
    state.model_config = SimpleNamespace(get_hidden_size=lambda: 2)
    state.dtype, state.device = torch.bfloat16, torch.device("cpu")
    if graphs != "unset":
        state.graphs = lambda: graphs
    state.capture_inner_cudagraphs("buffers")
    assert inner == [("buffers",)]
    assert len(asked) == (ranks == 1 and not adapters and quantised)
    for head, sizes, like, written in asked:
        assert (head, sizes, like.shape, like.dtype) == ("the head", [1, 2], (0, 2), torch.bfloat16)
        assert written is getattr(graphs, "hidden_states", None)


def test_a_batch_takes_the_smallest_graph_that_holds_it(monkeypatch):
    replayed = []
    pools = []
    monkeypatch.setattr(
        lm_head, "recording", lambda graph, pool: contextlib.nullcontext(pools.append(pool))
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "shared")
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replayed.append(1))
    )
    heads = []

    def head(hidden):
        heads.append(len(hidden))
        return hidden * 2

    graphs = HeadGraphs()
    assert graphs(head, torch.ones(3, 4)).shape == (3, 4) and not replayed
    graphs.capture(head, [8, 2, 64, 4], torch.empty(0, 4))
    heads.clear()
    assert graphs(head, torch.ones(3, 4)).shape == (3, 4)
    assert replayed == [1] and not heads
    assert graphs._graphs[3] is graphs._graphs[4] and graphs._graphs[2] is graphs._graphs[1]
    assert graphs._graphs[3][1][:3].eq(1).all()
    # of other hidden states than those that the model's graphs leave a copy is read
    written = torch.full((4, 4), 5.0)
    graphs.capture(head, [8, 2, 64, 4], torch.empty(0, 4), written)
    graphs(head, torch.ones(3, 4))
    assert graphs._graphs[3][1][:3].eq(1).all() and written.eq(5).all()
    graphs._graphs[3][1].zero_()
    heads.clear()
    assert graphs(head, written[:3]).eq(10).all() and replayed == [1] * 3 and not heads
    assert graphs._graphs[3][1].eq(0).all()
    # the graph of eight rows would read behind the end of these
    assert graphs._in_place.keys() == {1, 2, 3, 4}
    # graphs that replay one at a time share their memory
    assert pools == ["shared"] * (3 + 5)
    # a part that begins elsewhere
    graphs(head, written[1:3])
    assert graphs._graphs[2][1].eq(5).all()
    graphs.renew(head)
    assert graphs._in_place.keys() == {1, 2, 3, 4}
    graphs.forget()
    heads.clear()
    assert graphs(head, written[:3]).eq(10).all() and heads == [3]
    graphs.renew(head)
    heads.clear()
    # more rows than any graph, and an observer that wants to see the operators
    assert graphs(head, torch.ones(9, 4)).shape == (9, 4) and heads == [9]
    set_observer(lambda *_: None)
    try:
        assert graphs(head, torch.ones(1, 4)).eq(2).all() and heads == [9, 1]
        assert graphs(head, written[:1]).eq(10).all() and heads == [9, 1, 1]
    finally:
        set_observer(None)
