# SPDX-License-Identifier: MIT
"""A `vllm serve` process: start, wait until healthy, ask, read its log, stop it always."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import processes
from oss_fused.errors import ServerError

HOST = "127.0.0.1"
# GPU hosts may lack the `vllm` command; the module is always there
VLLM_SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
# what the log says, by name; the last match counts
_LOG_FIGURES = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_cache_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "kv_cache_reserved_gib": re.compile(r"reserved ([\d.]+) GiB memory for KV Cache"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
}
_ERROR_LINE = re.compile(r"(Error|Exception)\b.*:|\bKilled\b|out of memory", re.IGNORECASE)


def free_port() -> int:
    """A TCP port of the loopback interface that no process uses at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Refuse a port that is taken.

    Raises:
        ServerError: somebody listens on it, or it cannot be bound.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port}: cannot be used ({error.strerror}); another server may be running: "
                "stop it, choose another --port, or leave --port out for a free one"
            ) from error


class Server:
    """One server; use it in a ``with`` block, which starts it and always stops it.

    Args:
        name: the arm, and the name under which the model is served.
        model: checkpoint folder (or hub name).
        flags: further flags of `vllm serve`.
        log_path: file that receives its output (appended).
        environment: the whole environment of the server.
        port: TCP port; a free one if None.
        command: program and arguments that the model and flags are appended to.
        startup_timeout: seconds until healthy.
    """

    def __init__(
        self,
        name: str,
        model: str,
        flags: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        command: Sequence[str] = VLLM_SERVE,
        startup_timeout: float = 900.0,
    ) -> None:
        """See the class."""
        self.name = name
        self.model = model
        self.port = port if port is not None else free_port()
        self.startup_timeout = startup_timeout
        self.startup_seconds: float | None = None
        self.log_path = log_path
        self.command = [*command, model, "--host", HOST, "--port", str(self.port)]
        self.command += ["--served-model-name", name, *flags]
        self._environment = dict(environment if environment is not None else os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._busy_loops: list[subprocess.Popen[bytes]] = []
        self._log_start = 0
        self._started = 0.0

    @property
    def url(self) -> str:
        """Base address of the server."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Server:
        """Start the process; it becomes healthy later, see ``wait_until_healthy``."""
        check_port(self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._started = time.monotonic()
            self._process = processes.start(self.command, log, self._environment)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the whole process group."""
        self.stop()

    def stop(self) -> None:
        """End the server and everything it started; harmless when it has ended already."""
        while self._busy_loops:
            processes.stop(self._busy_loops.pop(), patience=2)
        if self._process is not None:
            processes.stop(self._process)
            self._process = None

    def share_core(self, core: int) -> None:
        """Pin the engine process, or each of several, and a busy loop to ``core``.

        Raises:
            ServerError: the server has no process named EngineCore.
        """
        pids = processes.descendants(self._process.pid) if self._process else []
        engines = [pid for pid in pids if "EngineCore" in processes.program(pid)]
        if not engines:
            raise ServerError(f"server {self.name}: has no process named EngineCore to pin")
        with self.log_path.open("ab") as log:
            loop = processes.start([sys.executable, "-c", "while True: pass"], log, os.environ)
        self._busy_loops.append(loop)
        for pid in (loop.pid, *engines):
            processes.pin(pid, core)

    def check(self, doing: str) -> None:
        """Raise if the process has ended.

        Raises:
            ServerError: with its exit status and the tail of its log.
        """
        if self._process is None:
            raise ServerError(f"server {self.name}: is not running ({doing})")
        status = self._process.poll()
        if status is not None:
            raise ServerError(
                f"server {self.name}: ended with status {status} {doing}\n"
                f"  command: {shlex.join(self.command)}\n{self.log_tail()}"
            )

    def memory_mib(self) -> dict[str, float]:
        """MiB of the server and each process it started, as ``processes.own_mib`` counts."""
        if self._process is None:
            return {}
        pids = [self._process.pid, *processes.descendants(self._process.pid)]
        return {f"{processes.program(pid)} {pid}": processes.own_mib(pid) for pid in pids}

    def wait_until_healthy(self) -> float:
        """Wait for /health; return the seconds since the start.

        Raises:
            ServerError: it ended, or the time is up; the message has the tail of its log.
        """
        while not self.is_healthy():
            time.sleep(0.25)
        assert self.startup_seconds is not None
        return self.startup_seconds

    def is_healthy(self) -> bool:
        """Whether /health has answered; the first answer sets ``startup_seconds``.

        Raises:
            ServerError: it ended, or the time is up; the message has the tail of its log.
        """
        if self.startup_seconds is not None:
            return True
        self.check("before it was healthy")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/health", None, 5),
        ):
            self.startup_seconds = time.monotonic() - self._started
            return True
        if time.monotonic() > self._started + self.startup_timeout:
            raise ServerError(
                f"server {self.name}: not healthy after {self.startup_timeout:g} s "
                f"(--startup-timeout)\n  command: {shlex.join(self.command)}\n{self.log_tail()}"
            )
        return False

    def ask(self, question: str, max_tokens: int = 48) -> dict[str, Any]:
        """Ask over the OpenAI API: chat, or plain completion where chat cannot be had.

        gpt-oss chat goes through the harmony encoding, which is fetched from the network.

        Returns:
            "endpoint", "question", "answer", and "chat_error" if chat was refused.

        Raises:
            ServerError: neither endpoint answers.
        """
        common = {"model": self.name, "max_tokens": max_tokens, "temperature": 0.0}
        endpoint = "/v1/chat/completions"
        result: dict[str, Any] = {"question": question}
        try:
            body = common | {"messages": [{"role": "user", "content": question}]}
            message = self._post(endpoint, body)["choices"][0]["message"]
            answer = message.get("content") or message.get("reasoning") or ""
        except ServerError as error:
            self.check("while answering a chat message")
            result["chat_error"] = str(error)
            endpoint = "/v1/completions"
            answer = self._post(endpoint, common | {"prompt": question})["choices"][0]["text"]
        return result | {"endpoint": endpoint, "answer": answer}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise ServerError(
                f"server {self.name}: {path} answered {error.code}: {detail}"
            ) from error
        except (OSError, ValueError) as error:
            self.check(f"while answering {path}")
            raise ServerError(f"server {self.name}: {path} gave no answer: {error}") from error

    def log_text(self) -> str:
        """What the process has written since its start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def log_figures(self) -> dict[str, float]:
        """Memory figures that vLLM reports in its log (absent where it does not)."""
        text, found = self.log_text(), {}
        for name, pattern in _LOG_FIGURES.items():
            values = pattern.findall(text)
            if values:
                found[name] = float(values[-1].replace(",", ""))
        return found

    def log_tail(self, lines: int = 30) -> str:
        """First errors and last lines of the log, indented; vLLM's cause often lies far up."""
        everything = self.log_text().splitlines()
        errors = [line for line in everything[:-lines] if _ERROR_LINE.search(line)][:5]
        shown = [*errors, "[...]"] if errors else []
        shown += everything[-lines:] or ["(empty)"]
        return "\n".join([f"  log ({self.log_path}):", *(f"    {line[:300]}" for line in shown)])
