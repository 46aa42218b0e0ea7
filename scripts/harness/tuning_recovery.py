# SPDX-License-Identifier: MIT
"""How much of the tuned speed a device reaches with another device's tiles: table and figures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from oss_fused.bench.report import Report
from oss_fused.tuning.tile_table import Entry, Recovery


def figures(found: Sequence[Recovery], source: str, device: str) -> dict[str, float]:
    """Figures of summary.json: the smallest share, and the geometric mean.

    Args:
        found: at least one shape.
        source: name of the device whose tiles were taken.
        device: name of the device that ran them.
    """
    shares = [recovery.share for recovery in found]
    name = f"tuning.{short_name(device)}_from_{short_name(source)}_recovery"
    return {name: min(shares), f"{name}_geomean": statistics.geometric_mean(shares)}


def short_name(device: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100"."""
    found = re.search(r"\b[A-Z]+\d+\b", device)
    return found.group().lower() if found else re.sub(r"[^a-z0-9]+", "_", device.lower())


def make_report(found: Sequence[Recovery], source: str, device: str) -> Report:
    """A row per shape, the worst first."""
    report = Report(f"Tiles of {source} on {device}")
    shares = [recovery.share for recovery in found]
    report.paragraph(
        f"Share of the tuned tile's speed: {min(shares):.1%} at worst, "
        f"{statistics.geometric_mean(shares):.1%} in the geometric mean of {len(found)} shapes."
    )
    header = ("rows x N x K", "share", "given, us", "tuned, us", "given", "tuned")
    rows = [
        (
            recovery.key,
            f"{recovery.share:.1%}",
            f"{1e3 * recovery.given_ms:.2f}",
            f"{1e3 * recovery.best_ms:.2f}",
            _tile(recovery.given),
            "as given" if recovery.best == recovery.given else _tile(recovery.best),
        )
        for recovery in sorted(found, key=lambda recovery: recovery.share)
    ]
    report.table(header, rows)
    return report


def _tile(entry: Entry) -> str:
    return " ".join([entry["kernel"], *(f"{k}={v}" for k, v in entry.items() if k != "kernel")])
