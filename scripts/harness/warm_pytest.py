# SPDX-License-Identifier: MIT
"""Runs of pytest that share the import of torch, transformers and vLLM.

The imports take longer than most tests. This file, run as a program, imports once. It then reads a
request per line from its input, runs it in a fork of itself and prints the exit code. A request is
JSON: {"arguments": [...], "folder": working folder, "log": file, "timeout": seconds}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMED_OUT = 124


class WarmPytest:
    """A process that runs pytest on request, one run at a time."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, which imports ``modules``; ``environment`` is added to this one's."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], folder: Path, timeout: int) -> tuple[int, str]:
        """Exit code (``TIMED_OUT`` for none in time) and output of pytest in ``folder``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        log = folder / "pytest.log"
        request = {"arguments": list(arguments), "folder": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(request | {"timeout": timeout}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, log.read_text()

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


def serve(modules: Sequence[str]) -> None:
    """Import ``modules``, those that there are, and answer requests until the input ends."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(f"{_in_fork(**json.loads(line))}\n")
        answers.flush()


def _in_fork(arguments: list[str], folder: str, log: str, timeout: int) -> int:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _run(arguments, folder, log)
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        os.killpg(child, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return TIMED_OUT if killed.is_set() else os.waitstatus_to_exitcode(status)


def _run(arguments: list[str], folder: str, log: str) -> None:
    """Run pytest in this process and end it."""
    import pytest

    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.chdir(folder)
        sys.path[:0] = [folder]
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are not top-level ones
    serve(sys.argv[1:])
