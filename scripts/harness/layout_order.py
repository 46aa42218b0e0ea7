# SPDX-License-Identifier: MIT
"""Times reads of one table in several orders, and compares their order with the predicted one.

Gathers read the offsets of every pattern with one operator, so that only memory differs. Copies
read real views, which PyTorch may walk as it likes; a gather of random rows is no view.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from oss_fused.analysis.access import MemoryAccessAnalyzer, tensor_offsets
from oss_fused.bench.statistics import Verdict, compare_samples
from oss_fused.bench.timing import FLUSH_BYTES, time_calls

STRIDES = (1, 2, 8, 32)
CHANNELS = 3
# predictions this close are no order; neither are medians
_SAME_TRAFFIC, _SAME_TIME = 0.05, 0.10


def views(base: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """Name -> view of ``base`` [32 * count] with about ``count`` elements."""
    side = int((count / CHANNELS) ** 0.5)
    image = base[: CHANNELS * side * side]
    return {
        **{f"stride {stride}": base[::stride][:count] for stride in STRIDES},
        "broadcast": base[:1].expand(count),
        "NCHW": image.view(1, CHANNELS, side, side),
        "NHWC": image.view(1, side, side, CHANNELS).permute(0, 3, 1, 2),
    }


def cases(
    base: torch.Tensor, count: int, analyzer: MemoryAccessAnalyzer
) -> Iterator[tuple[str, str, int, dict[str, Any], Callable[[], Any]]]:
    """Family, name, accesses, what is predicted, and the read."""
    made = views(base, count)
    generator = torch.Generator().manual_seed(0)
    for name in (*made, "random gather"):
        if name in made:
            offsets = tensor_offsets(made[name], count)
            predicted = dict(analyzer.analyze_tensor(made[name]))
        else:
            offsets = torch.randint(0, base.numel(), (count,), generator=generator)
            predicted = dict(analyzer.analyze_pattern(base.shape, offsets[: 2**16]))
        predicted["traffic"] = analyzer.traffic(offsets[: 2**16])
        index = offsets.to(base.device, torch.int32)
        out = torch.empty(len(offsets), device=base.device)
        yield "gather", name, len(offsets), predicted, _gather(base, index, out)
        if name in made:
            target = torch.empty(made[name].shape, device=base.device)
            yield "copy", name, target.numel(), predicted, _copy(target, made[name])


def _gather(base: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.index_select(base, 0, index, out=out)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source)


def cold_times(
    calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device
) -> list[list[float]]:
    """Milliseconds of each call, one after the other, the caches overwritten before each.

    In turn, because a machine that slows down must slow all alike.
    """
    times: list[list[float]] = [[] for _ in calls]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8)
    for call in calls:
        call()
    for _ in range(repeats):
        for place, call in enumerate(calls):
            if device.type == "cuda":
                times[place] += time_calls(call, 1, device)
                continue
            flush.fill_(1)
            start = time.perf_counter()
            call()
            times[place].append(1e3 * (time.perf_counter() - start))
    return times


def measure(device: torch.device, count: int, repeats: int) -> list[dict[str, Any]]:
    """A row a case, with samples."""
    line_bytes = 128 if device.type == "cuda" else 64
    base = torch.ones(max(STRIDES) * count, device=device)
    made = list(cases(base, count, MemoryAccessAnalyzer(base.element_size(), line_bytes)))
    times = cold_times([call for *_, call in made], repeats, device)
    rows = []
    for (family, name, accesses, predicted, _), milliseconds in zip(made, times):
        samples = [1e6 * ms / accesses for ms in milliseconds]
        row = {"family": family, "pattern": name, "predicted": predicted}
        rows.append(row | {"ns_per_access": statistics.median(samples), "samples_ns": samples})
    return rows


def orders(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pair of a family whose times differ: which is slower, and which was predicted to be."""
    found = []
    for first, second in itertools.combinations(rows, 2):
        if first["family"] != second["family"]:
            continue
        verdict = compare_samples(first["samples_ns"], second["samples_ns"], _SAME_TIME).verdict
        if verdict is Verdict.SAME:
            continue
        traffic = [row["predicted"]["traffic"] for row in (first, second)]
        measured = second if verdict is Verdict.SLOWER else first
        slower = second if traffic[1] > traffic[0] else first
        tie = abs(traffic[0] - traffic[1]) <= _SAME_TRAFFIC * max(traffic)
        found.append(
            {
                "family": first["family"],
                "pair": [first["pattern"], second["pattern"]],
                "slower": measured["pattern"],
                "predicted": "same" if tie else slower["pattern"],
                "agrees": not tie and slower is measured,
            }
        )
    return found


def agreement(pairs: list[dict[str, Any]]) -> float:
    """Share of the measured orders that were predicted.

    Raises:
        ValueError: no two patterns differ.
    """
    if not pairs:
        raise ValueError("pairs=[]: no two patterns differ in time, expected at least one order")
    return statistics.fmean(pair["agrees"] for pair in pairs)
