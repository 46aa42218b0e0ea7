# SPDX-License-Identifier: MIT
"""Tile tables: buckets, the rule for unknown shapes, and what each table names exists."""

import inspect
import json
from pathlib import Path

import pytest
import torch

from oss_fused.kernels import tiles

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


@pytest.mark.parametrize(
    "rows,n,columns", [(1024, 5120, 160), (1024, 2880, 192), (1024, 4096, 256)]
)
def test_columns_fill_the_last_wave(rows, n, columns):
    assert tiles.gemm_rule(rows, n, 4096, True)["columns"] == columns


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
    from oss_fused.kernels.gemm.persistent import gemm_cooperative, gemm_pingpong
    from oss_fused.kernels.gemm.stream import gemm_stream
    from oss_fused.kernels.gemm.triton import KERNELS

    gluon = {"stream": gemm_stream, "cooperative": gemm_cooperative, "pingpong": gemm_pingpong}
    assert set(gluon) <= set(tiles.GLUON_KERNELS)
    launchers = {**KERNELS, **gluon}
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
