# SPDX-License-Identifier: MIT
"""Tile tables: buckets, the rule for unknown shapes, and what each table names exists."""

import inspect
import itertools
import json
from pathlib import Path

import pytest
import torch

from oss_fused.errors import TritonKernelError
from oss_fused.kernels import tiles
from oss_fused.kernels.checks import FP8

CPU = torch.device("cpu")
TABLES = sorted(Path(tiles.__file__).parent.glob("*.json"))


@pytest.mark.parametrize(
    "rows,bucket",
    [(1, 1), (2, 2), (3, 4), (5, 16), (64, 64), (65, 128), (8192, 8192), (10**6, 8192)],
)
def test_row_bucket(rows, bucket):
    assert tiles.row_bucket(rows) == bucket


def test_unknown_device_and_shape_follow_the_rule():
    assert tiles.load_table("No Such GPU") == {}
    assert tiles.choose_gemm_config(CPU, 7, 999, 992) == tiles.gemm_rule(16, 999, 992)
    assert tiles.gemm_rule(16, 64, 100) == {"kernel": "tile"}


def test_kernels_in_gluon_only_where_they_run(monkeypatch):
    assert tiles.choose_gemm_config(CPU, 40, 4096, 4096, True)["kernel"] == "stream"
    assert tiles.choose_gemm_config(CPU, 1024, 4096, 4096, True)["kernel"] == "cooperative"
    for rows in tiles.ROW_BUCKETS:
        assert tiles.choose_gemm_config(CPU, rows, 4096, 4096)["kernel"] not in tiles.GLUON_KERNELS
    # a table that names one: its entry counts where Gluon runs, the rule elsewhere
    known = {"kernel": "stream", "block_m": 8, "block_n": 64}
    monkeypatch.setattr(tiles, "lookup", lambda *_: known)
    assert tiles.choose_gemm_config(CPU, 3, 4096, 4096, True) is known
    assert tiles.choose_gemm_config(CPU, 3, 4096, 4096) == tiles.gemm_rule(4, 4096, 4096)


def test_both_levels_of_a_row_leave_a_table_of_one_level(monkeypatch):
    """On an H100 the table's gemv takes 2.7 us of a layer more for the output projection."""
    gemv = {"kernel": "gemv", "rows_n": 8, "block_k": 2048, "num_warps": 8}
    monkeypatch.setattr(tiles, "lookup", lambda *_: gemv)
    stream = {"kernel": "stream", "block_m": 8, "block_k": 512, "ctas": 1, "slices": 2}
    assert tiles.choose_two_levels(CPU, 1, 2880, 4096, True) == stream
    # many outputs, or no Gluon
    assert tiles.choose_two_levels(CPU, 1, 201088, 2880, True) == gemv
    assert tiles.choose_two_levels(CPU, 1, 2880, 4096) == gemv
    # several rows take it wherever it runs; rows and levels are columns
    assert tiles.choose_two_levels(CPU, 2, 201088, 2880, True)["kernel"] == "stream"
    assert tiles.choose_two_levels(CPU, 8, 2880, 4096, True)["block_m"] == 16


def test_a_long_row_of_few_outputs_is_sliced():
    sliced = {"kernel": "stream", "block_m": 8, "block_k": 512, "ctas": 1, "slices": 2}
    assert [tiles.gemm_rule(rows, 4096, 14336, True) for rows in (1, 2, 4)] == [sliced] * 3
    assert tiles.gemm_rule(16, 4224, 8192, True) == sliced | {"block_m": 16, "block_k": 256}
    # 32 rows and K = 4096 are slower in slices; other outputs were not measured
    for rows, n, k in ((32, 4096, 14336), (4, 4225, 14336), (4, 2112, 14336), (4, 4096, 8176)):
        assert "slices" not in tiles.gemm_rule(rows, n, k, True)
    assert tiles.gemm_rule(1, 4096, 14336)["kernel"] == "gemv"


def test_sums_over_a_long_row_are_shared_where_ctas_leave_room():
    assert [rows for rows in tiles.ROW_BUCKETS if tiles.has_two_parts(rows, 4096, 14336)] == [
        64,
        128,
    ]
    assert tiles.has_two_parts(33, 4224, 8192) and not tiles.has_two_parts(32, 4096, 14336)
    # shapes that were not measured
    assert not tiles.has_two_parts(64, 4240, 14336) and not tiles.has_two_parts(64, 4096, 8176)
    assert not tiles.has_two_parts(64, 2112, 14336)
    # the stride from part to part would say how wide loads are
    assert not tiles.has_two_parts(64, 4088, 14336)


