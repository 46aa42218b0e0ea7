# SPDX-License-Identifier: MIT
"""The container's entry point, run as the container runs it (no Docker daemon needed)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from harness import processes

from tests.deploy.conftest import ROOT, container
from tests.deploy.hostile import make, make_bases


@pytest.mark.parametrize(
    "flags", [["--shutdown-timeout", "3"], ["--shutdown_timeout=3"], ["--config", "CONFIG"]]
)
def test_what_the_user_says_stays(entrypoint, tmp_path, flags) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("shutdown_timeout: 3\nport: 9\napi-key: [k]\n")
    flags = [flag.replace("CONFIG", str(config)) for flag in flags]
    if "--config" not in flags:
        os.environ["AUTH"] = "off"
    entrypoint.main(["m", *flags, "--host", "::1"])
    (command,) = entrypoint.started
    assert str(entrypoint.shutdown_seconds()) not in command
    assert command.count("--host") == 1 and ("--port" in command) == ("--config" not in flags)


def test_stop_ends_the_pre_flight(image, tmp_path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(image / "entrypoint.py", tmp_path)
    child = tmp_path / "pid"
    (tmp_path / "scripts/doctor.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(child)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"AUTH": "off", "SERVER_FILE": str(tmp_path / "server.json")}
    command = [sys.executable, str(tmp_path / "entrypoint.py"), "m"]
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 30
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        # 128 + SIGTERM: its own answer, since process 1 has no default one
        assert process.wait(timeout=10) == 143
    assert not processes.is_alive(int(child.read_text()))


@pytest.mark.serve
def test_stream_ends_before_the_server(image, tmp_path) -> None:
    """SIGTERM while a stream runs: all of its tokens, then the end, within the grace period."""
    variables = {"AUTH": "off", "DOCTOR": "off", "GRACE_PERIOD": "60"}
    body = {"model": "tiny", "prompt": [3, 17, 42], "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "stream": True, "return_token_ids": True}
    with container(image, tmp_path, ["--max-model-len", "512"], **variables) as server:
        server.wait_until_healthy()
        process = server._process
        url, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as stream:
            first = stream.readline()
            process.terminate()
            begin = time.monotonic()
            lines = [first, *(line for line in stream if line.strip())]
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - begin < 60
    assert lines[-1].strip() == b"data: [DONE]"
    answers = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
    assert sum(len(answer["token_ids"] or []) for answer in answers) == 300
    assert [answer["finish_reason"] for answer in answers if answer["finish_reason"]] == ["length"]


def test_arguments_of_the_pre_flight(entrypoint) -> None:
    flags = ["--quantization=oss_fp8", "--max_model_len", "64", "--seed", "1", "-tp", "2"]
    assert entrypoint.doctor_flags(flags) == [
        "--quantization",
        "oss_fp8",
        "--tensor-parallel-size",
        "2",
        "--max-model-len",
        "64",
    ]
    assert entrypoint.doctor_flags(["--quantization", "fp8", "--max-model-len", "32k"]) == []
    assert entrypoint.main(["--seed"]) == 2


@pytest.mark.serve
def test_nothing_listens_beyond_loopback(served) -> None:
    pid = served.server._process.pid
    for process in map(psutil.Process, [pid, *processes.descendants(pid)]):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process, connection)


@pytest.mark.serve
def test_bad_checkpoint_keeps_the_container_from_serving(image, tmp_path) -> None:
    folder = make("scale_zero", make_bases(tmp_path), tmp_path)
    done = subprocess.run(
        [sys.executable, str(image / "entrypoint.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTH": "off", "SERVER_FILE": f"{tmp_path}/s"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "not fit: checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
