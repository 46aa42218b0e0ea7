#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Run the chapters of docs/tutorial one after the other and print a line for each.

What they show is recorded in a folder (results/tutorial), for `make docs`. Counts chapters and
exercises from the files. Exit codes: 0 all ran, 1 a chapter failed, 2 bad input.

    python scripts/tutorial.py                       # all
    python scripts/tutorial.py 05 06                 # some, by the beginning of their names
    python scripts/tutorial.py --changed             # those whose text or figures changed
    python scripts/tutorial.py --count --output docs/results/tutorial.json \
        --summary docs/results/h200/summary.json
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.arguments import Help, output_file, output_folder, summary_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TUTORIAL = ROOT / "docs" / "tutorial"
RESULTS = ROOT / "docs" / "results" / "h200"
# a chapter takes under a minute on an idle machine
TIMEOUT = 600


@dataclass(frozen=True)
class Outcome:
    """What became of a chapter; ``error`` is the end of what it wrote to stderr."""

    name: str
    seconds: float
    error: str = ""

    def line(self) -> str:
        """Name, seconds, ok or failed."""
        return f"{self.name:36} {self.seconds:6.1f} s  {'failed' if self.error else 'ok'}"


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("chapters", nargs="*", help="beginnings of names (default: all)")
    record = ROOT / "results" / "tutorial"
    parser.add_argument(
        "--record", type=output_folder, default=record, help="folder of what chapters show"
    )
    parser.add_argument("--changed", action="store_true", help="skip what is recorded already")
    parser.add_argument("--count", action="store_true", help="run nothing")
    parser.add_argument("--output", type=output_file, help="JSON of the counts to write")
    parser.add_argument("--summary", type=summary_file, help="summary.json to add tutorial.* to")
    args = parser.parse_args(argv)
    if args.summary and not args.output:
        parser.error("--summary needs --output, the file that it names as the source")
    paths = sorted(TUTORIAL.glob("[0-9][0-9]-*.py"))
    chosen = [p for p in paths if not args.chapters or p.name.startswith(tuple(args.chapters))]
    if not chosen:
        print(f"tutorial: {args.chapters}: expected beginnings of names", file=sys.stderr)
        return 2
    if args.output:
        write_counts(args.output, args.summary)
    failed = False
    for path in [] if args.count else chosen:
        record = args.record / f"{path.stem}.jsonl"
        # the first chapter asks all the others for their figures
        pages = paths if path == paths[0] else [path]
        sources = [source for page in pages for source in (page, *figures_of(page))]
        if args.changed and newer(record, TUTORIAL / "book.py", *sources):
            continue
        outcome = run(path, record)
        print(outcome.line(), flush=True)
        if outcome.error:
            failed = True
            print(outcome.error, file=sys.stderr)
    return int(failed)


def figures_of(path: Path) -> list[Path]:
    """Result files of one H200 that a chapter names, where they exist."""
    named = [RESULTS / name for name in re.findall(r'"([\w./-]+\.json)"', path.read_text())]
    return [file for file in named if file.is_file()]


def newer(record: Path, *sources: Path) -> bool:
    """Whether ``record`` exists and no source changed after it was made."""
    return record.exists() and record.stat().st_mtime >= max(s.stat().st_mtime for s in sources)


def run(path: Path, record: Path) -> Outcome:
    """Run a chapter by itself; its record appears when it is complete."""
    record.parent.mkdir(parents=True, exist_ok=True)
    scratch = record.with_suffix(".part")
    scratch.unlink(missing_ok=True)
    # the checkout's package, installed or not
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TUTORIAL_RECORD": str(scratch), "PYTHONPATH": python_path}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        error = done.stderr[-4000:] or f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"no end after {TIMEOUT} s"
    if not error and scratch.exists():
        scratch.replace(record)
    return Outcome(path.stem, time.monotonic() - start, error)


def write_counts(output: Path, summary: Path | None) -> None:
    """Write the number of exercises of every chapter, and merge both counts into ``summary``."""
    from harness.chapters import exercises
    from harness.summary import merge_summary

    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json

    found = {path.stem: len(exercises(path.stem)) for path in TUTORIAL.glob("[0-9][0-9]-*.py")}
    found = dict(sorted(found.items()))
    figures = {"tutorial.chapters": len(found), "tutorial.exercises": sum(found.values())}
    write_json(output, {"environment": fingerprint(), "figures": figures, "exercises": found})
    if summary:
        merge_summary(summary, figures, output)


if __name__ == "__main__":
    sys.exit(main())
