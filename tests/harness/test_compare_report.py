# SPDX-License-Identifier: MIT
"""Comparisons: ratios with spread, the strongest baseline, named figures, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import compare_report, summary

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
        "chat": [{"endpoint": "/v1/chat/completions", "question": "Q?", "answer": "A `x`\nB"}],
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


def test_answers_stand_side_by_side(results: dict[str, Any]) -> None:
    """A question per row; earlier comparisons hold one question per arm."""
    one = {"endpoint": "/v1/completions", "question": "Q?", "answer": "B | C", "chat_error": "no"}
    results["arms"]["b"] = results["arms"]["b"] | {"chat": one}
    text = compare_report.make_report(results, draw=False).markdown()
    assert "| question | a | b |" in text
    assert "| Q? | `A 'x' B` (/v1/chat/completions) | `B / C` (/v1/completions) |" in text
    assert "b: chat was refused: no" in text
    results["arms"]["b"] = {**results["arms"]["b"], "chat": []}
    assert "| was not asked |" in compare_report.make_report(results, draw=False).markdown()


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
        "steady": True,
    }
    ratio = one["arms"]["b"]["ratios"]["output_throughput"]
    assert ratio == {"median": 1.25, "min": 1.0, "max": 1.5, "values": [1.5, 1.0]}
    assert eight["arms"]["b"]["ratios"]["output_throughput"]["median"] == 0.5


def test_a_run_far_above_its_warm_up_is_not_steady() -> None:
    measured = [timed(arm, 0, 4.0, 10.0) for arm in "abc"]
    for row, warm in zip(measured, (7.0, 8.0, None)):
        row["warm_up_ttft_ms"] = warm
    (cell,) = summary.condense(measured, ["a", "b", "c"], ["a", "b"])
    assert [cell["arms"][name]["steady"] for name in "abc"] == [False, True, True]
    # a warm-up compiles: it may be slower
    measured[0]["warm_up_ttft_ms"] = 900.0
    (cell,) = summary.condense(measured, ["a", "b", "c"], ["a", "b"])
    assert cell["arms"]["a"]["steady"]


def test_an_unsteady_baseline_may_be_the_best_one_once_it_is_warm() -> None:
    measured = [timed("a", 0, 3.0, 90.0), timed("b", 0, 4.0, 20.0), timed("c", 0, 1.5, 10.0)]
    measured[0]["warm_up_ttft_ms"] = 15.0
    (cell,) = summary.condense(measured, ["a", "b", "c"], ["a", "b"])
    assert cell["baselines"]["p50_ttft_ms"] == "b" and cell["arms"]["b"]["steady"]
    assert summary.named_ratios([cell], "c", "x") == {"x.tpot_ratio_c1": 2.0}


def timed(arm: str, number: int, tpot: float, ttft: float) -> dict[str, Any]:
    (row,) = rows((arm, number, 1, 10.0))
    row["figures"] |= {"p50_tpot_ms": tpot, "p50_ttft_ms": ttft}
    return row


def test_each_figure_meets_the_baseline_that_is_best_in_it() -> None:
    measured = [timed("a", 0, 4.0, 10.0), timed("b", 0, 3.0, 20.0), timed("c", 0, 1.5, 10.0)]
    (cell,) = summary.condense(measured, ["a", "b", "c"], ["a", "b"])
    assert cell["baselines"]["p50_tpot_ms"] == "b" and cell["baselines"]["p50_ttft_ms"] == "a"
    ratios = cell["arms"]["c"]["ratios"]
    # above 1 is better for times as well
    assert (ratios["p50_tpot_ms"]["median"], ratios["p50_ttft_ms"]["median"]) == (2.0, 1.0)
    assert cell["arms"]["a"]["ratios"] == cell["arms"]["b"]["ratios"] == {}


def test_an_unsteady_first_token_is_no_headline(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a baseline compiles while requests wait, its runs differ: no ratio is named of that."""
    measured = [timed("a", 0, 4.0, 90.0), timed("b", 0, 2.0, 10.0)]
    measured += [timed("a", 1, 4.0, 60.0), timed("b", 1, 2.0, 10.0)]
    cells = summary.condense(measured, ["a", "b"])
    assert [cells[0]["arms"][name]["steady"] for name in "ab"] == [False, True]
    assert summary.named_ratios(cells, "b", "x") == {"x.tpot_ratio_c1": 2.0}
    text = compare_report.make_report(results | {"cells": cells}, draw=False).markdown()
    assert "b, time per output token: **2.00x** for 1 x 8:4" in text
    assert "b, time to first token: not steady for 1 x 8:4" in text
    assert "Kernels may have been compiled" in text
    drawn: list[Any] = []
    monkeypatch.setattr(compare_report.charts, "groups", lambda *args, **_: drawn.append(args[1]))
    compare_report.make_report(results | {"cells": cells})
    assert drawn == [
        {"a": [4.0], "b": [2.0]},
        {"a": [None], "b": [10.0]},
        {"a": [None], "b": [10.0]},
    ]


