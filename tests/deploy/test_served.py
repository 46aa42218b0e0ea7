# SPDX-License-Identifier: MIT
"""A real server as the container starts it: one for all tests, which the last one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import psutil
import pytest
import yaml
from harness import processes
from harness.server import free_port

from tests.deploy.conftest import API_KEY
from tests.deploy.test_monitoring import MONITORING, needs_prometheus, queries

pytestmark = pytest.mark.serve


def test_key_is_asked_for_and_never_shown(served) -> None:
    assert len(served.complete()["choices"]) == 1
    with pytest.raises(urllib.error.HTTPError, match="401"):
        served.complete(key=None)
    assert API_KEY not in served.server.log_text()
    # beyond vLLM's own guard: this one generates as well
    for path in ("/invocations", "/tokenize"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{served.server.url}{path}", b"{}", timeout=10)
    processes_of = [psutil.Process(served.server._process.pid)]
    processes_of += processes_of[0].children(recursive=True)
    assert not any(API_KEY in word for process in processes_of for word in process.cmdline())


def test_health_of_a_real_server(served) -> None:
    check = [sys.executable, str(served.image / "healthcheck.py")]
    assert subprocess.run(check, env=served.environment, check=False).returncode == 0
    without = {**served.environment, "SECRETS_DIR": "/nowhere"}
    assert subprocess.run(check, env=without, check=False).returncode == 1


def test_nothing_listens_beyond_loopback(served) -> None:
    pid = served.server._process.pid
    for process in map(psutil.Process, [pid, *processes.descendants(pid)]):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process, connection)


def ask(port: int, expr: str) -> list:
    text = urllib.parse.urlencode({"query": expr})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{text}", timeout=10) as r:
        return json.load(r)["data"]["result"]


@needs_prometheus
def test_every_query_has_data(served, tmp_path) -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "rules/*.yml")]
    targets = [f"127.0.0.1:{served.server.port}"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
    command.append(f"--storage.tsdb.path={tmp_path}/data")
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = processes.start(command, log, os.environ)
    try:
        pending = queries()
        deadline = time.monotonic() + 90
        while pending and time.monotonic() < deadline:
            served.complete()
            time.sleep(0.5)
            try:
                pending = [expr for expr in pending if not ask(port, expr)]
            except OSError:
                continue  # not up yet
    finally:
        processes.stop(prometheus)
    assert not pending, "\n".join(pending)


def test_stream_ends_before_the_server(served) -> None:
    """SIGTERM while a stream runs: all of its tokens, then the end, within the grace period."""
    body = {"model": "tiny", "prompt": [3, 17, 42], "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "stream": True, "return_token_ids": True}
    process = served.server._process
    with served.ask(body) as stream:
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
