# SPDX-License-Identifier: MIT
"""scripts/bench_all_reduce.py: names of its figures."""

from __future__ import annotations

from tests.loading import load_script


def test_figures_of_other_columns_have_names_of_their_own():
    script = load_script("bench_all_reduce")
    rows = [{"tokens": 8, "ratio": 1.5}]
    assert script.figures(rows, 2, 2880) == {"all_reduce.ranks2.speedup_8": 1.5}
    assert script.figures(rows, 4, 4096) == {"all_reduce.ranks4.h4096.speedup_8": 1.5}
