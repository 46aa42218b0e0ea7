# SPDX-License-Identifier: MIT
"""How a batch of decode attention is cut up into programs."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from oss_fused.kernels.integers import cdiv, next_power_of_2


class Launch(NamedTuple):
    """How a batch is cut up: programs a head, positions a tile and warps of one.

    A split has at least ``min_tiles`` tiles, so that short sequences take fewer of them. Keys and
    values of ``stages - 1`` tiles are on their way or in use at once. ``tiles_first``: a tile is
    asked for before queries are used. That takes registers, so that fewer programs run at once. It
    counts where a sequence has one token, and each warp its own positions or the window one tile.
    """

    splits: int
    block_n: int
    warps: int
    min_tiles: int
    stages: int = 3
    tiles_first: bool = False


# (heads larger than 64, FP8 cache) -> launch for rows times KV heads of up to _PROGRAMS and
# beyond: the fastest on an H200 over contexts of 128 to 32768 (docs/decode.md), up to 32 with large
# heads in a chain of layers (docs/results/notes/decode.md)
_PROGRAMS = (8, 32, 64, 512)
_LAUNCHES = {
    (False, False): (
        Launch(32, 128, 4, 2, 4, True),
        Launch(8, 64, 2, 3, 4, True),
        Launch(8, 64, 2, 3, 4, True),
        Launch(2, 32, 1, 8, 4),
        Launch(1, 32, 1, 1, 4),
    ),
    (False, True): (
        Launch(32, 128, 4, 1, 3),
        Launch(8, 64, 2, 2, 4),
        Launch(8, 64, 2, 2, 4),
        Launch(2, 64, 2, 8, 4),
        Launch(1, 64, 2, 1, 4),
    ),
    (True, False): (
        Launch(32, 64, 4, 3, 3, True),
        Launch(8, 64, 4, 4, 3, True),
        Launch(4, 64, 4, 4, 3),
        Launch(1, 32, 2, 1, 4),
        Launch(1, 32, 2, 1, 4),
    ),
    (True, True): (
        Launch(32, 128, 4, 1, 3),
        Launch(8, 64, 2, 2, 4),
        Launch(8, 64, 2, 2, 4),
        Launch(2, 64, 2, 4, 4),
        Launch(1, 64, 2, 1, 4),
    ),
}
# sequences times KV heads from which stream.py takes a batch: it does not split a context; with
# short windows, which nothing splits; no two changes of launch between powers of two
LEAST_ITEMS, LEAST_SHORT = 65, 64
# query heads of a KV head that it takes: columns of its products
MOST_GROUP = 8
# positions that it copies at once; a page is a multiple, and a window has as many at least
RUN = 16
# shared memory of a multiprocessor, and what a program takes of it beside its stages
_SHARED_MEMORY = 228 * 1024
_RESERVED = 5 * 1024
# a window that is one tile
_SHORT_WINDOW = Launch(1, 128, 4, 1)
# rows of a program's tile: query heads times tokens
_TILE = 64


class Stream(NamedTuple):
    """How stream.py runs: positions of a tile, tiles on their way or in use, programs per
    multiprocessor."""

    tile: int
    stages: int
    ctas: int


def _stream_bytes(head_dim: int, tile: int) -> int:
    """16-bit keys and values of a tile, and the queries that come along."""
    return 2 * head_dim * (2 * tile + MOST_GROUP)


def most_stages(head_dim: int, tile: int, ctas: int) -> int:
    """As many stages as fit ``ctas`` programs of a multiprocessor, at most 8."""
    return min((_SHARED_MEMORY // ctas - _RESERVED) // _stream_bytes(head_dim, tile), 8)


def stream_for(head_dim: int, items: int) -> Stream:
    """The launch of ``items`` (sequences times KV heads): the fastest on an H200 over contexts of
    130 to 32768 (docs/results/notes/decode.md)."""
    if head_dim == 64:
        # with many programs two tiles are enough on their way, and the next kernel finds room
        return Stream(64, 3 if items < 512 else 2, 4)
    # a power of two times the heads falls into each range: warm-up meets every launch
    ctas = 3 if items < 256 else 2
    return Stream(64, most_stages(head_dim, 64, ctas), ctas)


def registers_of(head_dim: int, launch: Stream) -> int:
    """Registers per thread with which all programs fit that the shared memory has room for.

    Where it has room for more than ``ctas``, those of the next kernel start early.
    """
    program = launch.stages * _stream_bytes(head_dim, launch.tile) + _RESERVED
    programs = min(_SHARED_MEMORY // program, 4)
    # 256 threads: a loading warp takes the place of four
    return min(65536 // (256 * programs) // 8 * 8, 168)


def streams(rows: int, heads: int, group: int, head_dim: int, window: int, page_size: int) -> bool:
    """Whether stream.py takes a batch of 16-bit queries and cache, one query per sequence.

    Like ``launch_for`` it depends on nothing that changes between replays of a CUDA graph.
    """
    short = 0 < window <= _SHORT_WINDOW.block_n
    return (
        rows * heads >= (LEAST_SHORT if short else LEAST_ITEMS)
        and group <= MOST_GROUP
        and head_dim in (64, 128)
        and page_size % RUN == 0
        and (window == 0 or window >= RUN)
    )


def tokens_per_program(max_query_len: int, group: int, head_dim: int) -> int:
    """Tokens of one sequence that a program takes; ``group`` query heads share a KV head."""
    # the tiles of 64 rows of heads of 256 do not fit the shared memory of a Hopper GPU
    rows = _TILE if head_dim <= 128 else _TILE // 2
    return min(max_query_len, max(1, rows // group))


def launch_for(
    rows: int, heads: int, head_dim: int, fp8: bool, window: int, positions: int
) -> Launch:
    """The launch of a batch; depends on nothing that changes between replays of a CUDA graph.

    Args:
        rows: programs per head: sequences, padding included, times the tiles of their tokens.
        heads: KV heads.
        head_dim: of a head.
        fp8: whether the cache is.
        window: of the layer, 0 for none.
        positions: most that a sequence can have, by the width of the block table.
    """
    bucket = bisect.bisect_left(_PROGRAMS, rows * heads)
    best = _LAUNCHES[head_dim > 64, fp8][bucket]
    if 0 < window <= _SHORT_WINDOW.block_n:
        first = rows * heads <= LEAST_SHORT and not (fp8 and head_dim > 64)
        best = _SHORT_WINDOW._replace(warps=8 if head_dim > 64 else 4, tiles_first=first)
    tiles = cdiv(min(window or positions, positions), best.block_n)
    useful = next_power_of_2(cdiv(tiles, best.min_tiles))
    return best._replace(splits=min(best.splits, useful))
