# SPDX-License-Identifier: MIT
"""scripts/bench_kv_cache.py with stand-ins for the engines."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from harness import decode

from oss_fused.errors import ServerError
from tests.harness.test_decode import GPT_OSS, WORKER
from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    module = load_script("bench_kv_cache")
    fake = ROOT / "tests" / "harness" / "fake_kv_cache_worker.py"
    monkeypatch.setattr(module, "WORKER", (sys.executable, str(fake)))
    monkeypatch.setattr(
        decode, "DecodeBenchmark", functools.partial(decode.DecodeBenchmark, worker=WORKER)
    )
    return module


def run(script, tmp_path, name, *options):
    model = tmp_path / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(GPT_OSS))
    out, summary = tmp_path / "kv.json", tmp_path / "summary.json"
    common = ["--output", str(out), "--summary", str(summary), "--rounds", "1", "--name", "m"]
    status = script.main([str(model), "--contexts", "1024", "2048", *common, *options])
    figures = json.loads(summary.read_text()) if summary.is_file() else {}
    return status, json.loads(out.read_text()), figures


def test_measures_both_pairs(script, tmp_path, capsys):
    status, results, figures = run(script, tmp_path, "m", "--batches", "1", "4")
    assert status == 0 and "errors" not in results
    loads = [(c["batch"], c["context"], c["steps"]) for c in results["speed"]["cells"]]
    assert (4, 2048, 96) in loads and (1, 2048, 0) in loads and (1, 1024, 384) in loads
    # the stand-in is as fast with either cache
    assert figures == {"kv_fp8.m.speedup_2k": 1.0}
    flags = results["speed"]["arms"]["fp8"]["all_flags"]
    assert flags[flags.index("--kv-cache-dtype") + 1] == "fp8"
    assert [row["context"] for row in results["quality"]["fp8"]["prompts"]] == [1024] * 2 + [
        2048
    ] * 2
    assert "2.500e-01" in capsys.readouterr().err


def test_loads_that_do_not_fit_are_left_out(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MOST_POSITIONS", 4096)
    _, results, _ = run(script, tmp_path, "m", "--batches", "1", "4")
    loads = [(c["batch"], c["context"]) for c in results["speed"]["cells"] if c["steps"]]
    assert loads == [(1, 1024), (4, 1024), (1, 2048)]


def test_what_was_measured_is_written_when_the_other_pair_fails(script, tmp_path):
    status, results, figures = run(script, tmp_path, "wrong", "--batches", "1")
    assert status == 1 and results["errors"] == ["quality, bf16 cache: failed"]
    assert "quality" not in results and figures == {"kv_fp8.m.speedup_2k": 1.0}


def test_broken_engines_leave_the_divergence(script, tmp_path):
    status, results, figures = run(script, tmp_path, "broken", "--batches", "1")
    assert status == 1 and "speed" not in results and not figures
    assert results["quality"]["fp8"]["prompts"][0]["decode"]["kl"] == 0.25


def test_a_late_failure_and_a_signal_keep_the_loads_before_and_are_no_success(
    script, tmp_path, monkeypatch
):
    row = decode._row

    def fails(cause):
        def measure(plan, engine, cell, number):
            if cell.context == 2048:
                raise cause
            return row(plan, engine, cell, number)

        return measure

    for cause, message in (
        (ServerError("engine bf16: gone"), "engine"),
        (KeyboardInterrupt, "Key"),
    ):
        monkeypatch.setattr(decode, "_row", fails(cause))
        status, results, _ = run(script, tmp_path, "m", "--batches", "1")
        assert status == 1 and message in results["errors"][0]
        assert {cell["context"] for cell in results["speed"]["cells"]} == {1024}
        assert "quality" in results


def test_a_context_within_the_compared_tail_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(script, tmp_path, "m", "--contexts", "256")
    assert stopped.value.code == 2
    assert "--contexts 256: expected at least 257" in capsys.readouterr().err
