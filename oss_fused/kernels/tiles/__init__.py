# SPDX-License-Identifier: MIT
"""Tile choices: a table per device (JSON) and a deterministic rule for everything else.

A table ``<device>.json`` maps an operation to ``{"<rows>x<N>x<K>": {"kernel": ..., tile sizes}}``,
rows being an upper bound of ROW_BUCKETS. Nothing is tuned while a model runs.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch

# a kernel is compiled once per bucket; the number of rows inside one is a run-time argument
ROW_BUCKETS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)

# kernels of products that need Gluon and Hopper; the others need Triton alone
GLUON_KERNELS = ("stream", "cooperative", "pingpong", "pipeline")
# cuBLASLt's product (gemm/cublaslt.py), and the smallest bucket for which the rule takes it
CUBLASLT, CUBLASLT_ROWS = "cublaslt", 8192

# outputs up to which both levels of few rows take K in two slices
_SHORT = 3072
# columns from which a product of few rows takes K in two slices
_LONG = 8192
# rows of which two CTAs may share a sum; measured in a chain of layers of Llama-3-8B
_SPLIT_BUCKETS = (64, 128)
# multiprocessors of an H200: up to so many tiles each has one for itself
_WAVE = 132
# outputs that tiles of 64 have in one wave
ONE_WAVE = 64 * _WAVE
# columns of a row that each CTA of a product can quantise: its registers hold them
MOST_QUANTISED = 16384
# outputs whose tiles of 32 rows, or two parts of 64, fill more than half of a wave and begin no
# second one; others were not measured
_SLICED_OUTPUTS = range(16 * _WAVE + 1, 32 * _WAVE + 1)
# tiles of weight-only products by rows, best on average over an H200's shapes: block_n, block_m,
# block_k, stages, warps; CTAs per multiprocessor that K is split for
_WEIGHT_ONLY = {
    4: (64, 16, 128, 4, 4, 2),
    16: (64, 16, 128, 4, 4, 2),
    32: (64, 32, 256, 3, 4, 2),
    64: (64, 64, 128, 4, 4, 2),
    128: (64, 128, 128, 3, 4, 2),
    256: (64, 128, 64, 4, 4, 2),
}
# tiles of the weight-only pipeline: rows, block_k, consumers, depth, CTAs that share a
# multiprocessor; microseconds of a step and of a tile beside its steps, fitted to an H200's times
_MIXED = {
    (16, 256, 1, 1, 2): (1.06, 0.8),
    (16, 256, 2, 2, 1): (0.52, 1.3),
    (32, 256, 1, 1, 2): (1.14, 0.1),
    (32, 256, 2, 2, 1): (0.52, 1.7),
    (64, 128, 1, 1, 2): (0.65, 0.1),
    (64, 128, 2, 2, 1): (0.356, 0.5),
    (128, 64, 2, 2, 1): (0.258, 0.8),
    (128, 128, 2, 1, 1): (0.79, 1.2),
    (128, 64, 3, 1, 1): (0.56, 2.9),
    (256, 64, 2, 1, 1): (0.657, 2.0),
}
# microseconds that splitting K takes, and those of each sum that a part leaves
_SPLIT_US, _SUM_US = 1.9, 1.8e-6
# steps of K that a part has at least, and how many parts there are at most
_PART_STEPS, _PARTS = 3, 8
# cycles of a tile beside its product, where its result leaves before the next product begins and
# where it leaves under it; fitted to an H200's times
_STORE_CYCLES = 5400
_HIDDEN_STORE_CYCLES = 1500
# columns of the cooperative kernel's tile; of equal ones the widest reads least from L2
_COLUMNS = (256, 192, 160, 128)
# the same for up to 128 rows, where memory limits more than the tensor cores: these read the tokens
# once for each of the three parts of 224 columns
_FEW_ROWS_COLUMNS = (256, 224, 192, 160, 128)
# products of 128 rows by one column that a multiprocessor's tensor cores do in a cycle
_PRODUCTS = 32


def row_bucket(rows: int) -> int:
    """Smallest bucket that holds ``rows``; the last one beyond that."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


