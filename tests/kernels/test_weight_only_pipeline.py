# SPDX-License-Identifier: MIT
"""The weight-only pipeline for Hopper: its rule, the sum of parts of K, its tiles on a GPU."""

from __future__ import annotations

import pytest
import torch

from oss_fused.kernels import tiles
from oss_fused.kernels.launch import multiprocessors
from oss_fused.kernels.weight_only import pipeline as pipeline_module
from oss_fused.kernels.weight_only.gemv import MAX_ROWS
from oss_fused.kernels.weight_only.parts import add_parts
from oss_fused.kernels.weight_only.triton import kernels
from tests.kernels.test_weight_only import (
    BF16,
    FP8,
    FP16,
    TOLERANCE,
    exact,
    operands,
    relative_error,
)

# every kind of tile that the pipeline is compiled for
PIPELINES = [
    {"block_m": 16, "block_k": 256, "consumers": 1, "ctas": 2},
    {"block_m": 32, "block_k": 128, "consumers": 2},
    {"block_m": 64, "block_k": 128, "consumers": 2},
    {"block_m": 64, "block_k": 128, "consumers": 3, "depth": 3},
    {"block_m": 128, "block_k": 64, "consumers": 2, "depth": 2},
    {"block_m": 128, "block_k": 64, "consumers": 3},
    {"block_m": 256, "block_k": 64, "consumers": 2},
]


