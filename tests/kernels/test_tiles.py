# SPDX-License-Identifier: MIT
"""Tile tables: buckets, the rule for unknown shapes, and what the H200 table names exists."""

import inspect

import pytest
import torch

from oss_fused.kernels import tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "rows,bucket",
    [(1, 1), (2, 2), (3, 4), (5, 16), (64, 64), (65, 128), (8192, 8192), (10**6, 8192)],
)
def test_row_bucket(rows, bucket):
    assert tiles.row_bucket(rows) == bucket


def test_unknown_device_and_shape_follow_the_rule():
    assert tiles.load_table("No Such GPU") == {}
    assert tiles.gemm_tile(CPU, 7, 999, 992) == tiles.gemm_rule(16, 999, 992)
    assert tiles.gemm_rule(16, 64, 100) == {"kernel": "tile"}


def test_h200_table_fits_the_launchers():
    from oss_fused.kernels.triton.gemm import KERNELS

    table = tiles.load_table("NVIDIA H200")["fp8_gemm"]
    assert table
    rules = {f"{bucket}x1x16": tiles.gemm_rule(bucket, 1, 16) for bucket in tiles.ROW_BUCKETS}
    for shape, config in {**table, **rules}.items():
        bucket, _, k = (int(part) for part in shape.split("x"))
        assert bucket in tiles.ROW_BUCKETS and k % 16 == 0
        config = dict(config)
        known = inspect.signature(KERNELS[config.pop("kernel")]).parameters
        assert set(config) <= set(known), shape
