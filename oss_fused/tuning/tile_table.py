# SPDX-License-Identifier: MIT
"""The FP8 GEMM's tile table of a device: measured here, read by ``kernels.tiles`` while serving.

For every shape and row bucket each family of kernels is tuned on weights that together exceed the
L2, in graph replays. The fastest becomes the table's entry where it beats what the rule would
choose; elsewhere the rule stays, so that a table holds nothing that it need not.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused.bench.statistics import MIN_SAMPLES
from oss_fused.bench.timing import time_replays
from oss_fused.errors import TritonKernelError
from oss_fused.files import write_text
from oss_fused.kernels import tiles
from oss_fused.kernels.token_tiles import empty_token_codes
from oss_fused.specs import FP8GEMMInput
from oss_fused.tuning.cache import TuningCache
from oss_fused.tuning.device import DeviceDescription
from oss_fused.tuning.space import Config, ConfigSpace
from oss_fused.tuning.tuner import Timer, TritonAutoTuner

Entry = dict[str, Any]
# a shape and a bucket of rows, and how its kernels are called: (kernel name, tile) -> output
Launch = Callable[[str, Config], Any]

# share of the rule's time that an entry must save
MIN_GAIN = 0.02
# weights in turn until together they are several times the L2
_ROTATED_BYTES = 400e6
_MAX_COPIES = 24


@dataclass(frozen=True)
class Family:
    """One kernel with the values of its tile that are worth trying, for buckets of rows."""

    kernel: str
    rows: tuple[int, int]
    space: ConfigSpace

    def tile(self, bucket: int, config: Mapping[str, int]) -> Entry:
        """The table entry of ``config``; the swapped kernels hold all rows of a bucket."""
        fixed = {"stream": 8, "swap": 16}.get(self.kernel)
        block_m = {"block_m": min(max(bucket, fixed), 64)} if fixed else {}
        return {"kernel": self.kernel, **block_m, **config}


FAMILIES = (
    Family(
        "gemv",
        (1, 2),
        ConfigSpace(
            {"rows_n": (2, 4, 8, 16), "block_k": (1024, 2048, 4096), "num_warps": (2, 4, 8)}
        ),
    ),
    Family(
        "stream",
        (1, 128),
        ConfigSpace({"block_n": (64, 128), "block_k": (128, 256, 512), "ctas": (1, 2)}),
    ),
    Family(
        "stream",
        (1, 16),
        ConfigSpace({"block_k": (256, 512), "ctas": (1, 2), "slices": (2, 4)}),
    ),
    Family(
        "swap",
        (4, 128),
        ConfigSpace({"block_n": (64, 128), "block_k": (128, 256, 512), "num_stages": (3, 4, 5, 8)}),
    ),
    Family(
        "large",
        (128, 8192),
        ConfigSpace(
            {
                "block_m": (64, 128, 256),
                "block_n": (128, 256),
                "group_m": (4, 8, 16),
                "num_stages": (3, 4, 5),
                "num_warps": (4, 8),
            }
        ),
    ),
    Family(
        "cooperative",
        (128, 8192),
        ConfigSpace({"columns": (128, 160, 192, 224, 256), "group_m": (4, 8, 16, 32)}),
    ),
    Family("pingpong", (128, 8192), ConfigSpace({"group_m": (4, 8, 16, 32)})),
)


@dataclass(frozen=True)
class Recovery:
    """How much of a tuned tile's speed another device's tile gives on this one.

    Attributes:
        key: of the tables, rows x N x K.
        given: the entry that came with the other device's table, or the rule's where it has none
            or one that cannot run here.
        given_ms: its time.
        best: the fastest entry found here; ``given`` where nothing was faster.
        best_ms: its time.
    """

    key: str
    given: Entry
    given_ms: float
    best: Entry
    best_ms: float

    @property
    def share(self) -> float:
        """Of the tuned tile's speed; at most 1."""
        return self.best_ms / self.given_ms


