# SPDX-License-Identifier: MIT
"""Puts load on a server with `vllm bench serve` and returns its figures."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import processes
from harness.grid import Cell
from harness.server import Server
from oss_fused.errors import ServerError

CLIENT = (sys.executable, "-m", "harness.vllm_client")
# kept from the result of `vllm bench serve`; the rest is per-request detail
_KEPT = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = ("50", "95", "99")


def parse_result(raw: Mapping[str, Any]) -> dict[str, float]:
    """Figures of interest from the JSON of `vllm bench serve`, in tok/s and ms."""
    kept = {name: raw[name] for name in (*_KEPT, *_RATES) if name in raw}
    for metric in METRICS:
        for statistic in ("mean", *(f"p{p}" for p in PERCENTILES)):
            name = f"{statistic}_{metric}_ms"
            if name in raw:
                kept[name] = raw[name]
    return kept


class LoadClient:
    """The measuring process; use it in a ``with`` block. It starts while servers load.

    Args:
        folder: scratch folder for its log and its result files.
        environment: the whole environment of the process.
        command: program and arguments, see vllm_client.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = CLIENT,
    ) -> None:
        """See the class."""
        self.folder = folder
        self.log_path = folder / "client.log"
        self._command = command
        self._environment = dict(environment if environment is not None else os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def __enter__(self) -> LoadClient:
        """Start the process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = processes.start(self._command, log, self._environment, pipes=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        if self._process is not None:
            processes.stop(self._process, patience=2)
            self._process = None

    def run(
        self,
        server: Server,
        cell: Cell,
        seed: int,
        tokenizer: str,
        timeout: float = 1800.0,
        extra: Sequence[str] = (),
    ) -> dict[str, float]:
        """Load ``server`` with random prompts of fixed length and return the figures.

        Args:
            server: a healthy server.
            cell: the load.
            seed: of the prompts; the same seed gives the same prompts.
            tokenizer: folder of the tokenizer that makes the prompts.
            timeout: seconds for the whole measurement.
            extra: further arguments of `vllm bench serve`.

        Raises:
            ServerError: the server ended, requests failed, or the time is up.
        """
        if not self._ready:
            self._wait(server, time.monotonic() + 300, "starting")
            self._ready = True
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        arguments = self._arguments(server, cell, seed, tokenizer, result)
        assert self._process is not None and self._process.stdin is not None
        doing = f"under load ({cell.key})"
        try:
            self._process.stdin.write(json.dumps([*arguments, *extra]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ServerError(f"client: ended; see {self.log_path}") from error
        answer = self._wait(server, time.monotonic() + timeout, doing)
        server.check(doing)
        if "error" in answer:
            raise ServerError(
                f"server {server.name}: measuring failed {doing}: {answer['error']}\n"
                f"  client log: {self.log_path}\n{server.log_tail()}"
            )
        figures = parse_result(json.loads(result.read_text()))
        if figures.get("failed", 0) or figures["completed"] != cell.num_prompts:
            raise ServerError(
                f"server {server.name}: {figures['completed']:g} of {cell.num_prompts} requests "
                f"succeeded {doing}\n{server.log_tail()}"
            )
        return figures

    def _arguments(
        self, server: Server, cell: Cell, seed: int, tokenizer: str, result: Path
    ) -> list[str]:
        options: dict[str, object] = {
            "--backend": "openai",
            "--base-url": server.url,
            "--endpoint": "/v1/completions",
            "--model": server.model,
            "--served-model-name": server.name,
            "--tokenizer": tokenizer,
            "--dataset-name": "random",
            "--random-input-len": cell.input_len,
            "--random-output-len": cell.output_len,
            "--num-prompts": cell.num_prompts,
            "--max-concurrency": cell.concurrency,
            "--num-warmups": min(cell.concurrency, cell.num_prompts),
            "--seed": seed,
            "--temperature": 0,
            "--percentile-metrics": ",".join(METRICS),
            "--metric-percentiles": ",".join(PERCENTILES),
            "--result-dir": result.parent,
            "--result-filename": result.name,
        }
        # lengths are fixed: with random weights a text may end at once
        flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
        return [str(part) for pair in options.items() for part in pair] + flags

    def _wait(self, server: Server, deadline: float, doing: str) -> dict[str, Any]:
        """The client's next answer; raises if the server or the client ends, or the time is up."""
        assert self._process is not None and self._process.stdout is not None
        while time.monotonic() < deadline:
            if select.select([self._process.stdout], [], [], 0.25)[0]:
                line = self._process.stdout.readline()
                if line:
                    return dict(json.loads(line))
                server.check(doing)
                tail = self.log_path.read_text(errors="replace").splitlines()[-15:]
                raise ServerError("client: ended unexpectedly\n    " + "\n    ".join(tail))
            server.check(doing)
        raise ServerError(f"server {server.name}: no result in time {doing}\n{server.log_tail()}")
