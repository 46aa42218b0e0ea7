# SPDX-License-Identifier: MIT
"""harness.streaming: what is asked of the server, what is counted, and wrong answers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from harness import streaming

from oss_fused.errors import ServerError

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHORT, CUT, SLOW = (word in sys.argv for word in ("short", "cut", "slow"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        line = json.dumps({k: v for k, v in body.items() if k != "prompt"}) + "\\n"
        # one write: other threads print as well
        os.write(1, line.encode())
        assert body["ignore_eos"] and all(0 <= token < 50 for token in body["prompt"])
        usage = {"usage": {"completion_tokens": body["max_tokens"] - SHORT}}
        if not body.get("stream"):
            return self.reply(json.dumps(usage).encode())
        time.sleep(0.2 * SLOW)
        data = b'data: {"choices": []}\\n\\n' * body["max_tokens"]
        data += b"data: " + json.dumps(usage).encode() + b"\\n\\n"
        self.reply(data + b"data: [DONE]\\n\\n" * (not CUT))

    def reply(self, data):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def plan(tmp_path: Path) -> streaming.Plan:
    """Three requests of five tokens to a double of the server."""
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    (tmp_path / "server.py").write_text(SERVER)
    return streaming.Plan(
        model=str(tmp_path),
        requests=3,
        inputs=4,
        outputs=5,
        repeats=2,
        serve_command=(sys.executable, str(tmp_path / "server.py")),
    )


def with_flag(plan: streaming.Plan, flag: str) -> streaming.Plan:
    return streaming.Plan(**{**vars(plan), "serve_flags": [flag]})


def test_both_kinds_are_asked_alike_and_compared(plan: streaming.Plan, tmp_path: Path) -> None:
    result = streaming.run(with_flag(plan, "slow"), 50, tmp_path / "logs")
    kinds = [run["kind"] for run in result["runs"]]
    assert kinds == ["whole", "streamed", "streamed", "whole"]
    lines = (tmp_path / "logs" / "server.log").read_text().splitlines()
    bodies = [json.loads(line) for line in lines if line.startswith("{")]
    assert [body.get("stream", False) for body in bodies].count(True) == len(bodies) / 2 == 9
    assert {body["max_tokens"] for body in bodies} == {5}
    # the double waits 0.2 s before it streams 3 x 5 tokens
    assert result["tokens_per_s"]["streamed"] < 15 / 0.2
    rates = result["tokens_per_s"]
    assert result["ratio"] == round(rates["streamed"] / rates["whole"], 4) < 1


@pytest.mark.parametrize(
    ("flag", "message"), [("short", "has 4 tokens, expected 5"), ("cut", r"expected \[DONE\]")]
)
def test_an_answer_that_is_not_whole_is_an_error(
    plan: streaming.Plan, tmp_path: Path, flag: str, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        streaming.run(with_flag(plan, flag), 50, tmp_path / "logs")


def test_an_answer_that_does_not_come_is_an_error(
    plan: streaming.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(ServerError, match="a request failed: TimeoutError"):
        streaming.run(with_flag(plan, "slow"), 50, tmp_path / "logs")


def test_the_script_writes_its_figures(
    plan: streaming.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = streaming.Plan.__init__

    def with_double(self: streaming.Plan, **options: object) -> None:
        original(self, **{**options, "serve_command": plan.serve_command})

    monkeypatch.setattr(streaming.Plan, "__init__", with_double)
    script = str(ROOT / "scripts" / "bench_streaming.py")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(script, run_name="__main__")
        return int(stopped.value.code or 0)

    output, summary = tmp_path / "out.json", tmp_path / "summary.json"
    ended = subprocess.Popen(["true"])
    ended.wait()
    options = ["--requests", "2", "--lengths", "4:5", "--repeats", "1", "--output", str(output)]
    options += ["--after", str(ended.pid)]
    merge = ["--summary", str(summary), "--summary-prefix", "served.x"]
    assert run(str(tmp_path), *options, *merge) == 0
    written = json.loads(output.read_text())
    assert written["settings"]["requests"] == 2 and "versions" in json.dumps(written["environment"])
    assert json.loads(summary.read_text()) == {"served.x.streamed_ratio_c2": written["ratio"]}
    assert "tokens/s, ratio" in capsys.readouterr().out
    assert run(str(tmp_path / "none"), *options) == 2
    assert "no such folder; expected a checkpoint" in capsys.readouterr().err