@pytest.mark.parametrize("bucket", [b for b in tiles.ROW_BUCKETS if b > MAX_ROWS])
def test_the_rule_where_gluon_runs(bucket):
    """The pipeline; K is split where tiles are few, and no part has less than three steps."""
    for n, k in ((2880, 4096), (5120, 2880), (28672, 4096), (128, 8192), (8, 16)):
        rule = tiles.weight_only_rule(bucket, n, k, True)
        steps = -(-k // rule["block_k"])
        each = -(-steps // rule["splits"])
        last = steps - each * (rule["splits"] - 1)
        assert rule["kernel"] == "pipeline" and last >= rule["depth"]
        assert rule["splits"] == 1 or each >= tiles._PART_STEPS
    assert tiles.weight_only_rule(bucket, 28672, 4096, True)["splits"] == 1
    if bucket <= 512:
        assert tiles.weight_only_rule(bucket, 128, 8192, True)["splits"] > 1


def test_a_table_names_the_pipeline_for_hopper_alone(monkeypatch):
    """Elsewhere the rule replaces the entry."""
    entry = {"kernel": "pipeline", "block_m": 64, "block_k": 128}
    monkeypatch.setattr(tiles, "lookup", lambda *_: entry)
    cpu = torch.device("cpu")
    assert tiles.choose_weight_only(cpu, 40, 512, 512, True) == entry
    assert tiles.choose_weight_only(cpu, 40, 512, 512) == tiles.weight_only_rule(64, 512, 512)


@pytest.mark.parametrize(("m", "n", "padded"), [(1, 8, 16), (20, 72, 48), (33, 130, 64)])
@pytest.mark.parametrize("rows", [True, False])
def test_parts_are_added_in_order(m, n, padded, rows, device):
    """Scaled and shifted once; what lies beyond the rows is not looked at."""
    g = torch.Generator().manual_seed(m)
    parts = torch.randn(3, n, padded, generator=g)
    parts[:, :, m:] = float("nan")
    scale = torch.rand(n, 1, generator=g) if rows else torch.rand(1, generator=g)
    bias = torch.randn(n, generator=g).to(BF16)
    for shift in (None, bias):
        want = ((parts[0] + parts[1]) + parts[2])[:, :m].t() * scale.view(1, -1)
        want = (want if shift is None else want + shift.float()).to(BF16)
        out = torch.empty(m, n, dtype=BF16, device=device)
        add_parts(
            parts.to(device), scale.to(device), shift if shift is None else shift.to(device), out
        )
        torch.testing.assert_close(out.cpu(), want, rtol=2**-7, atol=1e-6)


def pipeline(device):
    """The pipeline's launcher; a GPU without Gluon has none."""
    found = kernels(device).get("pipeline")
    if found is None:
        pytest.skip("needs Hopper and a Triton with Gluon")
    return found


_IN_TURN = [
    {"block_m": m, "block_k": k, "consumers": consumers, "depth": depth, "ctas": ctas}
    for m, k, consumers, depth, ctas in (*tiles._MIXED, (64, 128, 3, 3, 1), (128, 64, 3, 3, 1))
    if depth > 1
]


@pytest.mark.parametrize("options", _IN_TURN)
@pytest.mark.parametrize("splits", [1, 2])
def test_consumers_in_turn_keep_their_slots(options, splits, monkeypatch):
    """A consumer that meets another's slot may take the lap before its own for its own.

    So a program has one tile where a part of K leaves the next tile's first slot to another.
    """
    launched = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.update(kwargs, programs=grid[0])

    monkeypatch.setattr(pipeline_module, "_mixed_pipeline_kernel", Kernel())
    monkeypatch.setattr(pipeline_module, "add_parts", lambda *_: None)
    depth, block_k = options["depth"], options["block_k"]
    tiles_of_n = 20 * splits
    for odd in range(depth):
        steps = 12 * depth * splits + odd
        x, weight, scale, bias = operands(3, 1280, block_k * steps, torch.device("cpu"))
        out = torch.empty(3, 1280, dtype=BF16)
        pipeline_module.product_pipeline(x, weight, scale, bias, out, **options, splits=splits)
        assert launched["STAGES"] > depth and launched["STAGES"] % depth == 0
        most = options["ctas"] * multiprocessors(torch.device("cpu"))
        assert launched["programs"] == (tiles_of_n if odd else min(most, tiles_of_n))


@pytest.mark.gpu
@pytest.mark.parametrize("options", PIPELINES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(3, 72, 16), (64, 64, 64), (17, 1016, 4112), (130, 264, 144), (300, 2880, 4096)],
)
def test_pipeline_values(options, m, n, k, device):
    """Odd shapes, parts of K, strided operands, twice; one rounding, the same bits."""
    run, depth = pipeline(device), options.get("depth", 1)
    steps = -(-k // options["block_k"])
    if steps < depth:
        pytest.skip("fewer blocks of K than consumers that take them in turn")
    for dtype, parts, rows in ((BF16, 1, True), (FP16, 1, False), (BF16, 3, False)):
        x, weight, scale, bias = operands(m, n, k + 16, device, dtype, rows)
        x, weight, shift = x[:, :k], weight[:, 16:], None if rows else bias
        splits = tiles.splits_of(steps, parts)
        if steps - -(-steps // splits) * (splits - 1) < depth:
            continue
        out, again = (torch.full((m, n), 7.0, dtype=dtype, device=device) for _ in range(2))
        run(x, weight, scale, shift, out, **options, splits=splits)
        run(x, weight, scale, shift, again, **options, splits=splits)
        assert relative_error(out, exact(x, weight, scale, shift)) < TOLERANCE[dtype]
        assert torch.equal(again, out)


@pytest.mark.gpu
@pytest.mark.parametrize("options", PIPELINES)
@pytest.mark.parametrize("splits", [1, 2])
def test_pipeline_converts_every_code(options, splits, device):
    """A unit vector; NaN codes and a row of x that is NaN stay in their row."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(1024).view(256, 1024).view(FP8)
    x = torch.zeros(20, 1024, dtype=BF16, device=device)
    x[:, 5] = 1
    x[3, 700] = float("nan")
    x[4, 5] = float("inf")
    out = torch.empty(20, 256, dtype=BF16, device=device)
    one = torch.ones(1, device=device)
    pipeline(device)(x, codes.to(device), one, None, out, **options, splits=splits)
    want = codes[:, :1].float().to(device).expand(256, 20).t()
    plain = torch.ones(20, dtype=torch.bool, device=device)
    plain[3:5] = False
    torch.testing.assert_close(out[plain].float(), want[plain], rtol=0, atol=0, equal_nan=True)
    assert out[3].isnan().all() and not out[4].isfinite().any()
