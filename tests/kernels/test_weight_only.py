# SPDX-License-Identifier: MIT
"""weight_only_linear against float64: every kernel, odd shapes, strides, values beyond numbers."""

from __future__ import annotations

import inspect

import pytest
import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels import tiles
from oss_fused.kernels.op import get_kernel
from oss_fused.kernels.weight_only.gemv import MAX_ROWS
from oss_fused.kernels.weight_only.pipeline import product_pipeline
from oss_fused.kernels.weight_only.tile import product_tile
from oss_fused.kernels.weight_only.triton import KERNELS, kernels

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
# one rounding to x.dtype
TOLERANCE = {BF16: 2**-8, FP16: 2**-11, torch.float32: 1e-5}
op = torch.ops.oss_fused.weight_only_linear


def operands(m, n, k, device, dtype=BF16, rows=True):
    g = torch.Generator().manual_seed(m * n + k)
    x = torch.randn(m, k, generator=g).to(dtype)
    weight = torch.randn(n, k, generator=g).to(FP8)
    scale = torch.rand(*((n, 1) if rows else (1,)), generator=g) + 0.5
    return tuple(t.to(device) for t in (x, weight, scale, torch.randn(n, generator=g).to(dtype)))


def exact(x, weight, scale, bias):
    out = (x.double() @ weight.double().t()) * scale.double().view(1, -1)
    return out if bias is None else out + bias.double()


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 64, 128), (2, 101, 1040), (3, 33, 160), (17, 130, 576), (70, 66, 96), (33, 31, 17)],
)
def test_values(backend, dtype, m, n, k, device):
    for rows in (True, False):
        *args, bias = operands(m, n, k, device, dtype, rows)
        for shift in (None, bias):
            got = get_kernel(backend, "weight_only_linear")(*args, shift)
            assert got.dtype == dtype and got.shape == (m, n)
            assert relative_error(got, exact(*args, shift)) < tolerance(args[0], k)


def tolerance(x, k):
    """Aligned rows round once; an unaligned product rounds the weight, too."""
    return TOLERANCE[x.dtype] * (1 if k % 16 == 0 else 2)


