# SPDX-License-Identifier: MIT
"""Serves several arms in turn, interleaved, and measures each under the same load."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import processes
from harness.arithmetic import describe_arithmetic
from harness.arms import CPU_ENVIRONMENT, Arm
from harness.grid import Cell
from harness.load import CLIENT, LoadClient
from harness.processes import Terminated
from harness.server import VLLM_SERVE, Server, check_port

QUESTION = "What is the capital of France?"
_WARMUP_SEED = 10_000_000
# two successive medians that differ by less are those of a warm server
_WARM = 1.1


@dataclass
class Comparison:
    """A whole comparison.

    Attributes:
        arms: what is served.
        grid: loads, in order.
        rounds: how often every arm is served, A B A B ...
        repeats: how often the grid is measured while an arm is up.
        warmups: runs of a load, at most, before it is measured for the first time on a server.
        together: keep all arms' servers up at once and interleave them load by load.
        gpu: whether the machine has one; decides defaults of flags and environment.
        serve_flags: flags of `vllm serve` for all arms, before the arm's own.
        bench_flags: further flags of `vllm bench serve`.
        port: first port; free ones if None.
        seed: of the prompts, together with the round, the repeat and the cell.
        questions: what every server is asked once.
        startup_timeout: seconds a server has until it is healthy.
        busy_host: each engine process shares one core with a busy loop.
        after: process that must have ended before anything is measured; servers start at once.
        stream: measures a server behind the grid, or not; what it returns is kept as "streaming".
        serve_command, client_command: programs to run (replaced in tests).
    """

    arms: Sequence[Arm]
    grid: Sequence[Cell]
    rounds: int = 2
    repeats: int = 1
    warmups: int = 0
    together: bool = False
    gpu: bool = False
    serve_flags: Sequence[str] = ()
    bench_flags: Sequence[str] = ()
    port: int | None = None
    seed: int = 0
    questions: Sequence[str] = (QUESTION,)
    startup_timeout: float = 900.0
    busy_host: bool = False
    after: int | None = None
    stream: Callable[[Server], Mapping[str, Any] | None] | None = None
    serve_command: Sequence[str] = VLLM_SERVE
    client_command: Sequence[str] = CLIENT
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr))

    def flags_of(self, arm: Arm) -> list[str]:
        """All flags of an arm's server: defaults, then the common ones, then its own."""
        given = [*self.serve_flags, *arm.flags]
        flags: list[str] = []
        longest = max(cell.input_len + cell.output_len for cell in self.grid)
        # margin for special tokens, the chat template and slightly longer prompts
        defaults = {"--max-model-len": str(max(1024, longest + 128))}
        if self.together and self.gpu:
            # profiling the free memory goes wrong while the other server loads
            defaults["--gpu-memory-utilization"] = f"{0.85 / len(self.arms):.2f}"
            defaults["--kv-cache-memory-bytes"] = "8G"
        for flag, value in defaults.items():
            if not _has_flag(given, flag):
                flags += [flag, value]
        # the warm-up's prompts are the first ones of the measurement
        if not _has_flag(given, "--enable-prefix-caching", "--no-enable-prefix-caching"):
            flags.append("--no-enable-prefix-caching")
        if not self.gpu and not _has_flag(given, "--enforce-eager", "--no-enforce-eager"):
            flags.append("--enforce-eager")
        return flags + given

    def environment_of(self, arm: Arm | None) -> dict[str, str]:
        """Environment of an arm's server (or the client, for None)."""
        environment = dict(os.environ)
        if not self.gpu:
            environment = CPU_ENVIRONMENT | environment
        # the servers' memory is read from their log
        return environment | {"VLLM_LOGGING_LEVEL": "INFO"} | dict(arm.environment if arm else ())


def _has_flag(given: Sequence[str], *names: str) -> bool:
    """Whether any of ``names`` is among the flags, as ``--a-b``, ``--a_b`` or ``--a-b=value``."""
    said = {word.partition("=")[0].replace("_", "-") for word in given if word.startswith("-")}
    return not said.isdisjoint(names)


