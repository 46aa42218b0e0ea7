# SPDX-License-Identifier: MIT
"""The monitor's figures on vLLM's /metrics.

Workers are processes of their own: each writes its figures to a file, and a collector in each API
server reads the files when it is asked.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oss_fused import envs
from oss_fused.errors import SchemeError
from oss_fused.files import write_json

_DIR = "OSS_FUSED_MONITOR_DIR"
# field of LayerFigures -> metric and its help
_COUNTERS = {
    "tokens": ("oss_fused:monitored_tokens", "Tokens whose activations were looked at"),
    "nonfinite": ("oss_fused:nonfinite_tokens", "Tokens with NaN or Inf in a layer's input"),
    "saturated": ("oss_fused:saturated_tokens", "Tokens that reach the limit of a static scale"),
    "underflowed": (
        "oss_fused:underflowing_tokens",
        "Tokens so far below the limit of a static scale that rounding costs twice the usual",
    ),
    "accuracy_drops": (
        "oss_fused:accuracy_drops",
        "Samples with NaN or Inf, saturation or underflow in over 1 % of the tokens",
    ),
    "outliers": ("oss_fused:amax_outliers", "Samples whose amax was far above the usual"),
}
_AMAX = ("oss_fused:activation_amax", "Largest input magnitude in the last sample")
_SAMPLES = ("oss_fused:monitor_samples", "Steps that the monitor looked at")
_BITS16 = ("oss_fused:exact_input_layers", "Layers that run with 16-bit activations")
_SCALES = ("oss_fused:scale_updates", "Static scales of inputs that a reload changed")
_SWITCHED = ("oss_fused:switched_layers", "Of them switched since the start, uncompiled since")


@dataclass
class LayerFigures:
    """What was seen at one layer's input since the start.

    Attributes:
        tokens: looked at.
        nonfinite: of them with NaN or Inf.
        saturated: of them that reach the limit of a static scale; None without such a scale.
        underflowed: of them far below that limit (statistics.UNDERFLOW); None in the same way.
        accuracy_drops: samples in which over 1 % of the tokens are any of these.
        outliers: samples with an amax far above the usual.
        amax: largest finite magnitude in the last sample that had one.
        usual: moving average of amax.
    """

    tokens: int = 0
    nonfinite: int = 0
    saturated: int | None = None
    underflowed: int | None = None
    accuracy_drops: int = 0
    outliers: int = 0
    amax: float | None = None
    usual: float = 0.0


def share_folder() -> None:
    """Make the folder that all processes of the server use; in the one that starts the others."""
    if multiprocessing.parent_process() is not None and envs.get(_DIR):
        return
    if envs.get(_DIR):
        # of a server that has ended: no process updates them
        for path in _files():
            path.unlink(missing_ok=True)
        return
    folder = tempfile.mkdtemp(prefix="oss-fused-monitor-")
    os.environ[_DIR] = folder
    owner = os.getpid()

    def remove() -> None:
        # a forked child runs this as well
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _folder() -> Path:
    if not envs.get(_DIR):
        raise SchemeError(
            f"{_DIR} is not set: the process that reads the options makes the folder, and those "
            f"that it starts inherit the variable; expected it in this worker too"
        )
    return Path(envs.get(_DIR))


def _files() -> list[Path]:
    """The ranks' files; a folder that the user named may hold others."""
    found = _folder().glob("rank*.json")
    return sorted(path for path in found if path.stem.removeprefix("rank").isdecimal())


def write_figures(
    rank: int, samples: int, layers: dict[str, LayerFigures], totals: dict[str, int]
) -> None:
    """Replace this rank's file; a reader never sees half of one.

    ``totals`` has the numbers of layers "bits16" and "switched", and of "scale_updates".

    Raises:
        OSError: it cannot be written.
        SchemeError: this process knows no folder.
    """
    content = {
        "rank": rank,
        "samples": samples,
        **totals,
        "layers": {name: asdict(figures) for name, figures in layers.items() if figures.tokens},
    }
    write_json(_folder() / f"rank{rank}.json", content)


def read_figures() -> list[dict[str, Any]]:
    """The files of all ranks; none in a process that knows no folder: no monitor runs there."""
    figures: list[dict[str, Any]] = []
    if not envs.get(_DIR):
        return figures
    for path in _files():
        # a file may go while we look, when the server ends
        with suppress(FileNotFoundError):
            figures.append(json.loads(path.read_text()))
    return figures


class Collector:
    """Prometheus collector of the files."""

    def describe(self) -> list[Any]:
        """Nothing: names are known when there are figures."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family per metric; none before the first sample."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {name: GaugeMetricFamily for name, _ in (_AMAX, _BITS16, _SWITCHED)}
        families: dict[str, Any] = {}
        for content in read_figures():
            for (name, meaning), labels, value in _samples(content):
                if name not in families:
                    kind = kinds.get(name, CounterMetricFamily)
                    families[name] = kind(name, meaning, labels=list(labels))
                families[name].add_metric(list(labels.values()), value)
        yield from families.values()


def _samples(content: dict[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, str], float]]:
    """Metric, labels and value of everything in a rank's file; nothing for what was not seen."""
    rank = {"rank": str(content["rank"])}
    yield _SAMPLES, rank, content["samples"]
    yield _BITS16, rank, content["bits16"]
    yield _SWITCHED, rank, content["switched"]
    yield _SCALES, rank, content["scale_updates"]
    for layer, figures in content["layers"].items():
        labels = {"layer": layer, **rank}
        for field, metric in {"amax": _AMAX, **_COUNTERS}.items():
            if figures[field] is not None:
                yield metric, labels, figures[field]