@dataclass(frozen=True)
class TableTuner:
    """Finds entries; ``device`` names the cache's keys and, if it is a GPU, is measured.

    ``names`` are the kernels that can run, ``description`` and ``timer`` are replaced to simulate.
    """

    device: torch.device
    names: frozenset[str]
    cache: TuningCache
    timer: Timer
    description: DeviceDescription | None = None
    force: bool = False
    exhaustive: bool = False
    compile_workers: int = 8

    def entry(self, bucket: int, n: int, k: int, launch: Launch) -> Entry | None:
        """The best kernel and tile of a shape, or None where the rule's is as good.

        Raises:
            TritonKernelError: the rule's own choice does not run.
        """
        best = self._search(bucket, n, k, launch)
        # the search's time may be of another day, from the cache: clocks differ by more than a gain
        now = self._time(launch, best[1]) if best else math.inf
        usual = self._time(launch, self._rule(bucket, n, k))
        return best[1] if best and now <= usual * (1 - MIN_GAIN) else None

    def recovery(
        self, bucket: int, n: int, k: int, launch: Launch, table: Mapping[str, Entry]
    ) -> Recovery:
        """Tune a shape and time what ``table``, of another device, gives for it.

        Both are timed again after the search, in turn. A search that finds nothing faster gives
        a share of 1.

        Args:
            bucket: rows, one of ROW_BUCKETS.
            n: rows of the weight.
            k: its columns.
            launch: calls the kernels.
            table: the other device's entries of fp8_gemm.

        Raises:
            TritonKernelError: neither the table's tile nor the rule's runs.
        """
        key = f"{bucket}x{n}x{k}"
        given = dict(table.get(key, {}))
        if given.get("kernel") not in self.names:
            given = self._rule(bucket, n, k)
        try:
            self._time(launch, given)
        except TritonKernelError:
            given = self._rule(bucket, n, k)
        found = self._search(bucket, n, k, launch)
        given_ms = self._time(launch, given)
        best, best_ms = given, given_ms
        if found:
            again = self._time(launch, found[1])
            if again < given_ms:
                best, best_ms = found[1], again
        return Recovery(key, given, given_ms, best, best_ms)

    def _rule(self, bucket: int, n: int, k: int) -> Entry:
        gluon = not self.names.isdisjoint(tiles.GLUON_KERNELS)
        return dict(tiles.gemm_rule(bucket, n, k, gluon, tiles.CUBLASLT in self.names))

    def _search(self, bucket: int, n: int, k: int, launch: Launch) -> tuple[float, Entry] | None:
        """Time and entry of the fastest tile of all families, None if none runs."""
        best: tuple[float, Entry] | None = None
        for family in FAMILIES:
            first, last = family.rows
            if family.kernel not in self.names or not first <= bucket <= last:
                continue
            found = self._tune(family, bucket, n, k, launch)
            if found and (best is None or found[0] < best[0]):
                best = found
        return best

    def _tune(
        self, family: Family, bucket: int, n: int, k: int, launch: Launch
    ) -> tuple[float, Entry] | None:
        def run(codes: torch.Tensor, **config: int) -> Any:
            return launch(family.kernel, _tile_arguments(family.tile(bucket, config)))

        tuner = TritonAutoTuner(
            run,
            family.space,
            warmup_runs=2,
            benchmark_runs=MIN_SAMPLES,
            # a kernel's families differ in their parameters, and share no results
            operation="_".join(("tile", family.kernel, *family.space.parameters)),
            cache=self.cache,
            description=self.description,
            exhaustive=self.exhaustive,
            compile_workers=self.compile_workers,
            timer=self.timer,
        )
        codes = torch.empty(0, dtype=torch.float8_e4m3fn, device=self.device)
        try:
            result = tuner.tune(
                codes,
                problem_size=FP8GEMMInput(bucket, n, k),
                device=self.device,
                force=self.force,
            )
        except TritonKernelError:
            # none of this family's tiles fits; another family serves the shape
            return None
        return result.metrics.latency_ms, family.tile(bucket, result.best_config)

    def _time(self, launch: Launch, rule: Entry) -> float:
        kernel = rule["kernel"]
        try:
            launch(kernel, _tile_arguments(rule))
            samples = self.timer(
                lambda: launch(kernel, _tile_arguments(rule)), MIN_SAMPLES, self.device
            )
        except RuntimeError as error:
            raise TritonKernelError(f"rule={rule}: expected a tile that runs ({error})") from error
        return statistics.median(samples)


