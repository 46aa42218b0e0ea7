# SPDX-License-Identifier: MIT
"""Soak requests accept right answers only; growth compares quarters; a signal ends the load."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import httpx
import pytest
from harness import soak
from harness.processes import own_mib, program, signals_as_exceptions
from harness.soak_requests import KINDS, Target, WrongAnswer

from oss_fused.errors import ServerError
from tests.harness.fake_soak_server import answer

SERVER = (sys.executable, str(Path(__file__).with_name("fake_soak_server.py")))


def target(handler) -> Target:
    client = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://s")
    return Target(client, "m", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_right_and_wrong_answers(kind) -> None:
    KINDS[kind](target(answer), random.Random(0))
    with pytest.raises(WrongAnswer):
        KINDS[kind](target(lambda request: httpx.Response(500)), random.Random(0))


def test_growth() -> None:
    assert soak.growth([1.0, 5, 9, 9, 9, 9, 10, 10]) == 1.0
    assert soak.growth([1.0]) == 0.0


def test_unbounded_plan_is_refused() -> None:
    with pytest.raises(ServerError, match="minutes"):
        soak.check(soak.SoakTest("m", minutes=1e9))


def test_signal_ends_the_load_and_keeps_what_was_measured(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(soak, "_SAMPLE_SECONDS", 0.2)
    plan = soak.SoakTest("m", minutes=5, concurrency=3, max_model_len=64, serve_command=SERVER)
    saved: list[dict] = []

    def save(report: dict) -> None:
        saved.append(report)
        if len(saved) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with signals_as_exceptions():
        result = soak.run(plan, tmp_path, lambda text: None, save)
    assert result["ended_by"] == "Terminated" and result["errors"] == []
    assert result["greedy_identical"] and set(result["requests"]) == set(KINDS)
    assert len(saved) == len(result["memory_mib"]) == 3 and "ended_by" not in saved[-1]
    sample = result["memory_mib"][-1]
    assert any(name.startswith("python") and size > 1 for name, size in sample.items())
    assert "Traceback" not in capfd.readouterr().err


def test_memory_is_sampled_in_time_when_the_first_client_has_ended(monkeypatch) -> None:
    monkeypatch.setattr(soak, "_SAMPLE_SECONDS", 0.25)
    monkeypatch.setattr(soak, "_sample", lambda *_: {"total": 1.0, "seconds": 0.0})

    def client(plan, target, tally, deadline, number, say) -> None:
        time.sleep(number)

    monkeypatch.setattr(soak, "_client", client)
    tally = soak._Tally()
    server = SimpleNamespace(check=lambda doing: None)
    plan = soak.SoakTest("m", minutes=1, concurrency=2)
    assert soak._load(plan, server, None, tally, print, lambda report: None) is None
    assert 3 <= len(tally.memory) <= 6


def test_memory_of_mapped_files_is_left_out() -> None:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    assert 0 < own_mib(os.getpid()) < pss
    assert own_mib(2**22 + 1) == 0


def test_a_program_is_named_by_its_command_line() -> None:
    # not this process: pytest-xdist gives its workers other titles
    code = "print('up', flush=True); input()"
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert program(child.pid) == Path(sys.executable).name
        child.communicate(b"\n")
    assert program(2**22 + 1) == ""
