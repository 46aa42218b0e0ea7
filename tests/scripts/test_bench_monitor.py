# SPDX-License-Identifier: MIT
"""scripts/bench_monitor.py: what it makes of times and samples, and the engine's graphs."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import pytest

from tests.loading import load_script

ARGS = argparse.Namespace(every=50, tokens=100, rounds=2)


@pytest.fixture
def script(monkeypatch):
    module = load_script("bench_monitor")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return module


def monitor_of(script, monkeypatch, samples):
    """A monitor that takes so many samples in a run, each of which costs 10 ms."""
    monitor = SimpleNamespace(every=script.NEVER, statistics=SimpleNamespace(samples=0))

    def generate(engine, batch, tokens):
        taken = samples if monitor.every != script.NEVER else 0
        monitor.statistics.samples += taken
        return 1.0 + 0.01 * taken, [[1, 2]]

    monkeypatch.setattr(script, "generate", generate)
    return monitor


def test_the_cost_of_a_sample_is_the_difference_by_samples(script, monkeypatch):
    found = script.measure(None, monitor_of(script, monkeypatch, 2), 1, ARGS)
    assert found["samples_a_run"] == 2 and found["step_ms"] == 10.0
    assert found["sample_extra_ms"] == pytest.approx(10.0)
    assert found["cost_share_at_every_1000"] == pytest.approx(1e-3)


def test_a_run_without_samples_is_told(script, monkeypatch):
    with pytest.raises(SystemExit, match="no step was a sample; expected a smaller --every"):
        script.measure(None, monitor_of(script, monkeypatch, 0), 1, ARGS)


def test_each_batch_has_a_graph_of_its_size(script, monkeypatch):
    """A batch in the graph of a larger one would be timed with that one's kernels."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **options: options))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = script.start("m", [32, 8])
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [1, 8, 32]}
    assert options["max_num_seqs"] == 32