@pytest.mark.parametrize(
    "rows,n,columns", [(1024, 5120, 160), (1024, 2880, 192), (1024, 4096, 256)]
)
def test_columns_fill_the_last_wave(rows, n, columns):
    assert tiles.gemm_rule(rows, n, 4096, True)["columns"] == columns


@pytest.mark.parametrize(
    ("rows", "n", "columns"),
    [(65, 28672, 224), (128, 28672, 224), (256, 28672, 256), (128, 24576, 192), (128, 12288, 128)],
)
def test_columns_of_few_rows_give_all_programs_a_tile(rows, n, columns):
    assert tiles.gemm_rule(tiles.row_bucket(rows), n, 4096, True)["columns"] == columns


@pytest.mark.parametrize("rows,n,k", [(1024, 6144, 4096), (2048, 4096, 4096), (8192, 8192, 8192)])
def test_many_tiles_hide_their_stores(rows, n, k):
    assert tiles.gemm_rule(rows, n, k, True)["kernel"] == "pingpong"
    assert tiles.gemm_rule(rows, n, k)["kernel"] == "large"


def test_rows_between_cache_lines_take_the_wide_tile():
    rule = tiles.gemm_rule(8192, 5120, 2880, True)
    assert rule["kernel"] == "cooperative" and rule["columns"] == 256


def test_names_of_devices_lead_to_their_tables():
    assert tiles.table_path("NVIDIA H200") in TABLES
    path = tiles.table_path("NVIDIA H100 80GB HBM3")
    assert path.name == "nvidia_h100_80gb_hbm3.json"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_fit_the_launchers(path):
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.gemm.cublaslt import gemm_cublaslt
    from oss_fused.kernels.gemm.persistent import gemm_cooperative, gemm_pingpong
    from oss_fused.kernels.gemm.stream import gemm_stream
    from oss_fused.kernels.gemm.triton import KERNELS

    gluon = {"stream": gemm_stream, "cooperative": gemm_cooperative, "pingpong": gemm_pingpong}
    assert set(gluon) <= set(tiles.GLUON_KERNELS)
    launchers = {**KERNELS, **gluon, tiles.CUBLASLT: gemm_cublaslt}
    table = json.loads(path.read_text())["fp8_gemm"]
    assert table
    rules = {
        f"{bucket}x{n}x16": tiles.gemm_rule(bucket, n, 16, with_gluon)
        for with_gluon in (False, True)
        for n in (1, 65536)
        for bucket in tiles.ROW_BUCKETS
    }
    for shape, config in {**table, **rules}.items():
        bucket, _, k = (int(part) for part in shape.split("x"))
        assert bucket in tiles.ROW_BUCKETS and k % 16 == 0
        config = dict(config)
        known = inspect.signature(launchers[config.pop("kernel")]).parameters
        assert set(config) <= set(known), shape
        # a CTA of these kernels holds all rows of its bucket
        assert config.get("block_m", bucket) >= min(bucket, 64)


def _ring(k, tile, exchange=0):
    from oss_fused.kernels.gemm.stream import stream_stages

    slices = tile.get("slices", 1)
    rows = tile["block_m"] * slices, tile.get("block_n", 64)
    if slices > 1:
        exchange = 16 * 1024
    return stream_stages(k, *rows, tile.get("block_k", 256), tile["ctas"], exchange)


