# SPDX-License-Identifier: MIT
"""The server on vLLM's /metrics: versions and settings that it runs, its start, its memory."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from oss_fused import __version__, envs
from oss_fused.environment import version
from oss_fused.quant.settings import ServingOptions

# of the served model, where it is oss_fp8
_options: ServingOptions | None = None


def show_options(options: ServingOptions) -> None:
    """Name ``options`` in the labels from now on."""
    global _options
    _options = options


def labels() -> dict[str, str]:
    """Label -> value of ``oss_fused:build_info``, which itself is always 1.

    ``options`` lists those that choose code paths and are not at their default; it is empty where
    the model is not oss_fp8.
    """
    changed = _options.model_dump(exclude_defaults=True) if _options else {}
    paths = [f"{k}={v}" for k, v in sorted(changed.items()) if not k.startswith("monitor_")]
    return {
        "version": __version__,
        "vllm": version("vllm") or "",
        "torch": version("torch") or "",
        "backend": envs.shown("OSS_FUSED_BACKEND"),
        "options": ", ".join(paths) or ("defaults" if _options else ""),
    }


def server_pid() -> int:
    """Process of `vllm serve`: this one, or the one that started this API server."""
    parent = multiprocessing.parent_process()
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def anonymous_bytes(pid: int) -> int:
    """Memory that a process and all that it started hold for themselves, without mapped files."""
    total = 0
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        started = psutil.Process(pid).children(recursive=True)
    for each in (pid, *(process.pid for process in started)):
        with suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text()
            # processes that end have no such line
            found = re.search(r"^RssAnon:\s*(\d+) kB", status, re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


class ServerCollector:
    """Prometheus collector of what the server is, alike in each of its API servers."""

    def describe(self) -> list[Any]:
        """Nothing: all is read when asked for."""
        return []

    def collect(self) -> Iterator[Any]:
        """Versions and settings, start, memory."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        pid = server_pid()
        yield InfoMetricFamily("oss_fused:build", "Versions and settings of this server", labels())
        start = psutil.Process(pid).create_time()
        yield GaugeMetricFamily("oss_fused:start_time_seconds", "Start, in Unix time", start)
        memory = anonymous_bytes(pid)
        yield GaugeMetricFamily("oss_fused:memory_bytes", "Memory of all its processes", memory)


def register_collectors(*collectors: Any) -> None:
    """Have /metrics show ``collectors``, with one API server and with several; once a process.

    With several, vLLM serves a registry of its own that holds a MultiProcessCollector alone:
    values of all processes, which Prometheus' client has for counters and gauges only.
    """
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    for collector in collectors:
        REGISTRY.register(collector)
    shared: Any = MultiProcessCollector
    theirs = shared.collect

    @functools.wraps(theirs)
    def collect(self: Any) -> Iterator[Any]:
        yield from theirs(self)
        for collector in collectors:
            yield from collector.collect()

    shared.collect = collect