def test_float32_activations(device):
    *args, bias = operands(2, 24, 32, device, torch.float32)
    for shift in (None, bias):
        got = get_kernel("triton", "weight_only_linear")(*args, shift)
        assert relative_error(got, exact(*args, shift)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code(dtype, device):
    """All 256 codes by a unit vector each; NaN codes give NaN, in the rows of their weights."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16).view(FP8)
    want = codes[:, :1].float().to(device)
    for m in (1, 2, 16):
        x = torch.zeros(m, 16, dtype=dtype)
        x[:, 5] = 1
        one = torch.ones(1, device=device)
        got = op(x.to(device), codes.to(device), one, None).float()
        assert got[:, 127].isnan().all() and got[:, 255].isnan().all()
        torch.testing.assert_close(got.t(), want.expand(256, m), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_values_that_are_no_numbers_stay_in_their_row(m, device):
    *args, _ = operands(m, 40, 64, device)
    clean = op(*args, None)
    args[0][m - 1, 3] = float("nan")
    got = op(*args, None)
    assert got[m - 1].isnan().all() and torch.equal(got[: m - 1], clean[: m - 1])
    args[0][m - 1, 3] = float("inf")
    assert not op(*args, None)[m - 1].isfinite().any()


@pytest.mark.parametrize("m", [1, 2, 5])
def test_large_values_become_infinite_and_small_ones_stay(m, device):
    x = torch.full((m, 32), 60000.0, dtype=FP16, device=device)
    weight = torch.full((8, 32), 448.0, device=device).to(FP8)
    one = torch.ones(8, 1, device=device)
    assert op(x, weight, one, None).isinf().all()
    assert op(x, weight, one * 1e-6, None).isfinite().all()
    if m > MAX_ROWS:
        return
    # the least code times a scale: a float16 weight would be 0
    tiny = torch.full((8, 32), 2.0**-9, device=device).to(FP8)
    got = op(x, tiny, one * 2**-20, None).float()
    assert torch.equal(got, torch.full_like(got, 32 * 60000 * 2.0**-29).half().float())


@pytest.mark.parametrize("m", [0, 1, 2, 7])
def test_empty_sizes(m, device):
    for n, k in ((8, 0), (0, 16), (8, 16)):
        *args, bias = operands(m, n, k, device)
        got = op(*args, bias)
        assert got.shape == (m, n)
        if k == 0:
            assert torch.equal(got, bias.expand(m, n))


@pytest.mark.parametrize("m", [1, 2, 6])
def test_strides(m, device):
    """Columns of a wider tensor, every other row, a transposed x, leading dimensions."""
    x, weight, scale, bias = operands(2 * m, 32, 96, device)
    wide = torch.cat([weight.view(torch.uint8)] * 2, 1).view(FP8)
    cases = [
        (x[::2], weight),
        (x[:m, :64], weight[:, :64]),
        (x[:m, 1:65], weight[:, 1:65]),
        (x[:m], wide[:, 96:]),
        (x[:m].t().contiguous().t(), weight),
    ]
    for rows, codes in cases:
        want = exact(rows, codes, scale, bias)
        assert relative_error(op(rows, codes, scale, bias), want) < 2 * TOLERANCE[BF16]
    nested = x.view(2, m, 96)
    got = op(nested, weight, scale, bias)
    assert got.shape == (2, m, 32)
    assert torch.equal(got.view(2 * m, 32), op(x, weight, scale, bias))


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("tma", [True, False])
def test_splits_of_k(splits, tma, device):
    """The last part shorter than the others; scale and bias once."""
    x, weight, scale, bias = operands(20, 72, 320, device)
    out = torch.empty(20, 72, dtype=BF16, device=device)
    options = {"block_m": 16, "block_k": 64, "splits": tiles.splits_of(5, splits), "tma": tma}
    product_tile(x, weight, scale, bias, out, **options)
    assert relative_error(out, exact(x, weight, scale, bias)) < TOLERANCE[BF16]


def test_no_part_of_k_is_empty():
    for steps in range(1, 40):
        for parts in range(1, 9):
            splits = tiles.splits_of(steps, parts)
            each = -(-steps // splits)
            assert 1 <= splits <= parts and each * (splits - 1) < steps <= each * splits


@pytest.mark.parametrize("bucket", tiles.ROW_BUCKETS)
def test_the_rule(bucket, device):
    """One or two rows: gemv; then tiles, none of whose parts of K is empty; many rows: cuBLAS."""
    for n, k in ((2880, 4096), (5120, 2880), (28672, 4096), (8, 16)):
        rule = tiles.weight_only_rule(bucket, n, k)
        if bucket <= MAX_ROWS:
            assert rule["kernel"] == "gemv"
        elif bucket not in tiles._WEIGHT_ONLY:
            assert rule == {"kernel": "dense"}
        else:
            steps = -(-k // rule["block_k"])
            each = -(-steps // rule["splits"])
            assert rule["kernel"] == "tile" and rule["block_m"] <= max(bucket, 16)
            assert each * (rule["splits"] - 1) < steps
    assert tiles.weight_only_rule(tiles.ROW_BUCKETS[-1], 2880, 4096) == {"kernel": "dense"}


def test_few_tiles_split_a_long_k_and_never_a_short_one():
    rules = {
        k: [tiles.weight_only_rule(b, 128, k) for b in tiles._WEIGHT_ONLY] for k in (512, 8192)
    }
    assert max(rule["splits"] for rule in rules[8192]) > 1
    assert all(rule["splits"] == 1 for rule in rules[512] if rule["block_k"] >= 128)


@pytest.mark.parametrize("m", [3, 20, 70])
def test_the_rules_own_tiles(m, device):
    """What the rule names, at a shape that splits K and one that does not."""
    for n, k in ((72, 832), (130, 160)):
        *args, bias = operands(m, n, k, device)
        got = get_kernel("triton", "weight_only_linear")(*args, bias)
        assert relative_error(got, exact(*args, bias)) < TOLERANCE[BF16]


def test_a_table_may_name_the_tile_kernel(monkeypatch, device):
    """Where rows are aligned; other operands are dequantised."""
    config = {"kernel": "tile", "block_m": 16, "block_k": 64, "splits": 2}
    monkeypatch.setattr(tiles, "choose_weight_only", lambda *_: config)
    *args, bias = operands(20, 72, 320, device)
    seen = []
    # a GPU has kernels of its own
    of_device = kernels(args[0].device)
    monkeypatch.setitem(of_device, "tile", lambda *a, **o: (seen.append(o), product_tile(*a, **o)))
    run = get_kernel("triton", "weight_only_linear")
    assert relative_error(run(*args, bias), exact(*args, bias)) < TOLERANCE[BF16]
    x, weight = args[0][:, 1:65], args[1][:, 1:65]
    got = run(x, weight, args[2], bias)
    assert relative_error(got, exact(x, weight, args[2], bias)) < 2 * TOLERANCE[BF16]
    assert seen == [{"block_m": 16, "block_k": 64, "splits": 2}]


def test_rules_and_tables_fit_the_launchers():
    shapes = ((1024, 2880), (2880, 4096), (28672, 4096), (201088, 2880), (8, 16))
    named = [
        (f"{bucket}x{n}x{k}", tiles.weight_only_rule(bucket, n, k, gluon))
        for n, k in shapes
        for bucket in tiles.ROW_BUCKETS
        for gluon in (False, True)
    ]
    named += tiles.load_table("NVIDIA H200").get("weight_only_linear", {}).items()
    for shape, options in named:
        bucket = int(shape.split("x")[0])
        config = dict(options)
        name = config.pop("kernel")
        launch = product_pipeline if name == "pipeline" else KERNELS[name]
        assert config.keys() <= inspect.signature(launch).parameters.keys(), shape
        assert name != "gemv" or bucket <= MAX_ROWS, shape


@pytest.mark.parametrize("m", [1, 5])
def test_the_operator(m, check_op, device):
    *args, bias = operands(m, 48, 64, device)
    check_op(op.default, (*args, bias))
    check_op(op.default, (*args, None, True))


def test_wrong_arguments(device):
    x, weight, scale, bias = operands(3, 8, 16, device)
    with pytest.raises(ShapeMismatchError, match=r"x.shape=\(3, 15\)"):
        op(x[:, :15], weight, scale, bias)
    with pytest.raises(ShapeMismatchError, match="weight_scale.shape"):
        op(x, weight, scale[:3], bias)
    with pytest.raises(ShapeMismatchError, match="bias.shape"):
        op(x, weight, scale, bias[:3])
    with pytest.raises(UnsupportedDtypeError, match="weight.dtype=torch.float16"):
        op(x, weight.half(), scale, bias)
    with pytest.raises(UnsupportedDtypeError, match="weight_scale.dtype"):
        op(x, weight, scale.double(), bias)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 3, 16, 64, 100, 300, 1000, 3000])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096), (1000, 512)])
def test_a_graph_replays_what_runs_eagerly(m, n, k, device):
    """Models' own shapes by the kernels that serve, in a graph and twice: the same bits."""
    *args, bias = operands(m, n, k, device)
    eager = op(*args, bias, True)
    assert relative_error(eager, exact(*args, bias)) < 2 * TOLERANCE[BF16]
    assert torch.equal(op(*args, bias), eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*args, bias, True)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "block_m", "splits"),
    [
        (100, 2880, 4096, 128, 5),
        (300, 5120, 2880, 128, 1),
        # more CTAs than an H200 has multiprocessors
        (300, 2880, 4096, 128, 4),
        (1000, 2880, 4096, 128, 2),
        (1000, 5120, 2880, 128, 1),
        (300, 5120, 2880, 64, 1),
    ],
)
def test_the_tile_kernel_at_models_shapes(m, n, k, block_m, splits, device):
    *args, bias = operands(m, n, k, device)
    out, again = (torch.empty(m, n, dtype=BF16, device=device) for _ in range(2))
    wide = block_m == 128
    sizes = {"block_m": block_m, "block_n": 128, "block_k": 64 if wide else 128}
    options = {**sizes, "num_stages": 4, "num_warps": 8 if wide else 4, "splits": splits}
    product_tile(*args, bias, out, **options)
    product_tile(*args, bias, again, **options)
    assert relative_error(out, exact(*args, bias)) < TOLERANCE[BF16]
    assert torch.equal(again, out)


@pytest.mark.gpu
def test_nothing_compiles_after_the_buckets_ran(device):
    from triton import knobs

    *args, bias = operands(3000, 1024, 512, device)

    def run(rows):
        op(args[0][:rows], *args[1:], bias, True)

    for rows in (*(r for r in tiles.ROW_BUCKETS if r < 3000), 3000):
        run(rows)
    compiled = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *_, **info: compiled.append(info.get("repr"))
    try:
        for rows in (1, 2, 3, 5, 15, 17, 31, 33, 63, 65, 127, 129, 255, 300, 511, 700, 1025, 2999):
            run(rows)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40])
def test_compiled_in_one_graph(m, device):
    *args, bias = operands(m, 256, 512, device)
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*args, bias), op(*args, bias))