@functools.cache
def load_table(device_name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The table of a device by its name, e.g. "NVIDIA H200"; empty if there is none."""
    file = table_path(device_name)
    return json.loads(file.read_text()) if file.is_file() else {}


def table_path(device_name: str) -> Path:
    """Where the table of a device belongs, whether it exists or not."""
    return Path(__file__).parent / f"{re.sub(r'[^a-z0-9]+', '_', device_name.lower())}.json"


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@functools.cache
def lookup(device: torch.device, operation: str, key: str) -> dict[str, Any] | None:
    """Entry ``key`` of the device's table for ``operation``, or None."""
    return load_table(_device_name(device)).get(operation, {}).get(key)


def choose_gemm_config(
    device: torch.device, m: int, n: int, k: int, gluon: bool = False, cublaslt: bool = False
) -> dict[str, Any]:
    """Kernel and tile sizes of an FP8 GEMM [M, K] x [N, K].

    ``gluon`` says whether kernels in Gluon run there, ``cublaslt`` whether cuBLASLt's product does;
    if not, the rule replaces a table's entry that names one.
    """
    bucket = row_bucket(m)
    known = lookup(device, "fp8_gemm", f"{bucket}x{n}x{k}")
    if known is not None:
        kernel = known["kernel"]
        if cublaslt if kernel == CUBLASLT else gluon or kernel not in GLUON_KERNELS:
            return known
    return gemm_rule(bucket, n, k, gluon, cublaslt)


@functools.cache
def gemm_rule(
    bucket: int, n: int, k: int, gluon: bool = False, cublaslt: bool = False
) -> dict[str, Any]:
    """The tile of a shape that no table has; measured best on average over an H200's shapes."""
    # without columns the others have nothing to load, and cuBLASLt leaves out the bias
    if k % 16 or k == 0:
        return {"kernel": "tile"}
    # columns of a last tile that N does not fill cost it more than the kernels in Gluon
    if cublaslt and bucket >= CUBLASLT_ROWS and n % 128 == 0:
        return {"kernel": CUBLASLT}
    if gluon and bucket <= 16 and k >= _LONG and n in _SLICED_OUTPUTS:
        return {"kernel": "stream", **_sliced_tile(max(bucket, 8))}
    if gluon and 2 <= bucket <= 64:
        return {"kernel": "stream", "block_m": max(bucket, 8), **_stream_tile(bucket, n)}
    if gluon and bucket >= 512:
        return _pipeline_tile(bucket, n, k)
    if gluon and 64 < bucket <= 256:
        return _middle_tile(bucket, n, k)
    if bucket <= 2:
        return {"kernel": "gemv", "rows_n": 8 // bucket, "block_k": 2048, "num_warps": 4}
    if bucket <= 64:
        return {"kernel": "swap", "block_m": max(bucket, 16), **_swap_pipeline(bucket, n, k)}
    if bucket <= 128:
        return {"kernel": "swap", "block_m": 128, "num_stages": 4}
    if bucket <= 1024:
        return {"kernel": "large", "block_n": 128, "num_stages": 4, "num_warps": 4}
    return {"kernel": "large", "group_m": 4}


def has_two_parts(m: int, n: int, k: int) -> bool:
    """Whether two CTAs should share each sum of a product, if adding both needs no launch.

    N is a multiple of 16: the norm that adds them is then compiled once for all numbers of rows.
    """
    is_long = n in _SLICED_OUTPUTS and k >= _LONG
    return is_long and row_bucket(m) in _SPLIT_BUCKETS and n % 16 == 0


def choose_two_levels(
    device: torch.device, m: int, n: int, k: int, gluon: bool = False
) -> dict[str, Any]:
    """Kernel and tile sizes of the product of both levels of ``m`` rows, [2 M, K] x [N, K].

    A table's tiles are of one level, and of one row with its quantisation in the launch.
    """
    config = choose_gemm_config(device, m, n, k, gluon)
    if gluon and (m > 1 or config["kernel"] != "gemv" or n <= ONE_WAVE):
        return {"kernel": "stream", **_two_level_tile(2 * m, n)}
    return config


def _two_level_tile(rows: int, n: int) -> dict[str, int]:
    """Tile of the stream kernel for up to 16 rows of which two are the levels of one."""
    block_m = 8 if rows <= 8 else 16
    if n > ONE_WAVE:
        return {"block_m": block_m, "block_n": 128, "block_k": 128, "ctas": 1}
    if block_m == 8 and n <= _SHORT:
        return _sliced_tile(block_m)
    return {"block_m": block_m, "block_n": 64, "block_k": 256, "ctas": 1}


def _sliced_tile(block_m: int) -> dict[str, int]:
    """Two slices of K in a CTA, for outputs that leave half of the multiprocessors without one."""
    return {"block_m": block_m, "block_k": 512 if block_m == 8 else 256, "ctas": 1, "slices": 2}


def _stream_tile(bucket: int, n: int) -> dict[str, int]:
    """One CTA a multiprocessor, its ring as deep as shared memory; more of them for many tiles."""
    if n <= ONE_WAVE:
        return {"block_n": 64, "ctas": 1}
    return {"block_n": 128 if bucket == 64 else 64, "ctas": 2}


def _middle_tile(bucket: int, n: int, k: int) -> dict[str, Any]:
    """Tiles of 64 weight rows, whose weights come before the inputs, while one wave has them all;
    else the widest tile that pays."""
    if -(-bucket // 128) * -(-n // 64) <= _WAVE:
        return {"kernel": "stream", "block_m": 128, "block_n": 64, "block_k": 128, "ctas": 1}
    columns, _ = _cooperative_columns(bucket, n, k)
    return {"kernel": "cooperative", "columns": columns, "group_m": 8}


def _cycles(bucket: int, n: int, k: int, columns: int, overhead: int) -> int:
    """Of all waves of tiles of 128 rows, a last wave's idle multiprocessors included."""
    waves = -(-(-(-bucket // 128) * -(-n // columns)) // _WAVE)
    return waves * (columns * k // _PRODUCTS + overhead)


def _cooperative_columns(bucket: int, n: int, k: int) -> tuple[int, int]:
    """Columns of the cooperative kernel's tile that take the fewest cycles, and the cycles."""
    widths = _FEW_ROWS_COLUMNS if bucket <= 128 else _COLUMNS
    cycles = {width: _cycles(bucket, n, k, width, _STORE_CYCLES) for width in widths}
    columns = min(cycles, key=lambda width: cycles[width])
    return columns, cycles[columns]


def _pipeline_tile(bucket: int, n: int, k: int) -> dict[str, Any]:
    """The pipeline and tile that take the fewest cycles."""
    columns, cycles = _cooperative_columns(bucket, n, k)
    # of the last tile nothing hides the end
    last = _STORE_CYCLES - _HIDDEN_STORE_CYCLES
    # 128 x 128 needs 64 bytes a cycle from L2, all that a multiprocessor gets; rows that begin
    # between cache lines need more
    if k % 128 == 0 and _cycles(bucket, n, k, 128, _HIDDEN_STORE_CYCLES) + last < cycles:
        return {"kernel": "pingpong", "group_m": 8}
    return {"kernel": "cooperative", "columns": columns, "group_m": 8}


def _swap_pipeline(bucket: int, n: int, k: int) -> dict[str, int]:
    """Depth of the weight pipeline: as many bytes in flight as shared memory holds."""
    if n > ONE_WAVE:
        return {"block_n": 128, "num_stages": 4 if bucket == 64 else 3, "num_warps": 8}
    if k % 512 == 0 and bucket <= 32:
        return {"block_k": 512, "num_stages": 4 if bucket == 32 else 5}
    return {"num_stages": 6 if bucket == 64 else 5}


def choose_weight_only(
    device: torch.device, m: int, n: int, k: int, gluon: bool = False
) -> dict[str, Any]:
    """Kernel and tile sizes of the product of x [M, K] in 16 bits and FP8 weights [N, K].

    ``gluon``: as in ``choose_gemm_config``.
    """
    bucket = row_bucket(m)
    known = lookup(device, "weight_only_linear", f"{bucket}x{n}x{k}")
    if known is not None and (gluon or known["kernel"] not in GLUON_KERNELS):
        return known
    return weight_only_rule(bucket, n, k, gluon)


@functools.cache
def weight_only_rule(bucket: int, n: int, k: int, gluon: bool = False) -> dict[str, Any]:
    """The kernel of a shape that no table has."""
    if bucket <= 2:
        # two rows double the registers
        block_k = 2048 if k % 2048 == 0 else 1024
        return {"kernel": "gemv", "rows_n": 4, "block_k": block_k, "num_warps": block_k // 512}
    if gluon:
        return _mixed_tile(bucket, n, k)
    if bucket not in _WEIGHT_ONLY:
        return {"kernel": "dense"}
    block_n, block_m, block_k, stages, warps, fill = _WEIGHT_ONLY[bucket]
    tiles, steps = -(-n // block_n) * -(-bucket // block_m), -(-k // block_k)
    parts = max(min(fill * _WAVE // tiles, steps // _PART_STEPS, _PARTS), 1)
    return {
        **{"kernel": "tile", "block_m": block_m, "block_n": block_n, "block_k": block_k},
        **{"num_stages": stages, "num_warps": warps, "splits": splits_of(steps, parts)},
    }


def _mixed_tile(bucket: int, n: int, k: int) -> dict[str, Any]:
    """The tile of the weight-only pipeline, and the parts of K, that take the least time."""
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    for (block_m, block_k, consumers, depth, ctas), (step_us, tile_us) in _MIXED.items():
        if block_m > max(bucket, 16):
            continue
        steps = -(-k // block_k)
        tiles = -(-bucket // block_m) * -(-n // (64 * (consumers // depth)))
        for parts in range(1, _PARTS + 1):
            splits = splits_of(steps, parts)
            each = -(-steps // splits)
            last = steps - each * (splits - 1)
            if last < depth or (splits > 1 and each < _PART_STEPS):
                continue
            time = -(-tiles * splits // (ctas * _WAVE)) * (each * step_us + tile_us)
            if splits > 1:
                time += _SPLIT_US + _SUM_US * splits * bucket * n
            if time < best[0]:
                sizes = {"block_m": block_m, "block_k": block_k, "consumers": consumers}
                more = {"depth": depth, "ctas": ctas, "splits": splits}
                best = (time, {"kernel": "pipeline", **sizes, **more})
    return best[1]


def splits_of(steps: int, parts: int) -> int:
    """At most ``parts`` parts of ``steps`` steps, of equal length but the last; none is empty."""
    return -(-steps // -(-steps // parts))
