# SPDX-License-Identifier: MIT
"""decode_attention of large batches: the rule, results on a GPU; test_hopper.py compiles it."""

from __future__ import annotations

import pytest
import torch

from oss_fused.kernels.attention import launches
from oss_fused.kernels.attention import triton as attention_decode
from oss_fused.kernels.attention.launches import (
    LEAST_ITEMS,
    LEAST_SHORT,
    Stream,
    launch_for,
    most_stages,
    registers_of,
    stream_for,
    streams,
)
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.op import get_kernel

CUDA = torch.device("cuda")
# bf16 weights of the softmax and a bf16 result: two roundings of 2^-9 on values near 1
TOLERANCE = {"atol": 1.5e-2, "rtol": 2e-2}
# empty, parts of a run of 16, of a tile of 64 or 128, several tiles
LENS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 1000, 0]


def test_the_rule_takes_large_batches_of_heads_that_fit():
    shape = {"heads": 8, "group": 8, "head_dim": 64, "window": 0, "page_size": 16}
    for window, least in ((0, LEAST_ITEMS), (128, LEAST_SHORT), (129, LEAST_ITEMS)):
        like = {**shape, "window": window}
        assert streams(-(-least // 8), **like) and not streams((least - 1) // 8, **like)
    rows = 4 * LEAST_ITEMS
    for good in ({"group": 1}, {"head_dim": 128}, {"window": 16}, {"page_size": 48}):
        assert streams(rows, **{**shape, **good}), good
    bad = ({"group": 9}, {"head_dim": 80}, {"head_dim": 256}, {"page_size": 8}, {"page_size": 24})
    for other in (*bad, {"window": 15}):
        assert not streams(rows, **{**shape, **other}), other


@pytest.mark.parametrize("head_dim", [64, 128])
def test_programs_fit_a_multiprocessor(head_dim):
    launches_of = {stream_for(head_dim, items) for items in range(1, 1025)}
    for tile in (64, 128):
        for ctas in (1, 2, 3):
            launches_of.add(Stream(tile, most_stages(head_dim, tile, ctas), ctas))
    assert len(launches_of) >= 6
    for launch in launches_of:
        stage = 2 * head_dim * (2 * launch.tile + launches.MOST_GROUP)
        # barriers, weights and what a program takes for the system
        assert launch.ctas * (launch.stages * stage + 3 * 1024) <= 228 * 1024
        assert registers_of(head_dim, launch) % 8 == 0
        assert registers_of(head_dim, launch) * 256 * launch.ctas <= 65536


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_warm_up_meets_every_launch(head_dim, window):
    """layers/vllm/attention.py launches powers of two and the largest batch."""

    def compiled(rows, heads):
        if streams(rows, heads, 4, head_dim, window, 16):
            return stream_for(head_dim, rows * heads)
        launch = launch_for(rows, heads, head_dim, False, window, 4096)
        return launch._replace(splits=0, min_tiles=0)

    for heads in range(1, 17):
        for most in (1, 5, 13, 21, 100, 1000):
            warm = {1 << power for power in range(most.bit_length())} | {most}
            met = {compiled(rows, heads) for rows in warm}
            assert {compiled(rows, heads) for rows in range(1, most + 1)} <= met, (heads, most)


def test_a_cpu_never_takes_it():
    caches = torch.zeros(4, 16, 8, 64).bfloat16()
    query = torch.zeros(LEAST_ITEMS, 8, 64).bfloat16()
    assert not attention_decode._streams(query, caches, caches, query, 0)


def test_tma_takes_rows_on_16_bytes():
    rows = torch.zeros(4, 8, 72).bfloat16()
    assert attention_decode._fits_tma(rows[..., :64])
    assert attention_decode._fits_tma(rows[..., 8:])
    assert not attention_decode._fits_tma(rows[..., 4:68])
    assert not attention_decode._fits_tma(torch.zeros(4, 8, 68).bfloat16()[..., :64])
    assert not attention_decode._fits_tma(rows[:1].expand(4, 8, 72))


def make(lens, q_heads=8, heads=2, dim=64, page=16, dtype=torch.bfloat16):
    """vLLM's layout; free slots and pages hold NaN, entries of no position lead nowhere."""
    generator = torch.Generator(CUDA).manual_seed(0)
    rows, per_row = len(lens), -(-max([*lens, 1]) // page)
    pages = rows * per_row + 1
    kv = torch.randn(pages, heads, page, 2 * dim, generator=generator, device=CUDA)
    lengths = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    table = torch.randperm(pages - 1, generator=generator, device=CUDA).view(rows, per_row) + 1
    used = torch.arange(per_row * page, device=CUDA).view(per_row, page) < lengths[:, None, None]
    full = torch.zeros(pages, page, dtype=torch.bool, device=CUDA)
    full[table.flatten()] = used.view(-1, page)
    kv.masked_fill_(~full[:, None, :, None], float("nan"))
    keys, values = kv.to(dtype).transpose(1, 2).split(dim, -1)
    query = torch.randn(rows, q_heads, dim, generator=generator, device=CUDA).to(dtype)
    return [query, keys, values, table.masked_fill(~used.any(-1), 2**30).int(), lengths]


def run(args, window=0, sinks=None, out=None, how=None, prefetch=False):
    from oss_fused.kernels.attention.stream import decode_stream

    out = torch.full_like(args[0], float("nan")) if out is None else out
    how = how or stream_for(args[0].shape[2], args[0].shape[0] * args[1].shape[2])
    decode_stream(*args, out, 0.125, window, sinks, prefetch, how)
    return out


def reference(args, window=0, sinks=None):
    out = torch.empty_like(args[0])
    table = args[3].clamp(max=args[1].shape[0] - 1)
    scales = (None, None, None)
    attend = get_kernel("torch", "decode_attention")
    arrivals = torch.zeros(out.numel(), dtype=torch.int32, device=CUDA)
    attend(*args[:3], table, args[4], out, arrivals, 0.125, window, sinks, *scales)
    return out


@pytest.fixture
def hopper():
    if not runs_gluon(CUDA):
        pytest.skip("needs a Hopper GPU and Gluon")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 16, 17, 128])
@pytest.mark.parametrize(
    ("q_heads", "heads", "dim", "page", "dtype", "copies"),
    [
        # more items than several programs of every multiprocessor
        (16, 2, 64, 16, torch.bfloat16, 50),
        (8, 2, 128, 16, torch.bfloat16, 30),
        (4, 4, 64, 32, torch.float16, 6),
        (64, 8, 128, 32, torch.float16, 2),
        (10, 2, 64, 48, torch.bfloat16, 2),
    ],
)
def test_equals_reference(hopper, window, q_heads, heads, dim, page, dtype, copies):
    args = make(LENS * copies, q_heads, heads, dim, page, dtype)
    sinks = torch.linspace(-1, 2, q_heads, device=CUDA).bfloat16() if window != 16 else None
    expected, actual = reference(args, window, sinks), run(args, window, sinks)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    for _ in range(3):
        assert torch.equal(run(args, window, sinks, prefetch=True), actual)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "tile"), [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_any_number_of_stages(hopper, dim, tile, ctas):
    args = make(LENS * 40, 16, 2, dim)
    expected, most = reference(args), most_stages(dim, tile, ctas)
    for stages in {1, 2, most}:
        actual = run(args, how=Stream(tile, stages, ctas))
        torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.gpu
def test_strided_operands(hopper):
    args = make(LENS * 4)
    expected = reference(args)
    # positions before heads, queries and results of wider tensors
    args[1] = args[1].contiguous()
    args[0] = torch.cat([args[0], args[0]], 1)[:, 8:]
    wide = torch.full((len(LENS) * 4, 2, 9, 64), 7.0, dtype=torch.bfloat16, device=CUDA)
    torch.testing.assert_close(run(args, out=wide[:, 1, :8]), expected, **TOLERANCE)
    assert (wide[:, 0] == 7).all() and (wide[:, 1, 8] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_nan_stays_where_it_is_seen(hopper, dim):
    args = make(LENS * 20, 8, 2, dim)
    clean, (row, position) = run(args), (24, 500)
    assert args[4][row] == 1000
    page, slot = args[3][row, position // 16].long(), position % 16
    for operand, place, lost in (
        (0, (row, 5, 3), (row, slice(5, 6))),
        (1, (page, slot, 1, 3), (row, slice(4, 8))),
        (2, (page, slot, 1, 3), (row, slice(4, 8), 3)),
    ):
        saved = args[operand][place].clone()
        args[operand][place] = float("nan")
        actual, wanted = run(args), clean.clone()
        wanted[lost] = float("nan")
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
        # the run of 16 positions in which a window begins
        if operand:
            assert run(args, window=492)[row].isfinite().all()
        args[operand][place] = saved


@pytest.mark.gpu
def test_the_operator_takes_it_in_a_graph_of_any_lengths(hopper, monkeypatch):
    from oss_fused.kernels.attention import stream

    seen, launch = [], stream.decode_stream
    monkeypatch.setattr(stream, "decode_stream", lambda *a: (seen.append(a), launch(*a)))
    args = make(LENS * 5, 64, 8)
    out = torch.empty_like(args[0])
    arrivals = torch.zeros(len(LENS) * 5 * 8, dtype=torch.int32, device=CUDA)
    sinks = torch.zeros(64, device=CUDA).bfloat16()
    tail = (0.125, 128, sinks, None, None, None, True)
    call = lambda: torch.ops.oss_fused.decode_attention(*args, out, arrivals, *tail)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    assert len(seen) == 2
    lens = args[4].clone()
    for quarter in (4, 3, 1, 0):
        args[4].copy_(lens * quarter // 4)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, reference(args, 128, sinks), **TOLERANCE)
