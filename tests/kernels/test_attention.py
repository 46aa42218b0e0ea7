# SPDX-License-Identifier: MIT
"""decode_attention against its reference: windows, sinks, splits, pages, FP8, padding."""

from __future__ import annotations

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.attention import triton as attention_decode
from oss_fused.kernels.attention.launches import Launch, launch_for, tokens_per_program
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
# bf16 weights of the softmax and a bf16 result: two roundings of 2^-9 on values near 1
TOLERANCE = {"atol": 1.5e-2, "rtol": 2e-2}


def make(device, lens, q_heads=8, heads=2, dim=64, page=16, dtype=torch.bfloat16, cache=None):
    torch.manual_seed(0)
    rows, pages_per_row = len(lens), -(-max([*lens, 1]) // page)
    pages = rows * pages_per_row + 1
    # vLLM's layout: [pages, heads, page_size, 2 * dim], unused slots hold anything, NaN here
    kv = torch.full((pages, heads, page, 2 * dim), float("nan"), dtype=dtype)
    table = torch.randperm(pages - 1)[: rows * pages_per_row].view(rows, -1).int() + 1
    for row, length in enumerate(lens):
        for position in range(length):
            kv[table[row, position // page], :, position % page] = torch.randn(heads, 2 * dim).to(
                dtype
            )
    keys, values = kv.to(cache or dtype).to(device).transpose(1, 2).split(dim, -1)
    query = torch.randn(rows, q_heads, dim).to(device, dtype)
    out = torch.full_like(query, float("nan"))
    arrivals = torch.zeros(rows * heads + 3, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return [query, keys, values, table.to(device), seq_lens, out, arrivals]


def both(args, scale=0.125, window=0, sinks=None, q=None, k=None, v=None, several=()):
    results = []
    for backend in ("torch", "triton"):
        call = [*args[:5], torch.full_like(args[5], float("nan")), args[6]]
        attend = get_kernel(backend, "decode_attention")
        attend(*call, scale, window, sinks, q, k, v, False, *several)
        results.append(call[5])
    assert not args[6].any(), "arrivals are left at zero"
    return results


@pytest.mark.parametrize(
    ("lens", "window", "sinks"),
    [
        ([1], 0, True),
        ([64], 0, False),
        ([200, 129], 0, True),
        ([300, 5], 128, True),
        ([131], 48, False),
    ],
    ids=str,
)
def test_equals_reference(device, lens, window, sinks):
    args = make(device, lens)
    sink = torch.linspace(-1, 2, 8, device=device).bfloat16() if sinks else None
    expected, actual = both(args, window=window, sinks=sink)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("sinks", [False, True])
def test_splits_have_a_least_size(device, monkeypatch, sinks):
    few = Launch(splits=4, block_n=64, warps=4, min_tiles=2)
    monkeypatch.setattr(attention_decode, "launch_for", lambda *_: few)
    sink = torch.linspace(-1, 4, 8, device=device).bfloat16() if sinks else None
    expected, actual = both(make(device, [300, 100, 520, 64]), sinks=sink)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("cache", [None, FP8])
def test_any_number_of_splits(device, monkeypatch, cache):
    # more than are read at once, not a power of two, and of which some have no work
    eleven = Launch(splits=11, block_n=64, warps=4, min_tiles=1)
    monkeypatch.setattr(attention_decode, "launch_for", lambda *_: eleven)
    args = make(device, [700, 64, 5, 330], dim=128, cache=cache)
    one = None if cache is None else torch.ones(1, device=device)
    expected, actual = both(args, k=one, v=one)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize(("block_n", "warps"), [(16, 1), (32, 2), (128, 2), (128, 8), (256, 4)])
@pytest.mark.parametrize("page", [8, 16, 24, 64])
def test_pages_and_warps_of_any_size(device, monkeypatch, block_n, warps, page):
    launch = Launch(splits=2, block_n=block_n, warps=warps, min_tiles=1)
    monkeypatch.setattr(attention_decode, "launch_for", lambda *_: launch)
    args = make(device, [291, 128, 3], q_heads=4, page=page)
    expected, actual = both(args)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def with_queries(device, lens, counts, **shape):
    """Arguments of sequences of ``lens`` positions, the last ``counts`` of which are queries."""
    args = make(device, lens, **shape)
    rows, (_, q_heads, dim) = sum(counts), args[0].shape
    args[0] = torch.randn(rows, q_heads, dim).to(device, args[0].dtype)
    args[5] = torch.empty_like(args[0])
    most = max(counts)
    heads = args[1].shape[2]
    args[6] = torch.zeros(len(lens) * most * heads, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return args, (starts, most)


@pytest.mark.parametrize(
    ("lens", "counts", "window", "sinks"),
    [
        # one more than fits a tile of positions, and a page that is not full
        ([129, 300], [4, 4], 0, True),
        # windows of neighbouring queries begin and end in different tiles
        ([200, 131, 128], [8, 8, 8], 48, True),
        ([135, 136], [8, 8], 128, False),
        # any number of queries per sequence, none included
        ([70, 33, 12, 260], [1, 3, 0, 5], 16, True),
        # prompts shorter than the largest number of queries
        ([2, 5, 1], [2, 5, 1], 0, False),
    ],
    ids=str,
)
def test_several_queries_equal_reference(device, lens, counts, window, sinks):
    args, several = with_queries(device, lens, counts)
    sink = torch.linspace(-1, 2, 8, device=device).bfloat16() if sinks else None
    expected, actual = both(args, window=window, sinks=sink, several=several)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_a_query_sees_what_it_sees_alone(device):
    args, several = with_queries(device, [150], [4])
    _, together = both(args, window=32, several=several)
    for query in range(4):
        alone = [args[0][query : query + 1], *args[1:4], args[4] - 3 + query]
        expected, _ = both([*alone, args[5][:1], args[6]], window=32)
        torch.testing.assert_close(together[query], expected[0], **TOLERANCE)


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_before_the_first_position_give_zero(device, sinks):
    args, several = with_queries(device, [3, 0, 40], [4, 4, 4])
    sink = torch.zeros(8, device=device) if sinks else None
    for result in both(args, sinks=sink, several=several):
        assert result.isfinite().all()
        empty = [not result[row].any() for row in range(12)]
        assert empty == [True] + 3 * [False] + 4 * [True] + 4 * [False]


def test_rows_of_no_sequence_stay(device):
    args, (starts, most) = with_queries(device, [40, 0], [3, 2])
    # vLLM pads a CUDA graph's batch with sequences without a query
    starts[-1] = 3
    for result in both(args, several=(starts, most)):
        assert result[:3].isfinite().all() and result[3:].isnan().all()


@pytest.mark.parametrize(
    ("q_heads", "heads", "dim"), [(32, 1, 32), (12, 1, 80), (128, 1, 16), (8, 1, 256)]
)
def test_large_groups_take_several_programs(device, q_heads, heads, dim):
    tokens, group = tokens_per_program(8, q_heads // heads, dim), q_heads // heads
    assert tokens < 8 and (tokens * group * dim <= 32 * 256 or tokens == 1)
    args, several = with_queries(device, [70, 9], [8, 3], q_heads=q_heads, heads=heads, dim=dim)
    expected, actual = both(args, window=20, several=several)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_splits_may_hold_no_position_that_a_query_sees(device, monkeypatch):
    # the second split begins behind the first query
    two = Launch(splits=4, block_n=64, warps=4, min_tiles=1)
    monkeypatch.setattr(attention_decode, "launch_for", lambda *_: two)
    args, several = with_queries(device, [66, 200], [4, 4])
    expected, actual = both(args, several=several)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_several_queries_in_fp8(device):
    args, several = with_queries(device, [100, 33], [3, 3], cache=FP8)
    args[0] = args[0].to(FP8)
    q, k, v = (torch.tensor([s], device=device) for s in (0.5, 1.5, 0.25))
    expected, actual = both(args, window=40, q=q, k=k, v=v, several=several)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("dim", "fp8", "window", "most"),
    [
        (64, False, 0, 8),
        (128, False, 0, 4),
        (64, True, 0, 0),
        (128, True, 0, 0),
        (64, False, 128, 8),
        (128, False, 128, 8),
        (64, True, 128, 8),
        (128, True, 128, 0),
    ],
)
def test_tiles_come_first_where_programs_are_few(dim, fp8, window, most):
    """``most``: sequences of eight KV heads."""
    launches = {rows: launch_for(rows, 8, dim, fp8, window, 8192) for rows in (1, 2, 4, 8, 9, 64)}
    assert {rows for rows, launch in launches.items() if launch.tiles_first} == {
        rows for rows in launches if rows <= most
    }


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (8, 128), (1, 80), (32, 128)])
def test_launches_fill_the_gpu_and_no_more(heads, dim, fp8):
    for rows in (1, 3, 8, 16, 64, 128, 1000):
        short = launch_for(rows, heads, dim, fp8, 0, 64)
        assert short.splits == 1
        long = launch_for(rows, heads, dim, fp8, 0, 131072)
        assert long.splits == 1 or rows * heads * long.splits <= 32768
        assert launch_for(rows, heads, dim, fp8, 128, 131072).splits <= 2


@pytest.mark.parametrize(
    ("q_heads", "heads", "dim", "page", "dtype"),
    [
        (9, 3, 64, 16, torch.bfloat16),
        (4, 4, 128, 32, torch.float16),
        (16, 1, 80, 8, torch.bfloat16),
        (32, 1, 32, 64, torch.bfloat16),
    ],
)
def test_other_shapes(device, q_heads, heads, dim, page, dtype):
    args = make(device, [70, 17], q_heads, heads, dim, page, dtype)
    expected, actual = both(args)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_fp8_cache_and_query(device):
    args = make(device, [100, 33], cache=FP8)
    scales = [torch.tensor([s], device=device) for s in (0.5, 1.5, 0.25)]
    expected, actual = both(args, k=scales[1], v=scales[2])
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    args[0] = args[0].to(FP8)
    expected, actual = both(args, q=scales[0], k=scales[1], v=scales[2])
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("query", [torch.bfloat16, FP8])
def test_fp8_columns_at_odd_addresses(device, query):
    args = make(device, [100, 33], cache=FP8)
    args[0] = args[0].to(query)
    one = torch.ones(1, device=device)
    expected, _ = both(args, q=one, k=one, v=one)
    for cache in (1, 2):
        pages, size, heads, dim = args[cache].shape
        wide = torch.zeros(pages, size, heads, dim + 1, dtype=torch.uint8, device=device)
        wide[..., 1:] = args[cache].view(torch.uint8)
        args[cache] = wide.view(FP8)[..., 1:]
    again, actual = both(args, q=one, k=one, v=one)
    assert torch.equal(again, expected)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_padding_rows_give_zero_and_empty_batch_is_fine(device):
    args = make(device, [40, 0])
    expected, actual = both(args)
    assert not actual[1].any()
    torch.testing.assert_close(actual[0], expected[0], **TOLERANCE)
    empty = [args[0][:0], args[1], args[2], args[3][:0], args[4][:0], args[5][:0], args[6]]
    for backend in ("torch", "triton"):
        get_kernel(backend, "decode_attention")(*empty, 0.1, 0, None, None, None, None)


def test_nan_stays_in_its_row_and_head(device):
    args = make(device, [40, 70])
    args[0][0, 1, 5] = float("nan")
    _, actual = both(args)
    assert actual[0, 1].isnan().all()
    assert actual[0, 0].isfinite().all() and actual[1].isfinite().all()


def test_strided_query(device):
    args = make(device, [40, 70])
    wide = torch.cat([args[0], torch.randn_like(args[0])], 1)
    expected, _ = both(args)
    args[0] = wide[:, :8]
    _, actual = both(args)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_opcheck(device):
    args = make(device, [20, 3])
    torch.library.opcheck(
        torch.ops.oss_fused.decode_attention,
        (*args, 0.125, 0, None, None, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_bad_input_names_the_argument(device):
    args = make(device, [20, 3])
    call = torch.ops.oss_fused.decode_attention
    tail = (0.125, 0, None, None, None, None)
    with pytest.raises(ShapeMismatchError, match="query"):
        call(args[0][0], *args[1:], *tail)
    with pytest.raises(ShapeMismatchError, match="arrivals"):
        call(*args[:6], args[6][:1], *tail)
    with pytest.raises(UnsupportedDtypeError, match="seq_lens"):
        call(*args[:4], args[4].long(), *args[5:], *tail)
    with pytest.raises(ShapeMismatchError, match="max_query_len=2: expected 1 without"):
        call(*args, *tail, max_query_len=2)
    starts = args[4].new_tensor([0, 2])
    with pytest.raises(ShapeMismatchError, match="max_query_len=0: expected at least 1"):
        call(*args, *tail, query_starts=starts, max_query_len=0)
    with pytest.raises(ShapeMismatchError, match=r"arrivals.numel\(\)=7: expected at least 8"):
        call(*args, *tail, query_starts=starts, max_query_len=4)
    with pytest.raises(ShapeMismatchError, match="key_cache"):
        call(args[0][:, :7], *args[1:5], args[5][:, :7], args[6], *tail)
    for at, size in ((slice(0), slice(None)), (slice(None), slice(0))):
        query, *cache = args[0][:, at, size], *(c[..., size] for c in args[1:3])
        with pytest.raises(ShapeMismatchError, match=r"query.shape=.*Hq and D at least 1"):
            call(query, *cache, *args[3:5], args[5][:, at, size], args[6], *tail)
    with pytest.raises(ShapeMismatchError, match=r"key_cache.shape=.*Hkv a divisor of 8"):
        call(args[0], *(c[:, :, :0] for c in args[1:3]), *args[3:], *tail)
    for scale, window in ((0.0, 0), (float("nan"), 0), (0.125, -1), (0.125, 2**31)):
        with pytest.raises(SchemeError, match=f"softmax_scale={scale}|window={window}"):
            call(*args, scale, window, *tail[2:])


@pytest.mark.gpu
def test_many_splits_in_a_graph_give_the_same_bits(device):
    args = make(device, [4000], q_heads=64, heads=8)
    tail = (0.125, 0, torch.zeros(64, device=device).bfloat16(), None, None, None)
    run = lambda: torch.ops.oss_fused.decode_attention(*args, *tail)  # noqa: E731
    run()
    first = args[5].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        args[5].fill_(float("nan"))
        graph.replay()
        assert torch.equal(args[5], first)
    expected, _ = both(args, sinks=tail[2])
    torch.testing.assert_close(first, expected, **TOLERANCE)


@pytest.mark.gpu
def test_a_graph_takes_any_number_of_queries_up_to_its_own(device):
    args, (starts, most) = with_queries(device, [4000, 700, 90, 33], [4] * 4, q_heads=64, heads=8)
    tail = (0.125, 0, torch.zeros(64, device=device).bfloat16(), None, None, None, True)
    run = lambda: torch.ops.oss_fused.decode_attention(*args, *tail, starts, most)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # sequences without drafts, with some, without a query: vLLM's padding of a graph's batch
    for counts in ([4, 4, 4, 4], [1, 4, 2, 0], [3, 0, 0, 0]):
        starts.copy_(torch.tensor([0, *counts], device=device).cumsum(0))
        expected, _ = both(args, sinks=tail[2], several=(starts, most))
        args[5].fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(args[5], expected, **TOLERANCE, equal_nan=True)


def heads_far_apart(cache):
    """An FP8 ``cache`` whose heads' distance times their number passes 2^31.

    Only the pages of values that are there cost memory.
    """
    dense = cache.view(torch.uint8)
    _, page, _, dim = dense.shape
    far = torch.empty(2**31 + dense.numel(), dtype=torch.uint8, device=cache.device)
    return far.as_strided(dense.shape, (page * dim, dim, 2**30, 1)).copy_(dense).view(FP8)


@pytest.mark.parametrize("lens", [[20, 5], [300, 5]], ids=str)
def test_heads_far_apart(device, lens):
    args = make(device, lens, q_heads=6, heads=3, dim=16, cache=FP8)
    for at in (1, 2):
        args[at] = heads_far_apart(args[at])
    expected, actual = both(args)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
