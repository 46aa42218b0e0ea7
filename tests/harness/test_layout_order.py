# SPDX-License-Identifier: MIT
"""Predicted against measured orders of access: the comparison itself, on made-up times."""

from __future__ import annotations

import pytest
import torch
from harness import layout_order

from oss_fused.analysis.access import MemoryAccessAnalyzer


def row(pattern, traffic, ns, family="gather"):
    samples = [ns * (1 + 0.001 * (i % 5)) for i in range(20)]
    predicted = {"traffic": traffic}
    return {"family": family, "pattern": pattern, "predicted": predicted, "samples_ns": samples}


def test_orders_that_differ_are_compared_and_only_those():
    rows = [
        row("fast", 1.0, 1.0),
        row("slow", 2.0, 3.0),
        row("as slow", 2.05, 3.1),
        row("misjudged", 8.0, 2.0),
        row("elsewhere", 99.0, 0.1, family="copy"),
    ]
    pairs = layout_order.orders(rows)
    told = {tuple(p["pair"]): (p["slower"], p["predicted"], p["agrees"]) for p in pairs}
    assert told == {
        ("fast", "slow"): ("slow", "slow", True),
        ("fast", "as slow"): ("as slow", "as slow", True),
        ("fast", "misjudged"): ("misjudged", "misjudged", True),
        ("slow", "misjudged"): ("slow", "misjudged", False),
        ("as slow", "misjudged"): ("as slow", "misjudged", False),
    }
    assert layout_order.agreement(pairs) == 0.6
    with pytest.raises(ValueError, match="no two patterns"):
        layout_order.agreement([])
    (tie,) = layout_order.orders([row("a", 1.0, 1.0), row("b", 1.01, 2.0)])
    assert (tie["predicted"], tie["agrees"]) == ("same", False)


def test_every_case_reads_what_it_says():
    base = torch.arange(32 * 768.0)
    analyzer = MemoryAccessAnalyzer(4, 64)
    seen = {}
    for family, name, accesses, predicted, call in layout_order.cases(base, 768, analyzer):
        seen[family, name] = (call().flatten().clone(), accesses, predicted)
    views = layout_order.views(base, 768)
    assert len(views) == 7 and len(seen) == 15
    for name, view in views.items():
        for family in ("gather", "copy"):
            read, accesses, predicted = seen[family, name]
            assert torch.equal(read, view.flatten()) and accesses == view.numel() == 768
            assert predicted["traffic"] == analyzer.tensor_traffic(view)
    assert seen["gather", "random gather"][2]["pattern_type"] == "random"


def test_cold_times_are_times():
    seen = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    times = layout_order.cold_times(calls, 2, torch.device("cpu"))
    assert [len(one) for one in times] == [2, 2] and min(times[0] + times[1]) > 0
    assert seen == ["a", "b"] * 3, "in turn, after a first call each"
