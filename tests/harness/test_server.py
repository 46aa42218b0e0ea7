# SPDX-License-Identifier: MIT
"""A server's life: healthy, refused port, death at start and under load, clean-up of everything."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.processes import descendants, is_alive
from harness.server import Server, check_port, free_port

from oss_fused.errors import ServerError
from tests.harness.conftest import FAKE_SERVE


def make(tmp_path: Path, mode: str = "ok", **options: object) -> Server:
    environment = {**os.environ, "FAKE_MODE": mode, "FAKE_PIDS": str(tmp_path / "pids")}
    arguments = {"command": FAKE_SERVE, "environment": environment, "startup_timeout": 20.0}
    return Server("arm", "/m", ["--x"], tmp_path / "arm.log", **{**arguments, **options})


def test_healthy_answers_and_stops(tmp_path: Path) -> None:
    with make(tmp_path) as server:
        assert server.wait_until_healthy() < 20
        answer = server.ask("Capital of France?")
        assert answer["answer"] == "arm: Paris"
        assert answer["endpoint"] == "/v1/chat/completions"
        figures = server.log_figures()
    assert figures == {"weights_gib": 12.5, "kv_cache_gib": 100.25, "kv_cache_tokens": 1234567.0}
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_an_engine_shares_its_core(tmp_path: Path) -> None:
    """Engine and busy loop on one core; the loop ends with the server; no engine is an error."""
    core = max(os.sched_getaffinity(0))
    with make(tmp_path, "engine") as server:
        server.wait_until_healthy()
        assert server._process is not None
        (engine,) = descendants(server._process.pid)
        server.share_core(core)
        (loop,) = (busy.pid for busy in server._busy_loops)
        assert os.sched_getaffinity(engine) == os.sched_getaffinity(loop) == {core}
        assert os.sched_getaffinity(server._process.pid) != {core}
    assert not is_alive(loop) and not is_alive(engine)
    with make(tmp_path) as server, pytest.raises(ServerError, match="arm: has no process named"):
        server.wait_until_healthy()
        server.share_core(core)


def test_falls_back_to_completion_and_says_why(tmp_path: Path) -> None:
    with make(tmp_path, "no_chat") as server:
        server.wait_until_healthy()
        answer = server.ask("Capital?")
    assert (answer["answer"], answer["endpoint"]) == (" Paris", "/v1/completions")
    assert "400" in answer["chat_error"] and "no chat here" in answer["chat_error"]


def test_death_at_start_shows_status_command_and_cause(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="arm: ended with status 4 before it was") as caught,
        make(tmp_path, "dies_at_start") as server,
    ):
        server.wait_until_healthy()
    message = str(caught.value)
    assert "serve /m --host 127.0.0.1" in message
    assert "trace 49" in message
    # the cause is further up than the tail reaches
    assert "out of paper" in message and "trace 1\n" not in message


def test_never_healthy_times_out_and_is_stopped(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"not healthy after 1\.5 s \(--startup-timeout\)"),
        make(tmp_path, "never_healthy", startup_timeout=1.5) as server,
    ):
        server.wait_until_healthy()
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port}: cannot be used"):
            check_port(port)
        with pytest.raises(ServerError, match="choose another --port"), make(tmp_path, port=port):
            pytest.fail("must not start")
    assert not (tmp_path / "arm.log").exists()
    check_port(free_port())


def test_stubborn_server_and_its_stray_child_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import processes

    monkeypatch.setattr(processes.stop, "__defaults__", (0.5,))
    with make(tmp_path, "stubborn") as server:
        server.wait_until_healthy()
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(is_alive(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(is_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def test_a_second_signal_does_not_interrupt_the_clean_up() -> None:
    from harness.processes import Terminated, signals_as_exceptions

    before = signal.getsignal(signal.SIGINT)
    cleaned = False
    with pytest.raises(Terminated, match="SIGTERM"), signals_as_exceptions():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is before


OWNER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from harness.processes import signals_as_exceptions
from harness.server import Server
import time
with signals_as_exceptions():
    with Server("arm", "/m", [], Path({log!r}), command={command!r}) as server:
        server.wait_until_healthy()
        print("up", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killing_the_owner_ends_the_server(tmp_path: Path, number: signal.Signals) -> None:
    root = str(Path(__file__).resolve().parents[2])
    code = OWNER.format(root=root, log=str(tmp_path / "log"), command=FAKE_SERVE)
    environment = {**os.environ, "FAKE_PIDS": str(tmp_path / "pids")}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        (pid,) = [int(word) for word in (tmp_path / "pids").read_text().split()]
        owner.send_signal(number)
        assert owner.wait(timeout=20) != 0
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and is_alive(pid):
            time.sleep(0.05)
        assert not is_alive(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()
        owner.communicate()
