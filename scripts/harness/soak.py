# SPDX-License-Identifier: MIT
"""Keeps a server under mixed load for a while and watches errors, memory and determinism."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.arms import CPU_ENVIRONMENT
from harness.processes import Terminated
from harness.server import VLLM_SERVE, Server
from harness.soak_requests import KINDS, Target, greedy
from oss_fused.environment import gpu_used_mib, has_gpu
from oss_fused.errors import ServerError

_SAMPLE_SECONDS = 5.0
# a request that takes longer is an error; generous for a CPU that others use as well
_PATIENCE_SECONDS = 900.0
_DRAIN_SECONDS = 30.0
# how long clients may finish their requests when the load ends
_STOP_SECONDS = 30.0
# a weak model fills its JSON with blanks up to the last token
_NO_BLANKS = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'


@dataclass(frozen=True)
class SoakTest:
    """One soak test.

    Attributes:
        model: checkpoint folder.
        minutes: how long the load lasts.
        max_requests: the load ends earlier after so many.
        concurrency: clients at once.
        max_model_len: context of the server, in tokens.
        serve_flags: further flags of `vllm serve`.
        seed: of the mix.
        serve_command: replaced in tests.
    """

    model: str
    minutes: float
    max_requests: int = 100_000
    concurrency: int = 4
    max_model_len: int = 1024
    serve_flags: Sequence[str] = ()
    seed: int = 0
    serve_command: Sequence[str] = VLLM_SERVE


@dataclass
class _Tally:
    """What was seen so far; shared by the clients' threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    sent: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """The report of ``run`` without how it ended."""
        with self.lock:
            return {
                "requests": dict(sorted(self.sent.items())),
                "median_seconds": {
                    kind: round(statistics.median(values), 3)
                    for kind, values in sorted(self.seconds.items())
                },
                "errors": list(self.errors),
                "memory_growth_mib": growth([sample["total"] for sample in self.memory]),
                "seconds": self.memory[-1]["seconds"] if self.memory else 0.0,
                "memory_mib": list(self.memory),
            }


def run(
    plan: SoakTest,
    scratch: Path,
    say: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Start the server, load it, and return what happened.

    SIGTERM or Ctrl-C during the load (see ``signals_as_exceptions``) only end it early.

    Args:
        plan: what to do.
        scratch: folder for the server's log.
        say: called with a line on the progress.
        save: called with the report so far after each sample of memory.

    Returns:
        "requests" (kind -> count), "median_seconds" (kind -> s), "errors" (list), "memory_mib"
        (samples: "seconds", "total", each process, "gpu"), "memory_growth_mib" (of the total),
        "seconds", "startup_seconds", "ended_by" (None: in time) and "greedy_identical".

    Raises:
        ServerError: the server does not start, or dies.
    """
    environment = {**({} if has_gpu() else CPU_ENVIRONMENT), **os.environ}
    flags = ["--max-model-len", str(plan.max_model_len), _NO_BLANKS, *plan.serve_flags]
    log, tally = scratch / "server.log", _Tally()
    with Server("soak", plan.model, flags, log, environment, None, plan.serve_command) as server:
        startup = round(server.wait_until_healthy(), 1)
        say(f"healthy after {startup:.0f} s")
        with httpx.Client(base_url=server.url, timeout=_PATIENCE_SECONDS) as client:
            target = Target(client, server.name, plan.max_model_len)
            before = greedy(target)
            ended_by = _load(plan, server, target, tally, say, save)
            server.check("after the load")
            tally.errors += _leftovers(client)
            after = greedy(target)
    if after != before:
        tally.errors.append({"kind": "greedy", "error": f"{before} became {after}"})
    end = {"startup_seconds": startup, "ended_by": ended_by, "greedy_identical": after == before}
    return tally.report() | end


def growth(samples: Sequence[float]) -> float:
    """Median of the last quarter less that of the second: the first fills caches."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    late, early = samples[-quarter:], samples[quarter : 2 * quarter]
    return round(statistics.median(late) - statistics.median(early), 1)


def _load(
    plan: SoakTest,
    server: Server,
    target: Target,
    tally: _Tally,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> str | None:
    """Run the clients until the time is up; the name of the signal's exception if one ends it."""
    start = said = time.monotonic()
    deadline = start + 60 * plan.minutes
    threads = [
        threading.Thread(
            target=_client, args=(plan, target, tally, deadline, number, say), daemon=True
        )
        for number in range(plan.concurrency)
    ]
    for thread in threads:
        thread.start()
    gpu = has_gpu()
    try:
        while any(thread.is_alive() for thread in threads):
            server.check("under load")
            tally.memory.append(_sample(server, time.monotonic() - start, gpu))
            save(tally.report())
            if time.monotonic() - said > 60:
                said = time.monotonic()
                total, memory = sum(tally.sent.values()), tally.memory[-1]["total"]
                say(f"{total} requests, {len(tally.errors)} errors, {memory:.0f} MiB")
            # of one that runs: an ended one would not be waited for
            next((t for t in threads if t.is_alive()), threads[0]).join(_SAMPLE_SECONDS)
    except (KeyboardInterrupt, Terminated) as error:
        return type(error).__name__
    finally:
        # clients that still wait are abandoned: their results no longer count
        tally.over.set()
        patience = time.monotonic() + _STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, patience - time.monotonic()))
    return None


def _sample(server: Server, seconds: float, gpu: bool) -> dict[str, float]:
    processes = {name: round(size, 1) for name, size in server.memory_mib().items()}
    sample = {"seconds": round(seconds, 1), "total": round(sum(processes.values()), 1), **processes}
    return sample | {"gpu": gpu_used_mib()} if gpu else sample


def _client(
    plan: SoakTest,
    target: Target,
    tally: _Tally,
    deadline: float,
    number: int,
    say: Callable[[str], None],
) -> None:
    chance = random.Random(f"{plan.seed}-{number}")
    while time.monotonic() < deadline:
        # every kind once per round, in a new order
        for name in chance.sample(list(KINDS), len(KINDS)):
            with tally.lock:
                full = sum(tally.sent.values()) >= plan.max_requests
                if full or tally.over.is_set() or time.monotonic() > deadline:
                    return
                tally.sent[name] += 1
            start = time.monotonic()
            problem = None
            try:
                KINDS[name](target, chance)
            # every exception counts: a thread that died would silently put no load on the server
            except Exception as error:
                if tally.over.is_set():
                    return
                problem = {"kind": name, "error": f"{type(error).__name__}: {error}"[:500]}
            with tally.lock:
                tally.seconds.setdefault(name, []).append(time.monotonic() - start)
                if problem:
                    tally.errors.append(problem)
                    say(f"error: {problem}")
                # stop early when the server fails all the time
                if len(tally.errors) > 100:
                    return


def _leftovers(client: httpx.Client) -> list[dict[str, Any]]:
    """Requests that the server still holds although every client has gone."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    held = ["no metrics"]
    while held and time.monotonic() < deadline:
        lines = client.get("/metrics").text.splitlines()
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        held = [line for line in lines if line.startswith(wanted) and not line.endswith(" 0.0")]
        time.sleep(0.5)
    return [{"kind": "leftover", "error": line} for line in held]


def check(plan: SoakTest) -> None:
    """Refuse a plan that is unbounded or empty.

    Raises:
        ServerError: names the value.
    """
    if not 0 < plan.minutes <= 24 * 60:
        raise ServerError(f"minutes={plan.minutes}: expected above 0 and at most a day")
    if not 1 <= plan.concurrency <= 256:
        raise ServerError(f"concurrency={plan.concurrency}: expected 1 to 256")
