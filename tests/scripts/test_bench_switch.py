# SPDX-License-Identifier: MIT
"""scripts/bench_switch.py without engines: what it writes, and when it fails."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from tests.loading import load_script

TOKENS = {"before": [1, 2], "switched": [4, 5]}


@pytest.fixture
def script(monkeypatch):
    module = load_script("bench_switch")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return module


def without_engines(script, monkeypatch, answers):
    """Have ``answers`` of the functions that run in other processes."""

    def submit(function, *arguments):
        answer = answers[function.__name__]
        return SimpleNamespace(result=answer if callable(answer) else lambda: answer)

    pool = contextlib.nullcontext(SimpleNamespace(submit=submit))
    monkeypatch.setattr(script, "processes", lambda count: pool)


@pytest.mark.parametrize(
    ("switched", "restarted", "status"),
    [(8, [4, 5], 0), (8, [4, 6], 1), (0, [4, 5], 1)],
)
def test_tokens_must_be_those_of_a_restart(
    switched, restarted, status, script, tmp_path, monkeypatch
):
    answers = {
        "make": tmp_path,
        "before_and_after": {"switched_layers": switched, "ms_after": 1.0, "tokens": TOKENS},
        "restarted": {"ms_restarted": 2.0, "tokens": restarted},
    }
    without_engines(script, monkeypatch, answers)
    assert script.main(["--output", str(tmp_path / "switch.json")]) == status
    results = json.loads((tmp_path / "switch.json").read_text())
    assert results["same_tokens_as_restart"] == (restarted == [4, 5])
    assert results["ms_after"] == 1.0 and results["ms_restarted"] == 2.0
    assert "tokens" not in results and not results["same_tokens_as_before"]


def test_no_times_are_taken_while_the_first_engine_has_the_device(
    script, tmp_path, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(script, "PATIENCE", 0)
    monkeypatch.setattr(script, "start", lambda *_: "engine")
    monkeypatch.setattr(script, "request", asked.append)
    monkeypatch.setattr(script, "fastest", lambda engine: (2.0, [4, 5]))

    def restart():
        return script.restarted(tmp_path, 1, tmp_path)

    measured = {"switched_layers": 4, "ms_after": 1.0, "tokens": dict(TOKENS)}
    answers = {"make": tmp_path, "before_and_after": measured, "restarted": restart}
    without_engines(script, monkeypatch, answers)
    output = tmp_path / "switch.json"
    assert script.main(["--output", str(output)]) == 1
    assert capsys.readouterr().err.startswith("error: the first engine was still timing after 0 s")
    assert not asked and "ms_restarted" not in json.loads(output.read_text())
    (tmp_path / script.MEASURED).touch()
    assert restart() == {"ms_restarted": 2.0, "tokens": [4, 5]} and asked == ["engine"]
