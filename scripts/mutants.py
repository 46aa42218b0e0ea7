#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Mutation test: apply small wrong changes one at a time and run the tests that must catch each.

tests/mutants/*.toml lists the changes. Each is applied to a copy of the checkout; the working tree
is never touched. The tests of a mutant run first on the unchanged copy, so that a test that is red
anyway counts as broken, not as a catch. Mutants with `gpu = true` run only where there is a GPU.
An interrupted run goes on where it stopped. --output keeps the result of a mutant until its entry,
the file that it changes or its tests change.
Exit codes: 0 every mutant was caught, 1 one survived or is broken, 2 bad input.

    python scripts/mutants.py                         # all that this machine can run
    python scripts/mutants.py --area kernels --gpu-only
    python scripts/mutants.py --summary docs/results/h200/summary.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.arguments import output_file, summary_file
from harness.summary import merge_summary
from harness.warm_pytest import TIMED_OUT, WarmPytest

from oss_fused.environment import fingerprint, has_gpu
from oss_fused.files import write_json

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"name": str, "file": str, "old": str, "new": str, "tests": list, "gpu": bool}
# what the sources of a result are: a change in them makes it stale
SOURCES = ("oss_fused", "scripts", "tests", "deploy")
# what tests read beside them
BESIDE = ("docs", ".ci", ".dockerignore", "Makefile", "README.md", "pyproject.toml", "LICENSE")
# pytest's exit code for failed tests; the others say that the tests did not run
TESTS_FAILED = 1
# what most tests import
MODULES = ("pytest", "torch", "transformers", "hypothesis", "safetensors.torch")
# on a GPU vLLM's import may start CUDA, which no fork survives
MODULES_WITHOUT_GPU = ("triton", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
# what tests/conftest.py and tests/plugin/conftest.py set before these imports
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    # no byte code: a mutant of the same size, written in the same second, would run the old one
    "PYTHONDONTWRITEBYTECODE": "1",
}


class MutantError(ValueError):
    """An entry of tests/mutants that cannot be applied."""


@dataclass(frozen=True)
class Mutant:
    """A wrong change and the tests that catch it."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the mutants, return the exit code."""
    args = parse(argv)
    try:
        mutants = load(ROOT / "tests" / "mutants")
    except (MutantError, tomllib.TOMLDecodeError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    chosen = [m for m in mutants if (not args.area or m.area in args.area)]
    chosen = [m for m in chosen if not args.name or m.name in args.name]
    chosen = [m for m in chosen if m.gpu or not args.gpu_only]
    for key in ("area", "name"):
        unknown = set(getattr(args, key) or ()) - {getattr(m, key) for m in mutants}
        if unknown:
            print(f"mutants: --{key}: no such {key}: {', '.join(sorted(unknown))}", file=sys.stderr)
            return 2
    if not chosen:
        print(f"mutants: --area={args.area} --name={args.name}: no such mutant", file=sys.stderr)
        return 2
    gpu = has_gpu()
    runnable = [m for m in chosen if gpu or not m.gpu]
    try:
        results = Results(args.output, read_results(args.output), mutants)
    except ValueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    run_all(runnable, results, args.jobs, args.timeout)
    return report(chosen, results, args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--area", nargs="+", help="files of tests/mutants, without .toml (default: all)")
    add("--name", nargs="+", help="mutants (default: all)")
    add("--gpu-only", action="store_true", help="only those that need a GPU")
    add("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    add("--timeout", type=int, default=600, help="seconds for one run of tests (default: 600)")
    add(
        "--output",
        type=output_file,
        default=Path("results/mutants.json"),
        help="JSON of all results, read first and written after each mutant "
        "(default: results/mutants.json)",
    )
    add(
        "--summary",
        type=summary_file,
        help="summary.json to add tests.mutants* to, if all have run; not with --area, --name or "
        "--gpu-only",
    )
    args = parser.parse_args(argv)
    for name in ("jobs", "timeout"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: expected at least 1")
    if args.summary and (args.area or args.name or args.gpu_only):
        parser.error("--summary: counts all mutants; expected no --area, --name or --gpu-only")
    return args


def read_results(path: Path) -> dict[str, Any]:
    """Mutant -> what an earlier run found; empty where there is no file yet.

    Raises:
        ValueError: the file holds something else; names it.
    """
    if not path.exists():
        return {}
    try:
        known: dict[str, Any] = json.loads(path.read_text())["mutants"]
        for name, entry in known.items():
            if not {"sources", "outcome", "file"} <= entry.keys():
                raise KeyError(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--output={str(path)!r}: expected a JSON file that this script wrote ({error!r})"
        ) from None
    return known


def load(folder: Path) -> list[Mutant]:
    """The mutants of all files in ``folder``, checked against the sources of this checkout.

    Raises:
        MutantError: an entry has a wrong key, its text does not stand exactly once in its file, its
            tests do not exist, or its name is taken.
    """
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            mutant = _read(path.stem, entry)
            if mutant.name in mutants:
                raise MutantError(f"{path.name}: name={mutant.name!r}: expected a name of its own")
            mutants[mutant.name] = mutant
    return list(mutants.values())


def _read(area: str, entry: dict[str, Any]) -> Mutant:
    where = f"{area}.toml: mutant {entry.get('name')!r}"
    for key, value in entry.items():
        if not isinstance(value, KEYS.get(key, ())):
            raise MutantError(f"{where}: {key}={value!r}: expected the keys {', '.join(KEYS)}")
    missing = KEYS.keys() - entry.keys() - {"gpu"}
    if missing:
        raise MutantError(f"{where}: no {', '.join(sorted(missing))}")
    mutant = Mutant(area, **{**entry, "tests": tuple(entry["tests"])})
    file = ROOT / mutant.file
    count = file.read_text().count(mutant.old) if file.is_file() else 0
    if count != 1 or mutant.old == mutant.new:
        raise MutantError(
            f"{where}: old={mutant.old!r} stands {count} times in {mutant.file}; expected once, "
            f"and another text as new"
        )
    files = [test.split("::")[0] for test in mutant.tests if test.startswith("tests/")]
    if not files or not all((ROOT / test).exists() for test in files):
        raise MutantError(f"{where}: tests={list(mutant.tests)}: expected paths of tests first")
    return mutant


def source_digest(mutant: Mutant) -> str:
    """Digest of what decides a mutant's outcome: its entry, the file that it changes, its tests."""
    digest = hashlib.sha256(repr(mutant).encode())
    tests = (test.split("::")[0] for test in mutant.tests if test.startswith("tests/"))
    for name in sources((mutant.file, *tests)):
        digest.update(name.encode())
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def sources(tops: Iterable[str]) -> list[str]:
    """Files of the checkout in these folders, or of these names, as sorted relative paths."""
    found: list[Path] = []
    for top in tops:
        found += [ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*")
    names = (file.relative_to(ROOT).as_posix() for file in found if file.is_file())
    return sorted(name for name in names if "__pycache__" not in name)


class Results:
    """What is known of each mutant, kept in a JSON file."""

    def __init__(self, path: Path, known: dict[str, Any], mutants: Sequence[Mutant]) -> None:
        """Keep those of ``known`` that were measured on the sources of today."""
        self.path = path
        self.sources = {mutant.name: source_digest(mutant) for mutant in mutants}
        self.mutants = {k: v for k, v in known.items() if v["sources"] == self.sources.get(k)}

    def add(self, mutant: Mutant, outcome: str, seconds: float, tail: str) -> None:
        """Record an outcome and write the file."""
        entry = {
            "area": mutant.area,
            "file": mutant.file,
            "gpu": mutant.gpu,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "sources": self.sources[mutant.name],
        }
        if outcome != "caught":
            entry["output"] = tail
        self.mutants[mutant.name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ordered = dict(sorted(self.mutants.items()))
        write_json(self.path, {"environment": fingerprint(), "mutants": ordered})


def run_all(mutants: Sequence[Mutant], results: Results, jobs: int, timeout: int) -> None:
    """Run what ``results`` does not know, ``jobs`` at a time, each job in a copy of its own."""
    todo = [mutant for mutant in mutants if mutant.name not in results.mutants]
    print(f"{len(mutants)} mutants, {len(todo)} to run", file=sys.stderr)
    if not todo:
        return
    modules = MODULES if has_gpu() else (*MODULES, *MODULES_WITHOUT_GPU)
    with tempfile.TemporaryDirectory(prefix="oss-fused-mutants-") as folder, ExitStack() as ends:
        workers: SimpleQueue[Worker] = SimpleQueue()
        for i in range(jobs):
            worker = Worker(_copy(Path(folder) / str(i)), timeout, modules)
            ends.callback(worker.close)
            workers.put(worker)
        green: set[tuple[str, ...]] = set()

        def in_copy(mutant: Mutant) -> tuple[Mutant, str, float, str]:
            worker = workers.get()
            try:
                return mutant, *run_one(mutant, worker, green)
            finally:
                workers.put(worker)

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(in_copy, mutant) for mutant in todo]
            try:
                # as they end: an interrupted run keeps what is done, whatever still runs
                for i, future in enumerate(as_completed(futures), 1):
                    mutant, outcome, seconds, tail = future.result()
                    results.add(mutant, outcome, seconds, tail)
                    line = f"[{i}/{len(todo)}] {outcome:8} {seconds:6.1f} s  {mutant.name}"
                    print(line, file=sys.stderr, flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _copy(folder: Path) -> Path:
    for name in sources((*SOURCES, *BESIDE)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


class Worker:
    """A copy of the checkout and a process that runs its tests."""

    def __init__(self, copy: Path, timeout: int, modules: Sequence[str]) -> None:
        """``timeout``: seconds for one run of tests; ``modules``: what to import once for all."""
        self.copy = copy
        self.timeout = timeout
        environment = {**ENVIRONMENT, "PYTHONPATH": str(copy)}
        if not has_gpu():
            environment["TRITON_INTERPRET"] = "1"
        self._pytest = WarmPytest(modules, environment)
        self.close = self._pytest.close

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """Exit code and the end of the output of ``tests``; a hang counts as a failure."""
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        code, output = self._pytest.run([*options, *tests], self.copy, self.timeout)
        if code == TIMED_OUT:
            return TESTS_FAILED, f"FAILED no end after {self.timeout} s"
        return code, "\n".join(output.splitlines()[-25:])


def run_one(mutant: Mutant, worker: Worker, green: set[tuple[str, ...]]) -> tuple[str, float, str]:
    """Outcome (caught, survived, broken), seconds and the end of the output of one mutant.

    ``green``: tests that passed without a change; the mutant's tests join it.
    """
    began = time.monotonic()
    if mutant.tests not in green:
        code, tail = worker.run(mutant.tests)
        if code != 0:
            return "broken", time.monotonic() - began, f"red without the change:\n{tail}"
        green.add(mutant.tests)
    file = worker.copy / mutant.file
    right = file.read_text()
    try:
        file.write_text(right.replace(mutant.old, mutant.new))
        code, tail = worker.run(mutant.tests)
    finally:
        file.write_text(right)
    outcome = {0: "survived", TESTS_FAILED: "caught"}.get(code, "broken")
    if outcome == "caught" and not re.search(r"^FAILED ", tail, re.MULTILINE):
        outcome = "broken"  # an error in a fixture or while collecting is no failed test
    return outcome, time.monotonic() - began, tail


def report(chosen: Sequence[Mutant], results: Results, args: argparse.Namespace) -> int:
    """Print what survived; returns the exit code."""
    known = {m.name: results.mutants[m.name] for m in chosen if m.name in results.mutants}
    bad = {name: entry for name, entry in known.items() if entry["outcome"] != "caught"}
    for name, entry in bad.items():
        print(f"\n{entry['outcome']}: {name} ({entry['file']})\n{entry['output']}")
    left = [m.name for m in chosen if m.name not in known]
    if left:
        print(f"\nneed a GPU, not run: {', '.join(left)}")
    caught = len(known) - len(bad)
    print(f"\n{len(chosen)} mutants: {caught} caught, {len(bad)} not, {len(left)} not run")
    if args.summary and left:
        print("mutants: --summary: not written, not every mutant has run", file=sys.stderr)
    elif args.summary:
        survived = sum(entry["outcome"] == "survived" for entry in bad.values())
        figures = {"tests.mutants": len(known), "tests.mutants_survived": survived}
        merge_summary(args.summary, figures, args.output)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
