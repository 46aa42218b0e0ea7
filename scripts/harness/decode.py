# SPDX-License-Identifier: MIT
"""Decode steps and prefill of several arms, their engines side by side on one device.

Starting an engine takes a minute, so all start at once, stay up and are measured in turn, cell by
cell, in another order each round. An idle engine does not use the device.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import processes
from harness.arms import CPU_ENVIRONMENT, Arm
from harness.decode_limits import kv_bytes, load_config
from oss_fused.errors import ServerError

WORKER = (sys.executable, "-m", "harness.decode_worker")
# "stopped" of a measurement that its deadline ended, and no failure
TIME_IS_UP = "time is up"
# of a sequence in a step that verifies drafts
_MOST_TOKENS = 8


@dataclass(frozen=True)
class Cell:
    """A load: ``steps`` decode steps of ``batch`` sequences, or, with 0 steps, their prefill."""

    batch: int
    context: int
    steps: int

    @property
    def key(self) -> str:
        """Such as ``decode 32 x 1024``."""
        return f"{'decode' if self.steps else 'prefill'} {self.batch} x {self.context}"


@dataclass
class DecodeBenchmark:
    """A whole measurement.

    Attributes:
        arms: all of them; the baselines are chosen when the results are condensed.
        cells: loads, in order.
        profiles: loads whose kernels are recorded once per arm.
        rounds: how often every cell is measured on every arm.
        gpu: whether the machine has one; decides defaults.
        flags: engine flags for all arms, before an arm's own.
        seed: of the prompts.
        startup_timeout: seconds the engines, which start together, have to start.
        deadline: of time.monotonic; past it nothing begins.
        after: process that must have ended before anything is measured; engines start at once.
        worker: program and arguments, see decode_worker (replaced in tests).
    """

    arms: Sequence[Arm]
    cells: Sequence[Cell]
    profiles: Sequence[Cell] = ()
    hosts: Sequence[Cell] = ()
    rounds: int = 2
    gpu: bool = False
    flags: Sequence[str] = ()
    seed: int = 0
    startup_timeout: float = 600.0
    deadline: float = math.inf
    after: int | None = None
    worker: Sequence[str] = field(default=WORKER)
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr))

    def flags_of(self, arm: Arm) -> list[str]:
        """All engine flags of an arm: what fits the cells, the common ones, its own."""
        # steps with drafts yield several tokens, and a sequence that ended would not count
        hosts = [replace(cell, steps=_MOST_TOKENS * cell.steps) for cell in self.hosts]
        cells = [*self.cells, *self.profiles, *hosts]
        # the first sequences of a large batch decode while the last ones are prefilled
        longest = max(_positions(cell) for cell in cells)
        decoding = sorted({cell.batch for cell in cells if cell.steps} | {1})
        # later batches and rounds find their prompts in the prefix cache
        flags = ["--max-model-len", str(longest), "--enable-prefix-caching"]
        flags += ["--max-num-seqs", str(max(cell.batch for cell in cells))]
        # vLLM wants room for a token of each sequence
        most = max(max(cell.context, cell.batch) for cell in cells)
        flags += ["--max-num-batched-tokens", str(most)]
        if self.gpu:
            # only what is measured: each graph takes time; profiling the free memory goes wrong
            # while another engine loads
            flags += ["--cudagraph-capture-sizes", *map(str, decoding)]
            flags += ["--gpu-memory-utilization", f"{0.9 / len(self.arms):.2f}"]
            tokens = max(cell.batch * (_positions(cell) + 16) for cell in cells)
            cache = tokens * kv_bytes(load_config(arm.model))
            flags += ["--kv-cache-memory-bytes", str(int(1.2 * cache))]
        else:
            flags.append("--enforce-eager")
        return [*flags, *self.flags, *arm.flags]

    def schedule(self) -> Iterator[tuple[int | None, Cell]]:
        """Cells with their round, None for a profile; the most important first."""
        short = min((cell.context for cell in self.cells if cell.steps), default=0)
        later = [cell for cell in self.cells if cell.steps and cell.context > short]
        yield from ((0, cell) for cell in self.cells if cell not in later)
        yield from ((None, cell) for cell in self.profiles)
        yield from ((0, cell) for cell in later)
        for number in range(1, self.rounds):
            yield from ((number, cell) for cell in self.cells)


def _positions(cell: Cell) -> int:
    # how long a sequence may become: the first ones decode while the last ones are prefilled
    return cell.context + cell.steps + cell.batch + 64


class Engine:
    """A worker process; answers of `ask` come in order."""

    def __init__(self, plan: DecodeBenchmark, arm: Arm, folder: Path) -> None:
        """See the class; the log goes to ``folder``."""
        self.arm = arm
        self.log_path = folder / f"{arm.name}.log"
        job = folder / f"{arm.name}.json"
        job.write_text(json.dumps({"model": arm.model, "flags": plan.flags_of(arm)}))
        environment = dict(os.environ) if plan.gpu else CPU_ENVIRONMENT | dict(os.environ)
        # a prefill as long as the model's context needs a position more; the text is noise anyway
        environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        with self.log_path.open("wb") as log:
            self._process: subprocess.Popen[bytes] = processes.start(
                [*plan.worker, str(job)], log, environment | dict(arm.environment), pipes=True
            )
        self.started = time.monotonic()

    def __enter__(self) -> Engine:
        """Nothing to set up."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process and its children."""
        processes.stop(self._process, patience=2)

    def ask(self, request: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ServerError: the engine ended, is too slow, or answers with an error.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("ended") from None
        return self.answer(timeout)

    def answer(self, timeout: float, left: float | None = None) -> dict[str, Any]:
        """The next answer, in ``left`` seconds if only those are left; raises as ``ask`` does."""
        assert self._process.stdout is not None
        wait = timeout if left is None else left
        if not select.select([self._process.stdout], [], [], wait)[0]:
            raise self._failed(f"no answer in {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, why: str) -> ServerError:
        lines = self.log_path.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line][:5]
        shown = "\n".join(f"    {line[:300]}" for line in [*errors, *lines[-20:]])
        return ServerError(f"engine {self.arm.name} ({self.arm.model}): {why}\n{shown}")


def run(
    plan: DecodeBenchmark,
    scratch: Path,
    before: Callable[[], None] = lambda: None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Start all engines, measure every cell on each, and record kernels.

    Args:
        plan: what to measure.
        scratch: folder for logs.
        before: called once all engines are up, before the first measurement.
        keep: called with the results so far after every cell.

    Returns:
        "arms" (name -> command line, seconds to start), "failed" (name -> why; the last arm must
        run), "measurements" (one dict per arm, cell and round, with "ms" per step and "distinct"),
        "profiles" (arm, cell, and what WorkerExtension.oss_profile_stop returns), "host" (arm,
        cell, and what Measure.host returns) and "bandwidth" in bytes per second.

    Raises:
        ServerError: the last arm or all others do not start, or one fails before anything was
            measured; later failures end the measurement and are named under "stopped".
    """
    results: dict[str, Any] = {"arms": {}, "failed": {}, "measurements": [], "profiles": []}
    results["host"] = []
    with ExitStack() as stack:
        started = [stack.enter_context(Engine(plan, arm, scratch)) for arm in plan.arms]
        engines = [engine for engine in started if _survives(plan, engine, results, _starts)]
        if plan.after is not None:
            processes.wait_for_end(plan.after)
        engines = [engine for engine in engines if _survives(plan, engine, results, _warm_up)]
        if len(engines) < min(2, len(plan.arms)):
            raise ServerError("\n".join(results["failed"].values()))
        before()
        results["bandwidth"] = engines[0].ask({"do": "bandwidth"})["bytes_per_second"]
        try:
            for cell in plan.hosts:
                results["host"] += [_host(engine, cell, plan.seed) for engine in engines]
            for place, (number, cell) in enumerate(plan.schedule()):
                if place and time.monotonic() > plan.deadline:
                    results["stopped"] = TIME_IS_UP
                    break
                if number is None:
                    results["profiles"] += [_profile(engine, cell, plan.seed) for engine in engines]
                else:
                    # alternate which arm goes first
                    order = engines if place % 2 == 0 else engines[::-1]
                    results["measurements"] += [_row(plan, e, cell, number) for e in order]
                keep(results)
        except ServerError as error:
            if not results["measurements"]:
                raise
            results["stopped"] = str(error)
        if "stopped" in results:
            plan.say(f"stopped early: {results['stopped']}")
    return results


def _survives(
    plan: DecodeBenchmark,
    engine: Engine,
    results: dict[str, Any],
    step: Callable[[DecodeBenchmark, Engine, dict[str, Any]], None],
) -> bool:
    """Take an engine through ``step``; False if it is a baseline that fails."""
    try:
        step(plan, engine, results)
    except ServerError as error:
        if engine.arm is plan.arms[-1]:
            raise
        plan.say(str(error))
        results["arms"].pop(engine.arm.name, None)
        results["failed"][engine.arm.name] = str(error)
        return False
    return True


def _starts(plan: DecodeBenchmark, engine: Engine, results: dict[str, Any]) -> None:
    # all have started at the same time: waiting for one is time that the next has used
    left = engine.started + plan.startup_timeout - time.monotonic()
    engine.answer(plan.startup_timeout, max(left, 0.0))
    seconds = time.monotonic() - engine.started
    plan.say(f"{engine.arm.name}: up after {seconds:.0f} s")
    results["arms"][engine.arm.name] = asdict(engine.arm) | {
        "all_flags": plan.flags_of(engine.arm),
        "startup_seconds": round(seconds, 1),
    }


def _warm_up(plan: DecodeBenchmark, engine: Engine, results: dict[str, Any]) -> None:
    """Run each kind of load once."""
    shortest = {(cell.batch, cell.steps > 0): cell for cell in reversed(plan.cells)}
    for cell in shortest.values():
        short = Cell(cell.batch, cell.context, min(cell.steps, 8))
        _measure(engine, short, plan.seed, number=-1)


def _row(plan: DecodeBenchmark, engine: Engine, cell: Cell, number: int) -> dict[str, Any]:
    answer = _measure(engine, cell, plan.seed, number)
    median = statistics.median(answer["ms"])
    plan.say(f"[{number + 1}] {engine.arm.name:<16} {cell.key:<20} {median:9.3f} ms")
    return {"arm": engine.arm.name, "round": number, **asdict(cell), **answer}


def _host(engine: Engine, cell: Cell, seed: int) -> dict[str, Any]:
    answer = engine.ask({"do": "host", **asdict(cell), "seed": seed})
    return {"arm": engine.arm.name, "batch": cell.batch, "context": cell.context, **answer}


def _profile(engine: Engine, cell: Cell, seed: int) -> dict[str, Any]:
    # a prefill needs prompts that no round has had
    seed = seed if cell.steps else seed + 2000
    answer = engine.ask({"do": "profile", **asdict(cell), "seed": seed})
    where = {"batch": cell.batch, "context": cell.context, "cell_steps": cell.steps}
    return {"arm": engine.arm.name, **where, **answer}


def _measure(engine: Engine, cell: Cell, seed: int, number: int) -> dict[str, Any]:
    """Measure a cell; a prefill has prompts of its own in each round ``number``."""
    if cell.steps:
        return engine.ask({"do": "decode", **asdict(cell), "seed": seed})
    fresh = {"batch": cell.batch, "context": cell.context, "seed": seed + 1000 + number}
    return engine.ask({"do": "prefill", **fresh})