def run(
    plan: Comparison, scratch: Path, keep: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Serve and measure everything in ``plan``.

    Servers and client are stopped on every way out, and given ports are checked first.

    Args:
        plan: what to do.
        scratch: folder for logs.
        keep: is given the results so far after every measurement.

    Returns:
        "arms" (name -> command, model, figures of its memory, chat, start-up times) and
        "measurements": one dict per arm, cell, round and repeat, with the figures under "figures";
        with ``plan.stream``, "streaming" (name -> what it returned in the last round).
        Where something ended it before its time, what was measured by then, with the name of the
        signal or error as "stopped" and its text as "failure".

    Raises:
        KeyboardInterrupt, Terminated, OssFusedError, OSError: before anything was measured.
    """
    # without a port each server finds one when it starts: until then another process may take it
    ports = [None if plan.port is None else plan.port + i for i in range(len(plan.arms))]
    for port in ports:
        if port is not None:
            check_port(port)
    results: dict[str, Any] = {"arms": {}, "measurements": []}
    try:
        _measure(plan, ports, scratch, results, keep)
    except (KeyboardInterrupt, Terminated, Exception) as cause:
        if not results["measurements"]:
            raise
        results |= {"stopped": type(cause).__name__, "failure": str(cause)}
    return results


def _measure(
    plan: Comparison,
    ports: Sequence[int | None],
    scratch: Path,
    results: dict[str, Any],
    keep: Callable[[Mapping[str, Any]], None],
) -> None:
    with LoadClient(scratch, plan.environment_of(None), plan.client_command) as client:
        for number in range(plan.rounds):
            groups = (
                [list(range(len(plan.arms)))] if plan.together else [[i] for i in range(len(ports))]
            )
            for group in groups:
                with ExitStack() as stack:
                    servers = [
                        stack.enter_context(_server(plan, plan.arms[i], ports[i], scratch))
                        for i in group
                    ]
                    _measure_group(plan, client, servers, number, results, keep)


def _server(plan: Comparison, arm: Arm, port: int | None, scratch: Path) -> Server:
    return Server(
        arm.name,
        arm.model,
        plan.flags_of(arm),
        scratch / f"{arm.name}.log",
        plan.environment_of(arm),
        port,
        plan.serve_command,
        plan.startup_timeout,
    )


def _measure_group(
    plan: Comparison,
    client: LoadClient,
    servers: Sequence[Server],
    number: int,
    results: dict[str, Any],
    keep: Callable[[Mapping[str, Any]], None],
) -> None:
    """Wait for ``servers``, ask each, and put the grid on them, alternating."""
    _await_and_ask(plan, servers, number, results["arms"])
    if plan.after is not None:
        processes.wait_for_end(plan.after)
    if plan.busy_host:
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for server, core in zip(servers, cores):
            server.share_core(core)
    # name of a server and place of a load -> time to first token of the last warm-up, ms
    warm: dict[tuple[str, int], float] = {}
    for repeat in range(plan.repeats):
        for position, cell in enumerate(plan.grid):
            # the same prompts for all arms; other ones for every measurement
            seed = plan.seed + 1000 * number + 100 * repeat + position
            if repeat == 0:
                for server in servers:
                    seen = _warm_up(plan, client, server, cell, seed)
                    results["arms"][server.name].setdefault("warmups", []).append(seen)
                    if seen:
                        warm[server.name, position] = seen[-1]
            # alternate which arm goes first
            for server in servers if (number + repeat) % 2 == 0 else reversed(servers):
                measured = _put_load(plan, client, server, cell, seed)
                first = warm.get((server.name, position))
                at = {"round": number, "repeat": repeat, "warm_up_ttft_ms": first}
                results["measurements"].append(at | measured)
                keep(results)
    for server in servers:
        streamed = plan.stream(server) if plan.stream else None
        if streamed:
            results.setdefault("streaming", {})[server.name] = streamed
            keep(results)
    for server in servers:
        server.check("after the measurement")


def _await_and_ask(
    plan: Comparison, servers: Sequence[Server], number: int, arms: dict[str, Any]
) -> None:
    """Note how long each server took to start, what it answers, and its memory."""
    # each has its own time: asking all of them in turn does not count one's wait as another's
    while not all([server.is_healthy() for server in servers]):
        time.sleep(0.25)
    for server in servers:
        seconds = server.wait_until_healthy()
        plan.say(f"[round {number + 1}/{plan.rounds}] {server.name}: healthy after {seconds:.0f} s")
        arm = arms.setdefault(server.name, _describe(plan, server))
        arm["startup_seconds"].append(round(seconds, 1))
        if "chat" not in arm:
            arm["chat"] = [server.ask(question) for question in plan.questions]
            for chat in arm["chat"]:
                plan.say(f"    {chat['question']} -> {chat['answer'].strip()[:100]!r}")
        arm["memory"] |= server.log_figures()


def _put_load(
    plan: Comparison, client: LoadClient, server: Server, cell: Cell, seed: int
) -> dict[str, Any]:
    """One load on one server."""
    load_average = os.getloadavg()[0]
    figures = client.run(server, cell, seed, server.model, extra=plan.bench_flags)
    plan.say(
        f"    {server.name:<12} {cell.key:<14} "
        f"{figures['output_throughput']:9.1f} tok/s   "
        f"TTFT {figures['p50_ttft_ms']:8.1f} ms   TPOT {figures['p50_tpot_ms']:7.2f} ms"
    )
    return {
        "arm": server.name,
        "concurrency": cell.concurrency,
        "input_len": cell.input_len,
        "output_len": cell.output_len,
        "num_prompts": cell.num_prompts,
        "load_average": round(load_average, 2),
        "figures": figures,
    }


def _warm_up(
    plan: Comparison, client: LoadClient, server: Server, cell: Cell, seed: int
) -> list[float]:
    """Run the load until two medians of the time to first token agree; the medians in ms.

    vLLM compiles kernels for some batch sizes when the first batch of that size comes.
    """
    seen: list[float] = []
    for number in range(plan.warmups):
        # other prompts than those that are measured
        other = _WARMUP_SEED + 100 * seed + number
        figures = client.run(server, cell, other, server.model, extra=plan.bench_flags)
        seen.append(figures["p50_ttft_ms"])
        plan.say(f"    {server.name:<12} {cell.key:<14} warm-up, TTFT {seen[-1]:8.1f} ms")
        if len(seen) > 1 and max(seen[-2:]) <= _WARM * min(seen[-2:]):
            break
    return seen


def _describe(plan: Comparison, server: Server) -> dict[str, Any]:
    arm = next(arm for arm in plan.arms if arm.name == server.name)
    config = Path(arm.model) / "config.json"
    mxfp4 = config.is_file() and "mxfp4" in config.read_text()
    return {
        "model": arm.model,
        "command": server.command,
        "environment": dict(arm.environment),
        "arithmetic": describe_arithmetic(server.command, mxfp4),
        "memory": {"checkpoint_bytes": checkpoint_bytes(Path(arm.model))},
        "startup_seconds": [],
    }


def checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files of a checkpoint folder, None for a hub name."""
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) or None
