# SPDX-License-Identifier: MIT
"""Ratios with spread, named figures, Markdown and chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import report, summary

from oss_fused import environment

METRICS = {f"{s}_{m}_ms": 1.0 for s in ("p50", "p95", "p99") for m in ("ttft", "tpot", "itl")}


def rows(*throughputs: tuple[str, int, int, float]) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm,
            "round": number,
            "repeat": 0,
            "concurrency": concurrency,
            "input_len": 8,
            "output_len": 4,
            "num_prompts": 2,
            "load_average": 9999.0,
            "figures": {
                "output_throughput": value,
                "total_token_throughput": value,
                "request_throughput": value,
                **METRICS,
            },
        }
        for arm, number, concurrency, value in throughputs
    ]


MEASURED = rows(
    *(("a", 0, 1, 10.0), ("b", 0, 1, 15.0), ("a", 1, 1, 20.0), ("b", 1, 1, 20.0)),
    *(("a", 0, 8, 10.0), ("b", 0, 8, 5.0), ("a", 1, 8, 10.0), ("b", 1, 8, 5.0)),
)


@pytest.fixture
def results() -> dict[str, Any]:
    arm = {
        "model": "m",
        "command": ["python", "-m", "x", "serve", "m"],
        "environment": {"X": "1"},
        "memory": {"checkpoint_bytes": 2**30, "weights_gib": 1.5, "kv_cache_tokens": 5000.0},
        "startup_seconds": [3.2, 4.0],
        "chat": {"endpoint": "/v1/chat/completions", "question": "Q?", "answer": "A `x`\nB"},
    }
    settings = {"rounds": 2, "repeats": 1, "together": False}
    return {
        "environment": environment.fingerprint() | {"gpus": []},
        "settings": settings,
        "arms": {"a": arm, "b": arm},
        "measurements": MEASURED,
        "cells": summary.condense(MEASURED, ["a", "b"]),
        "quality": None,
    }


def test_condense_pairs_runs_and_keeps_the_spread() -> None:
    one, eight = summary.condense(MEASURED, ["a", "b"])
    assert one["arms"]["a"] == {
        "figures": {
            **MEASURED[0]["figures"],
            **dict.fromkeys(
                ("output_throughput", "total_token_throughput", "request_throughput"), 15.0
            ),
        },
        "ratios": {},
    }
    ratio = one["arms"]["b"]["ratios"]["output_throughput"]
    assert ratio == {"median": 1.25, "min": 1.0, "max": 1.5, "values": [1.5, 1.0]}
    assert eight["arms"]["b"]["ratios"]["output_throughput"]["median"] == 0.5


def test_summary_is_merged_flat(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "summary.json"
    cells = summary.condense(MEASURED, ["a", "b"])
    cells.append({**cells[0], "input_len": 1024})
    named = summary.named_ratios(cells, "b", "main_job.x")
    assert list(named) == [
        "main_job.x.ratio_c1",
        "main_job.x.ratio_c8",
        "main_job.x.ratio_c1_1024x4",
    ]
    summary.merge_summary(path, {"other": 3}, tmp_path / "cpu" / "o.json")
    summary.merge_summary(path, named, tmp_path / "h200" / "x" / "results.json")
    known = json.loads(path.read_text())
    assert (known["other"], known["main_job.x.ratio_c1"]) == (3, 1.25)
    sources = json.loads(path.with_name("summary-sources.json").read_text())
    assert sources["main_job.x.ratio_c1"] == "x/results.json"
    assert sources["other"] == "../cpu/o.json" and sources.keys() == known.keys()
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected one JSON object, found list"):
        summary.merge_summary(path, named, path)


def test_report_has_figures_ratios_and_a_warning(results: dict[str, Any]) -> None:
    text = report.markdown(results)
    assert "**1.25x** for 1 x 8:4, **0.50x** for 8 x 8:4" in text
    assert "1.250 (1.000 to 1.500)" in text
    assert "| a | 1.00 | 1.50 | 5,000 | 3, 4 |" in text
    assert "`A 'x' B`" in text
    assert "`X=1 vllm serve m`" in text
    assert "Other programs were running" in text
    results["environment"]["gpus"] = [{"name": "H200"}]
    assert "Other programs were running" not in report.markdown(results)


def test_folder_is_written_whole_or_not_at_all(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("hello")
    report.write_folder(results, tmp_path / "out", logs)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "report.md", "chart.png", "server-logs.txt"}
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "hello" in (tmp_path / "out" / "server-logs.txt").read_text()
    monkeypatch.setattr(report, "draw_chart", lambda *a: (_ for _ in ()).throw(RuntimeError("x")))
    with pytest.raises(RuntimeError):
        report.write_folder(results, tmp_path / "other", logs)
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "out"}


def test_paths_of_this_machine_become_names() -> None:
    value = {"text": "/tmp/a/prose.txt", "models": ["a/x", "/tmp/w8", 3], "arm": "A= /t/m --o=/t/n"}
    expected = {"text": "prose.txt", "models": ["a/x", "w8", 3], "arm": "A= m --o=n"}
    assert environment.portable(value) == expected


def test_fingerprint_is_json_and_names_versions() -> None:
    found = json.loads(json.dumps(environment.fingerprint()))
    assert found["versions"]["torch"] and found["versions"]["oss-fused"]
    assert found["timestamp"].endswith("+00:00")
    assert found["oss_fused"].keys() >= {"OSS_FUSED_BACKEND"}
    assert "commit" in environment.describe(found)
