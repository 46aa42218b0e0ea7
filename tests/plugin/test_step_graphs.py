# SPDX-License-Identifier: MIT
"""Which steps replay which CUDA graphs; test_burst_gpu.py runs them on a GPU."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from oss_fused.layers.vllm.attention import MOST_QUERIES
from oss_fused.plugin.model_state import OssModelState
from oss_fused.plugin.step_graphs import (
    GRAPH_TOKENS,
    LEAST_TOKENS,
    WHOLE_TOKENS,
    graph_sizes,
    record_whole,
    use_whole_graphs,
    why_pieces,
)

FULL, PIECES = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(("tokens", "requests"), [(16384, 1024), (8192, 100), (3000, 256), (64, 8)])
def test_sizes_of_graphs(tokens, requests):
    sizes = graph_sizes(tokens, requests)
    largest = min(tokens, GRAPH_TOKENS)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    # a decode step of all requests has a graph of its own size
    assert min(requests, largest) in sizes
    for step in range(1, largest + 1):
        padded = next(size for size in sizes if size >= step)
        assert padded - step < min(max(16, step // 8 + 1), 256)


@pytest.mark.parametrize("queries", [2, 4, 8, 9])
def test_sizes_with_drafts(queries):
    sizes = graph_sizes(8192, 256, queries)
    assert set(graph_sizes(8192, 256)) <= set(sizes) and sizes[-1] == GRAPH_TOKENS
    for requests in (1, 2, 3, 8, 31, 100, 256):
        # steps that verify drafts, and the draft model's own
        for tokens in (queries, 1):
            manager = _manager(sizes, 256, queries=tokens)
            desc = _replayed(manager, requests, requests * tokens, tokens)
            assert desc.cg_mode == FULL and desc.num_reqs - requests < max(8, requests // 8)


def test_few_sizes():
    assert len(graph_sizes(8192, 256, 4)) < 116 and len(graph_sizes(8192, 256, 8)) < 116
    assert len(graph_sizes(8192, 1024)) < 126 and len(graph_sizes(8192, 256)) < 91


def _manager(sizes, requests=64, mode=CUDAGraphMode.FULL_AND_PIECEWISE, queries=1):
    """A manager as vLLM makes it, of which everything is recorded."""
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
    )
    manager.vllm_config = SimpleNamespace(
        speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)
    )
    manager.cudagraph_mode, manager.max_num_reqs, manager.decode_query_len = mode, requests, queries
    manager.lora_capture_cases, manager._lora_dispatch_map = [0], {}
    manager.varlen_decode, manager.ubatch_runner = False, None
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def _replayed(manager, requests, tokens, uniform=None):
    desc = manager.dispatch(requests, tokens, uniform, 0, max_query_len=None)
    recorded = manager._capture_descs.get(desc.cg_mode, [])
    assert desc in recorded or desc.cg_mode == CUDAGraphMode.NONE
    return desc


def test_a_step_with_prompts_is_one_graph():
    manager = _manager(graph_sizes(16384, 64))
    record_whole(manager)
    for requests, tokens in [(1, 1), (1, 5), (3, 17), (2, 100), (64, 700), (5, WHOLE_TOKENS)]:
        desc = _replayed(manager, requests, tokens)
        assert desc.cg_mode == FULL and desc.uniform_token_count is None
        assert desc.num_tokens >= max(tokens, 16) and desc.num_reqs >= requests
        assert desc.num_tokens - tokens < max(16, tokens // 8 + 1)
    assert _replayed(manager, 1, WHOLE_TOKENS + 1).cg_mode == PIECES
    assert _replayed(manager, 1, GRAPH_TOKENS).cg_mode == PIECES
    assert _replayed(manager, 1, GRAPH_TOKENS + 1).cg_mode == CUDAGraphMode.NONE


# 1 token, or one and 3, 7 or 8 drafts; 9 is no divisor of the sizes
@pytest.mark.parametrize("queries", [1, 4, 8, 9])
@pytest.mark.parametrize("requests", [1, 3, 33, 64])
def test_a_decode_step_keeps_its_graph(requests, queries):
    manager = _manager(graph_sizes(8192, 64), queries=queries)
    before = _replayed(manager, requests, requests * queries, queries)
    record_whole(manager)
    assert _replayed(manager, requests, requests * queries, queries) == before
    assert before.uniform_token_count == queries and before.cg_mode == FULL


@pytest.mark.parametrize("queries", [4, 8, 9])
def test_a_step_with_prompts_and_drafts_is_one_graph(queries):
    manager = _manager(graph_sizes(8192, 64), queries=queries)
    record_whole(manager)
    # 20 tokens of a prompt beside 0, 3 and 40 sequences; drafts of one sequence only
    steps = [(1 + n, 20 + n * queries) for n in (0, 3, 40)] + [(2, 1 + queries)]
    for requests, tokens in steps:
        desc = _replayed(manager, requests, tokens)
        assert desc.cg_mode == FULL and desc.uniform_token_count is None
        # more tokens of one sequence than decode attention takes: it is recorded as FlashAttention
        assert desc.num_tokens >= LEAST_TOKENS > MOST_QUERIES and desc.num_reqs >= requests


def test_graphs_that_verify_drafts_get_memory_for_splits():
    manager = _manager(graph_sizes(8192, 512), 512, queries=4)
    runner = _runner(drafts=_drafts("eagle3"), manager=manager)
    use_whole_graphs(runner)
    sizes = [each.num_tokens for each in manager._capture_descs[FULL]]
    assert max(sizes) == 2048 == runner.builder.max_cudagraph_size


def test_builders_of_other_attention_are_left_alone():
    runner = _runner(support=AttentionCGSupport.UNIFORM_BATCH)
    del runner.builder.max_cudagraph_size
    use_whole_graphs(runner)
    assert not hasattr(runner.builder, "max_cudagraph_size")


def test_the_largest_graph_is_recorded_first_and_each_once():
    manager = _manager(graph_sizes(8192, 1024), 1024)
    pieces = len(manager._capture_descs[PIECES])
    record_whole(manager)
    full = manager._capture_descs[FULL]
    sizes = [each.num_tokens for each in full]
    assert sizes == sorted(sizes, reverse=True) and len(set(full)) == len(full)
    assert all(each.num_tokens > WHOLE_TOKENS for each in manager._capture_descs[PIECES])
    whole = [each for each in full if each.uniform_token_count is None]
    # decode sizes between them are not worth a second graph
    assert len(whole) == 32 and len(whole) + len(manager._capture_descs[PIECES]) < pieces


@pytest.mark.parametrize(
    "sizes", [[1, 2, 8], [1, 16, 512, 900, 1000], [24, 32], [8, 2048], [1, 8, 700]]
)
def test_sizes_of_the_users(sizes):
    manager = _manager(sizes)
    record_whole(manager)
    for tokens in range(1, max(sizes) + 1):
        desc = _replayed(manager, 1, tokens)
        assert desc.num_tokens >= tokens
        whole = tokens <= WHOLE_TOKENS and any(
            16 <= s <= WHOLE_TOKENS and s >= tokens for s in sizes
        )
        assert desc.cg_mode == (FULL if whole else PIECES)


def _drafts(method, adaptive=False):
    return SimpleNamespace(method=method, enable_adaptive_verification=adaptive)


def _runner(**changes):
    def has(name, value):
        return changes.get(name, value)

    support = has("support", AttentionCGSupport.ALWAYS)
    builder = SimpleNamespace(
        get_cudagraph_support=lambda *_: support, max_cudagraph_size=GRAPH_TOKENS
    )
    group = SimpleNamespace(
        get_metadata_builder=lambda _: builder,
        metadata_builders=[builder],
        kv_cache_spec=None,
        backend=object,
    )
    config = SimpleNamespace(
        lora_config=has("lora", None),
        speculative_config=has("drafts", None),
        kv_transfer_config=has("connector", None),
        parallel_config=SimpleNamespace(
            data_parallel_size=has("dp", 1),
            pipeline_parallel_size=has("pp", 1),
            decode_context_parallel_size=has("dcp", 1),
            prefill_context_parallel_size=has("pcp", 1),
            use_ubatching=has("ubatches", False),
        ),
    )
    mode = has("mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    manager = None if mode is None else _manager(graph_sizes(8192, 64), mode=mode)
    manager = changes.get("manager", manager)
    state = has("state", OssModelState)
    return SimpleNamespace(
        vllm_config=config,
        attn_groups=[[group]],
        cudagraph_manager=manager,
        model_state=state.__new__(state),
        builder=builder,
    )


@pytest.mark.parametrize("method", [None, "ngram", "eagle", "eagle3"])
def test_whole_graphs_are_used(method):
    runner = _runner(drafts=method and _drafts(method))
    assert why_pieces(runner) is None
    use_whole_graphs(runner)
    assert _replayed(runner.cudagraph_manager, 1, 100).cg_mode == FULL
    assert runner.builder.max_cudagraph_size == WHOLE_TOKENS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora": 1}, "LoRA"),
        ({"drafts": _drafts("dflash")}, "drafts other than"),
        ({"drafts": _drafts("mtp")}, "drafts other than"),
        ({"drafts": _drafts("eagle3", adaptive=True)}, "drafts other than"),
        ({"connector": 1}, "a KV connector"),
        ({"dp": 2}, "data parallelism"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"dcp": 2}, "context parallelism"),
        ({"pcp": 2}, "context parallelism"),
        ({"ubatches": True}, "microbatches"),
        ({"support": AttentionCGSupport.UNIFORM_BATCH}, "the attention backend"),
        ({"mode": CUDAGraphMode.FULL_DECODE_ONLY}, "cudagraph_mode"),
        ({"mode": CUDAGraphMode.PIECEWISE}, "cudagraph_mode"),
        ({"mode": None}, "cudagraph_mode"),
        ({"state": type("Other", (), {})}, "the model state"),
    ],
)
def test_what_needs_the_host_keeps_pieces(changes, reason):
    runner = _runner(**changes)
    before = runner.cudagraph_manager and dict(runner.cudagraph_manager._capture_descs)
    assert why_pieces(runner).startswith(reason)
    use_whole_graphs(runner)
    assert not before or runner.cudagraph_manager._capture_descs == before
    # attention of prompts runs between the pieces: it takes the splits that it likes
    sizes = [each.num_tokens for each in before[FULL]] if before and FULL in before else [0]
    expected = GRAPH_TOKENS if runner.cudagraph_manager is None else max(sizes)
    assert runner.builder.max_cudagraph_size == expected
