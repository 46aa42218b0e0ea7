# SPDX-License-Identifier: MIT
"""window_attention against its reference: windows, pages, heads, FP8, several sequences."""

from __future__ import annotations

import pytest
import torch
from test_attention import heads_far_apart

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.attention.window import WindowTile
from oss_fused.kernels.attention.window import window_attention as launch
from oss_fused.kernels.op import get_kernel

FP8 = torch.float8_e4m3fn
# bf16 weights of the softmax and a bf16 result: two roundings of 2^-9 on values near 1
TOLERANCE = {"atol": 1.5e-2, "rtol": 2e-2}
SMALL = WindowTile(rows=16, warps=4)


def make(device, lens, counts, q_heads=4, heads=2, dim=16, page=16, dtype=torch.bfloat16):
    """Sequences of ``lens`` positions, the last ``counts`` of which are queries."""
    torch.manual_seed(0)
    pages_per_row = -(-max([*lens, 1]) // page)
    pages = len(lens) * pages_per_row + 1
    # vLLM's layout: [pages, heads, page_size, 2 * dim], unused slots hold anything, NaN here
    kv = torch.full((pages, heads, page, 2 * dim), float("nan"))
    table = torch.randperm(pages - 1)[: len(lens) * pages_per_row].view(len(lens), -1).int() + 1
    for row, length in enumerate(lens):
        for position in range(length):
            kv[table[row, position // page], :, position % page] = torch.randn(heads, 2 * dim)
    # a page that no position has: what is read of it must not count
    table[:, -1] = torch.where(torch.tensor(lens) > (pages_per_row - 1) * page, table[:, -1], 0)
    keys, values = kv.to(dtype).to(device).transpose(1, 2).split(dim, -1)
    query = torch.randn(sum(counts), q_heads, dim)
    query = query.to(device, torch.bfloat16 if dtype == FP8 else dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return [query, keys, values, table.to(device), seq_lens, starts]


def both(args, window, sinks=None, q=None, k=None, v=None, scale=0.25, config=None):
    results = []
    for backend in ("torch", "triton"):
        out = torch.full_like(args[0], float("nan"), dtype=torch.bfloat16)
        run = get_kernel(backend, "window_attention") if config is None else launch
        if backend == "torch":
            run = get_kernel(backend, "window_attention")
        more = {} if config is None or backend == "torch" else {"config": config}
        run(*args, out, scale, window, sinks, q, k, v, **more)
        results.append(out)
    return results


def check(args, window, **options):
    expected, actual = both(args, window, **options)
    assert not actual[: args[5][-1]].isnan().any()
    torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_prompt_from_its_first_token(device, window, sinks):
    sink = torch.linspace(-1, 2, 4, device=device).bfloat16() if sinks else None
    check(make(device, [75], [75]), window, sinks=sink, config=SMALL)


@pytest.mark.parametrize("before", [0, 1, 15, 16, 31, 50])
def test_a_prompt_whose_begin_is_cached(device, before):
    check(make(device, [before + 21], [21]), 24, config=SMALL)


@pytest.mark.parametrize(
    ("lens", "counts"),
    [
        ([20, 33, 9], [20, 1, 9]),
        ([40, 40], [8, 8]),
        # sequences without a query, first and last too
        ([5, 30, 7, 12], [0, 30, 0, 0]),
        ([70, 1, 1, 1, 64], [3, 1, 1, 1, 17]),
    ],
)
def test_several_sequences(device, lens, counts):
    check(make(device, lens, counts), 20, config=SMALL)


@pytest.mark.parametrize(("q_heads", "heads"), [(3, 3), (6, 2), (8, 1), (1, 1)])
def test_groups_of_heads(device, q_heads, heads):
    check(make(device, [40], [37], q_heads=q_heads, heads=heads), 18, config=SMALL)


@pytest.mark.parametrize("page", [1, 8, 16, 24, 64])
def test_pages_of_any_size(device, page):
    check(make(device, [90, 31], [50, 31], page=page), 33, config=SMALL)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_tiles_of_any_size(device, rows):
    check(make(device, [150], [90]), 32, config=WindowTile(rows, 4))


def test_the_shape_of_gpt_oss(device):
    args = make(device, [200], [140], q_heads=16, heads=2, dim=64)
    check(args, 128, sinks=torch.randn(16, device=device), scale=0.125)


@pytest.mark.parametrize("dim", [24, 80])
def test_heads_that_are_no_power_of_two(device, dim):
    check(make(device, [40], [40], dim=dim), 20, config=SMALL)


def test_fp8_cache(device):
    args = make(device, [60], [33], dtype=FP8)
    scales = [torch.tensor([s], device=device) for s in (0.5, 2.0, 0.7)]
    check(args, 24, k=scales[1], v=scales[2], config=SMALL)
    args[0] = args[0].to(FP8)
    check(args, 24, q=scales[0], k=scales[1], v=scales[2], config=SMALL)


def test_rows_behind_the_last_query_are_not_written(device):
    args = make(device, [30], [30])
    args[0] = torch.cat([args[0], args[0][:9]])
    expected, actual = both(args, 16, config=SMALL)
    assert actual[30:].isnan().all() and expected[30:].isnan().all()
    torch.testing.assert_close(actual[:30], expected[:30], **TOLERANCE)


def test_nan_stays_where_it_is_seen(device):
    args = make(device, [40], [40])
    args[0][10] = float("nan")
    _, actual = both(args, 16, config=SMALL)
    assert actual[10].isnan().all() and not actual[9].isnan().any()
    assert not actual[11].isnan().any()


def test_wrong_arguments(device):
    args = make(device, [20], [20])
    out, run = torch.empty_like(args[0]), torch.ops.oss_fused.window_attention
    with pytest.raises(SchemeError, match="window=129"):
        run(*args, out, 0.2, 129, None, None, None, None)
    with pytest.raises(SchemeError, match="softmax_scale=0"):
        run(*args, out, 0.0, 8, None, None, None, None)
    with pytest.raises(ShapeMismatchError, match="seq_lens"):
        run(*args[:4], args[4][:0], args[5], out, 0.2, 8, None, None, None, None)
    none = [t[..., :0] for t in args[:3]]
    with pytest.raises(ShapeMismatchError, match="query.shape=.*Hq and D at least 1"):
        run(*none, *args[3:], out[..., :0], 0.2, 8, None, None, None, None)


def test_heads_far_apart(device):
    args = make(device, [20, 17], [3, 2], q_heads=6, heads=3, dtype=FP8)
    for at in (1, 2):
        args[at] = heads_far_apart(args[at])
    check(args, 8)
