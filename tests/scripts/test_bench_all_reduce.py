# SPDX-License-Identifier: MIT
"""scripts/bench_all_reduce.py: names of its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "scripts" / "bench_all_reduce.py"


def test_figures_of_other_columns_have_names_of_their_own():
    spec = importlib.util.spec_from_file_location("bench_all_reduce", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [{"tokens": 8, "ratio": 1.5}]
    assert script.figures(rows, 2, 2880) == {"all_reduce.ranks2.speedup_8": 1.5}
    assert script.figures(rows, 4, 4096) == {"all_reduce.ranks4.h4096.speedup_8": 1.5}