def test_no_stream_that_waits_for_itself_is_launched():
    """A ring of one stage, as tune.py tiles tried it, stopped an H100 for good."""
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.gemm.stream import gemm_stream
    from oss_fused.tuning.tile_table import FAMILIES

    families = [family for family in FAMILIES if family.kernel == "stream"]
    refused = 0
    for family, bucket in itertools.product(families, (1, 16, 32, 64, 128)):
        if not family.rows[0] <= bucket <= family.rows[1]:
            continue
        for config in family.space:
            tile = family.tile(bucket, config)
            try:
                assert _ring(2880, tile) >= 2
            except TritonKernelError:
                refused += 1
                assert (config["block_k"], config["ctas"]) == (512, 2)
    assert refused
    a, b, scale = torch.empty(8, 2880).to(FP8), torch.empty(256, 2880).to(FP8), torch.ones(1)
    out = torch.empty(8, 256, dtype=torch.bfloat16)
    with pytest.raises(TritonKernelError, match="shared memory holds two stages, it holds 1"):
        gemm_stream(a, b, scale, scale, None, out, block_m=8, block_n=128, block_k=512, ctas=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slices": 3}, "slices=3: expected 1, 2 or 4"),
        ({"slices": 2, "block_n": 128}, "block_n=128: expected 64 with slices=2"),
        ({"block_k": 192}, "block_k=192: expected a multiple of 128"),
        ({"block_k": 0}, "block_k=0"),
        ({"block_m": 4}, "block_m=4: expected a power of two from 8 to 256"),
        ({"block_m": 24}, "block_m=24"),
        ({"block_m": 128, "slices": 4}, "block_m=128: expected a power of two from 8 to 64"),
    ],
)
def test_sizes_that_no_tile_has(wrong, message):
    """A step that is no whole box would leave the ring waiting for ever."""
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.gemm.stream import gemm_stream

    a, b, scale = torch.empty(8, 384).to(FP8), torch.empty(256, 384).to(FP8), torch.ones(1)
    out = torch.empty(8, 256, dtype=torch.bfloat16)
    with pytest.raises(TritonKernelError, match=message):
        gemm_stream(a, b, scale, scale, None, out, **{"block_m": 8, "ctas": 1} | wrong)


@pytest.mark.parametrize(
    ("shape", "dtype", "block_k", "message"),
    [
        ((2, 512), torch.bfloat16, 256, r"a=torch.bfloat16 \[2, 512\]: expected one row"),
        ((1, 16400), torch.float16, 256, "at most 16384 columns without a_scale"),
        ((1, 512), torch.float32, 256, "of 16 bits"),
        ((1, 512), torch.bfloat16, 384, "block_k=384: expected a power of two without a_scale"),
    ],
)
def test_rows_that_no_product_quantises(shape, dtype, block_k, message):
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.gemm.stream import gemm_stream

    b, scale = torch.empty(256, shape[1]).to(FP8), torch.ones(1)
    out = torch.empty(shape[0], 256, dtype=torch.bfloat16)
    with pytest.raises(TritonKernelError, match=message):
        gemm_stream(torch.empty(shape, dtype=dtype), b, None, scale, None, out, 8, 64, block_k, 1)


def test_a_row_that_its_product_quantises_is_not_split():
    pytest.importorskip("triton.experimental.gluon")
    from oss_fused.kernels.gemm.stream import gemm_stream

    b, scale = torch.empty(256, 512).to(FP8), torch.ones(1)
    with pytest.raises(TritonKernelError, match="splits=2: expected 1 without a_scale"):
        gemm_stream(torch.empty(1, 512).bfloat16(), b, None, scale, None, torch.empty(2, 1, 256))


def test_one_stage_holds_a_short_row():
    pytest.importorskip("triton.experimental.gluon")
    tile = {"block_m": 8, "block_n": 128, "block_k": 512, "ctas": 2}
    assert _ring(512, tile) == 1
    with pytest.raises(TritonKernelError, match="two stages"):
        _ring(528, tile)


def test_rules_and_tables_leave_two_stages():
    pytest.importorskip("triton.experimental.gluon")
    found = [
        (bucket, tiles.gemm_rule(bucket, n, 65536, True))
        for bucket in tiles.ROW_BUCKETS
        for n in (1, 65536)
    ]
    for path in TABLES:
        table = json.loads(path.read_text())["fp8_gemm"]
        found += [(int(key.split("x")[0]), tile) for key, tile in table.items()]
    streams = [(bucket, tile) for bucket, tile in found if tile["kernel"] == "stream"]
    assert streams and all(_ring(65536, tile) >= 2 for bucket, tile in streams)
    # of a float32 result, whose layout is exchanged in 16 KB
    for _, tile in streams:
        half = {**tile, "block_k": min(tile.get("block_k", 256), 128)}
        assert _ring(65536, half, 16 * 1024) >= 2, tile
