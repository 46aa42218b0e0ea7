# SPDX-License-Identifier: MIT
"""scripts/bench_api_server.py, and the stand-in for the engine that it serves from."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import streaming
from harness.server import Server
from harness.stand_in_server import StandIn

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_api_server.py"


def request(name: str, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(max_tokens=tokens))


def test_the_stand_in_gives_each_request_a_token_every_step() -> None:
    pytest.importorskip("vllm")

    async def run() -> list[tuple[str, bool]]:
        stand_in = StandIn(0.01)
        for name, tokens in (("a", 2), ("b", 1), ("c", 5)):
            await stand_in.add_request_async(request(name, tokens))
        await stand_in.abort_requests_async(["c", "unknown"])
        steps = [await stand_in.get_output_async() for _ in range(2)]
        assert stand_in.outputs.empty() and not stand_in.left
        assert [step.scheduler_stats.num_running_reqs for step in steps] == [1, 0]
        return [(each.request_id, each.finished) for step in steps for each in step.outputs]

    assert asyncio.run(run()) == [("a", False), ("b", True), ("a", True)]


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(stopped.value.code or 0)


def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "o.json")]
    assert main(monkeypatch, "--requests", "2", *output) == 2
    assert "expected one per number of requests" in capsys.readouterr().err
    assert main(monkeypatch, "--output", "/proc/x/o.json") == 2
    assert main(monkeypatch, "--requests", "2", "--step-ms", "-1", *output) == 2
    assert "--step-ms: -1.0: expected a number above 0" in capsys.readouterr().err


def test_both_servers_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    asked = []

    def measure(plan: streaming.Plan, server: object, vocabulary: int) -> dict[str, object]:
        asked.append((plan.requests, plan.outputs))
        return {"runs": [], "tokens_per_s": {"whole": 2.0, "streamed": 1.0}, "ratio": 0.5}

    monkeypatch.setattr(streaming, "measure", measure)
    monkeypatch.setattr("harness.server.Server.wait_until_healthy", lambda self: 0.0)
    output = tmp_path / "o.json"
    options = ["--requests", "3", "--step-ms", "4", "--tokens", "5", "--output", str(output)]
    assert main(monkeypatch, *options) == 0
    written = json.loads(output.read_text())
    assert [row["arm"] for row in written["loads"]] == ["vllm", "oss_fp8"]
    assert asked == [(3, 5)] * 2 and written["loads"][0]["step_ms"] == 4.0


def test_a_signal_ends_the_run_and_keeps_the_loads_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(plan: streaming.Plan, server: Server, vocabulary: int) -> dict[str, object]:
        if server.name != "vllm":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return {"runs": [], "tokens_per_s": {"whole": 2.0, "streamed": 1.0}, "ratio": 0.5}

    monkeypatch.setattr(streaming, "measure", measure)
    monkeypatch.setattr(Server, "__enter__", lambda self: self)
    monkeypatch.setattr(Server, "wait_until_healthy", lambda self: 0.0)
    output = tmp_path / "o.json"
    assert main(monkeypatch, "--requests", "3", "--step-ms", "4", "--output", str(output)) == 130
    assert [row["arm"] for row in json.loads(output.read_text())["loads"]] == ["vllm"]
