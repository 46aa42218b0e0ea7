# SPDX-License-Identifier: MIT
"""Child processes that end with this one; each has a process group, killed as a whole."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; raised so that every ``finally`` runs."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise Terminated, SIGINT raises KeyboardInterrupt.

    Once only: a second Ctrl-C must not interrupt the clean-up that the first one started.
    """
    wanted = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def stop_once(number: int, frame: FrameType | None) -> None:
        for other in wanted:
            signal.signal(other, signal.SIG_IGN)
        name = signal.Signals(number).name
        print(f"{name}: stopping, please wait", file=sys.stderr, flush=True)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(name)

    before = {number: signal.signal(number, stop_once) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    command: Sequence[str],
    log: IO[bytes],
    environment: Mapping[str, str],
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a process group of its own; stderr (and stdout) go to ``log``.

    Args:
        command: program and arguments.
        log: an open binary file.
        environment: the whole environment of the child.
        pipes: give the child pipes for stdin and stdout.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
        stdout=subprocess.PIPE if pipes else log,
        stderr=log,
        env=dict(environment),
        start_new_session=True,
        # the child gets SIGTERM if this process dies without cleaning up (SIGKILL, out of memory)
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )


def stop(process: subprocess.Popen[Any], patience: float = 15.0) -> None:
    """End the process, its group and all its descendants: SIGTERM, then SIGKILL."""
    family = [process.pid, *descendants(process.pid)]
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None and not any(is_alive(pid) for pid in family):
            break
        time.sleep(0.05)
    _signal_group(process.pid, signal.SIGKILL)
    for pid in family[1:]:
        if is_alive(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def descendants(pid: int) -> list[int]:
    """Process ids of all children, grandchildren, ... of ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue += (born := children.get(queue.pop(), []))
        found += born
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def wait_for_end(pid: int) -> None:
    """Return when the process, of whatever user or parent, has ended."""
    while is_alive(pid):
        time.sleep(0.25)


def own_mib(pid: int) -> float:
    """Memory in MiB, shared pages divided among their users; 0 if it has ended.

    Pages of mapped files (libraries) are left out: when a process elsewhere on the machine that
    maps them ends, the share of those who remain rises although nobody took memory.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(kinds)) / 1024


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process, and those that it starts later, on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def program(pid: int) -> str:
    """First word of the command line without its folder, such as ``VLLM::EngineCore``."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return Path(words[0].decode(errors="replace")).name


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