def _tile_arguments(entry: Entry) -> Config:
    return {name: value for name, value in entry.items() if name != "kernel"}


def gpu_tuner(
    device: torch.device,
    cache: TuningCache,
    force: bool = False,
    exhaustive: bool = False,
    compile_workers: int = 8,
) -> TableTuner:
    """A tuner that measures on ``device``: replays over as many calls as weights take turns."""
    from oss_fused.kernels.gemm.triton import kernels

    def timer(call: Callable[[], Any], repeats: int, where: torch.device) -> list[float]:
        # an output of hundreds of megabytes leaves room for few of them
        return time_replays([call] * 8, repeats, where)

    names = frozenset(kernels(device))
    return TableTuner(device, names, cache, timer, None, force, exhaustive, compile_workers)


def gpu_launch(bucket: int, n: int, k: int, device: torch.device) -> Launch:
    """Calls of every kernel on random codes of a shape, the weights taking turns."""
    from oss_fused.kernels.gemm.triton import PREFETCHING, kernels

    copies = max(1, min(_MAX_COPIES, int(_ROTATED_BYTES // (n * k)) + 1))
    # in a storage of whole tiles, as the codes of served tokens
    a = empty_token_codes((bucket, k), device).copy_(torch.randn(bucket, k, device=device))
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    weights = itertools.cycle([weight.clone() for _ in range(copies)])
    a_scale = torch.rand(bucket, 1, device=device)
    b_scale = torch.rand(n, 1, device=device)

    def launch(kernel: str, config: Config) -> torch.Tensor:
        out = torch.empty(bucket, n, dtype=torch.bfloat16, device=device)
        # as the served layers run them
        early = {"prefetch_weights": True} if kernel in PREFETCHING else {}
        kernels(device)[kernel](a, next(weights), a_scale, b_scale, None, out, **config, **early)
        return out

    return launch


def write_table(path: Path, operation: str, entries: Mapping[str, Entry | None]) -> None:
    """Merge ``entries`` into the table at ``path``; None removes one. A line an entry, sorted."""
    table = json.loads(path.read_text()) if path.is_file() else {}
    known = {**table.get(operation, {}), **entries}
    table[operation] = {key: known[key] for key in sorted(known, key=_order) if known[key]}
    blocks = []
    for name in sorted(table):
        lines = [f"    {json.dumps(key)}: {json.dumps(tile)}" for key, tile in table[name].items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    write_text(path, "{\n" + ",\n".join(blocks) + "\n}\n")


def _order(key: str) -> tuple[int, ...]:
    rows, *shape = (int(part) for part in key.split("x"))
    return (*shape, rows)


def tune_table(
    tuner: TableTuner,
    sizes: Iterable[tuple[int, int, int]],
    make_launch: Callable[[int, int, int], Launch],
    report: Callable[[str], None],
) -> dict[str, Entry | None]:
    """Entries of ``sizes`` (M, N, K), M being rounded up to its bucket; None: the rule serves."""
    entries: dict[str, Entry | None] = {}
    for m, n, k in sizes:
        bucket = tiles.row_bucket(m)
        key = f"{bucket}x{n}x{k}"
        if key not in entries:
            entries[key] = tuner.entry(bucket, n, k, make_launch(bucket, n, k))
            report(f"{key}: {entries[key] or 'as the rule says'}")
    return entries
