# SPDX-License-Identifier: MIT
"""What the expert benchmark makes of its measurements."""

from __future__ import annotations

import pytest
from harness import moe_cases


def row(batch: int, fp8: bool = False, passed: bool = True) -> dict:
    parts = dict.fromkeys(("route", "gate_up", "down", "combine", "layer", "experts"), 10.0)
    return {
        "batch": batch,
        "fp8_activations": fp8,
        "touched_experts": 4.0,
        "error": 1e-3,
        "passed": passed,
        "us": parts,
        "of_copy": dict.fromkeys(("gate_up", "down", "experts"), 0.5),
        "baselines": {"baseline": {"us": 20.0, "error": 3e-3}, "other": {"failure": "E: no"}},
        "speedup": 2.0,
    }


def test_figures_are_of_right_results_with_exact_activations():
    results = [row(1), row(32, passed=False), row(128), row(128, fp8=True), row(256)]
    named = {"moe.b1.bandwidth": 0.5, "moe.b128.bandwidth": 0.5}
    assert moe_cases.figures(results, 32) == named
    # those of another model are not merged over these
    assert moe_cases.figures(results[:1], 128) == {"moe.e128.b1.bandwidth": 0.5}


def test_line_names_baselines_and_failures():
    text = moe_cases.line(row(8, passed=False))
    for part in ("WRONG", "baseline 20.0", "other: E: no", "x2.00"):
        assert part in text


def test_fp8_is_measured_where_arithmetic_is_the_limit():
    assert moe_cases.variants([1, 256]) == [(1, False), (256, False), (256, True)]


def test_results_before_a_failure_are_kept(monkeypatch):
    def measure(tokens, *_):
        if tokens == 8:
            raise RuntimeError("out of memory")
        return row(tokens)

    monkeypatch.setattr(moe_cases, "measure", measure)
    monkeypatch.setattr(moe_cases, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(moe_cases, "random_layer", lambda experts, seed: None)
    kept = []
    with pytest.raises(RuntimeError, match="out of memory"):
        moe_cases.run([1, 8], 32, 1, 1, lambda layers: {}, lambda text: None, kept.append)
    assert [r["batch"] for r in kept[-1]["results"]] == [1]
    assert kept[-1]["figures"] == {"moe.b1.bandwidth": 0.5} and kept[-1]["experts"] == 32