def test_tokens_per_second_are_named_where_asked_for() -> None:
    cells = summary.condense(MEASURED, ["a", "b"])
    named = summary.named_ratios(cells[:1], "b", "spec.x", "speedup_b", "tokens_per_s_b")
    rate = cells[0]["arms"]["b"]["figures"]["output_throughput"]
    assert named["spec.x.speedup_b1"] == 1.25 and named["spec.x.tokens_per_s_b1"] == rate


def test_summary_is_merged_flat(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "summary.json"
    cells = summary.condense(MEASURED, ["a", "b"])
    cells.append({**cells[0], "input_len": 1024})
    named = summary.named_ratios(cells, "b", "main_job.x")
    kinds = ("tpot_ratio_c", "ttft_ratio_c", "ratio_c")
    loads = ("1", "8", "1_1024x4")
    least = named.pop("main_job.x.ttft_ratio_min")
    assert least == min(ratio for name, ratio in named.items() if ".ttft_" in name)
    assert list(named) == [f"main_job.x.{kind}{load}" for load in loads for kind in kinds]
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
    text = compare_report.make_report(results, draw=False).markdown()
    assert "time per output token: **1.00x** for 1 x 8:4, **1.00x** for 8 x 8:4" in text
    assert "1.25x (1.00 to 1.50)" in text
    assert text.index("time per output token") < text.index("GiB") < text.index("Throughput")
    assert "| a | 1.00 | 1.50 | 5,000 | 3, 4 |" in text and "KV cache GiB" not in text
    assert "`A 'x' B`" in text
    assert "`X=1 vllm serve m`" in text
    assert "Other programs were running" in text
    results["environment"]["gpus"] = [{"name": "H200"}]
    idle = compare_report.make_report(results, draw=False)
    assert "Other programs were running" not in idle.text()


def test_folder_is_written_whole_or_not_at_all(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("hello")
    compare_report.write_folder(results, tmp_path / "out", logs)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*compare_report.FILES, *compare_report.CHARTS}
    for name in compare_report.CHARTS:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/png") == 3
    assert "hello" in (tmp_path / "out" / "server-logs.txt").read_text()
    monkeypatch.setattr(compare_report, "_charts", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare_report.write_folder(results, tmp_path / "other", logs)
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "out"}


def test_paths_of_this_machine_become_names() -> None:
    value = {"text": "/tmp/a/prose.txt", "models": ["a/x", "/tmp/w8", 3], "arm": "A= /t/m --o=/t/n"}
    expected = {"text": "prose.txt", "models": ["a/x", "w8", 3], "arm": "A= m --o=n"}
    assert environment.portable(value) == expected


def test_the_commit_is_asked_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(environment, "_output", lambda *words: asked.append(words) or "abc")
    assert environment.commit() == "abc-dirty"
    assert all((Path(words[2]) / "pyproject.toml").is_file() for words in asked)


def test_fingerprint_is_json_and_names_versions() -> None:
    found = json.loads(json.dumps(environment.fingerprint()))
    assert found["versions"]["torch"] and found["versions"]["oss-fused"]
    assert found["timestamp"].endswith("+00:00")
    assert found["oss_fused"].keys() >= {"OSS_FUSED_BACKEND"}
    assert "commit" in environment.describe(found)


def test_equal_gpus_are_counted() -> None:
    found = environment.fingerprint()
    found["gpus"] = [{"name": name} for name in ("A", "A", "B")]
    assert environment.describe(found).startswith("host with 2 x A, B; ")
