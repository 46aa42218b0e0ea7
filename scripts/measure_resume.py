#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Whether a calibration that is killed and resumed gives the same bytes, and what memory it takes.

  measure_resume.py models/SmolLM2-135M-Instruct --output resume.json -- \\
      --dataset text.jsonl --num-samples 8 --max-seq-length 256

Runs calibrate.py with the flags after "--" once to the end; then once more, killed by SIGKILL
--kills times in a row after random times before it may end; then --apart times anew, each killed
once at a random moment (one in each equal part of the run's time, in random order) and resumed to
the end. Every file of every output is compared with the first one's. Without "--" the flags are
--dataset python --num-samples 8 --max-seq-length 256.
Exit codes: 0 all alike, 1 they differ or a run failed, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.arguments import output_file, positive

from oss_fused.environment import fingerprint, portable
from oss_fused.errors import OssFusedError
from oss_fused.files import write_json
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.skeleton import layer_of

CALIBRATE = Path(__file__).resolve().with_name("calibrate.py")
DEFAULTS = ["--dataset", "python", "--num-samples", "8", "--max-seq-length", "256"]
# lives in a row, in shares of the whole run's time: starting takes a fifth of SmolLM2's
_LIVES = (0.05, 0.3)


class Trials:
    """Runs of one calibration."""

    def __init__(self, model: Path, flags: list[str], work: Path) -> None:
        """Make the outputs in ``work``."""
        self.command = [sys.executable, str(CALIBRATE), str(model), *flags]
        self.work = work
        self.log = work / "log"
        self.peaks = {"VmHWM": 0.0, "RssAnon": 0.0}

    def place(self, name: str) -> Path:
        """Output of a trial; all have one name, because the model card tells it."""
        return self.work / name / "out"

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        """A process that makes ``output`` or resumes it."""
        with self.log.open("wb") as log:
            command = [*self.command, "--output", str(output), "--resume"]
            return subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)

    def finish(self, output: Path) -> float:
        """Run to the end and watch the memory; returns seconds.

        Raises:
            OssFusedError: it failed.
        """
        begun = time.monotonic()
        process = self.start(output)
        try:
            while process.poll() is None:
                self._look(process.pid)
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        self._check(process)
        return time.monotonic() - begun

    def kill_after(self, output: Path, seconds: float) -> dict[str, Any] | None:
        """Start, and kill after a while; tells where it was, or None if it ended before.

        Raises:
            OssFusedError: it ended with a failure.
        """
        process = self.start(output)
        try:
            process.wait(seconds)
            self._check(process)
            return None
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        return {"after_s": seconds, **self._place(output)}

    def trial(self, name: str, lives: list[float], whole: dict[str, str]) -> dict[str, Any]:
        """Kill at the end of each life, resume, compare with ``whole``, remove the output."""
        output = self.place(name)
        kills = []
        for seconds in lives:
            place = self.kill_after(output, seconds)
            if place is None:
                break
            kills.append(place)
            if output.exists():
                break
        # a folder that has its name is complete: there is nothing to resume
        resumed = None if output.exists() else self.finish(output)
        found = digests(output)
        differ = sorted(n for n in whole.keys() | found.keys() if whole.get(n) != found.get(n))
        left = [path.name for path in output.parent.iterdir() if path != output]
        shutil.rmtree(output.parent)
        return {"kills": kills, "resumed_s": resumed, "differ": differ, "left": left}

    def _look(self, pid: int) -> None:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            name, _, value = line.partition(":")
            if name in self.peaks:
                self.peaks[name] = max(self.peaks[name], int(value.split()[0]) / 2**20)

    def _place(self, output: Path) -> dict[str, Any]:
        """What a killed run has done."""
        journals = output.parent.glob("*/state/journal.jsonl")
        steps = sum(journal.read_text().count("\n") for journal in journals)
        return {"output_exists": output.exists(), "steps_done": steps}

    def _check(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode:
            raise OssFusedError(f"calibrate.py failed:\n{self.log.read_text()[-2000:]}")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under ``folder``, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def largest_layer_gib(model: Path) -> float:
    """Size of the largest decoder layer's weights in float32, as calibration holds them."""
    reader = CheckpointReader(model)
    sizes: Counter[int] = Counter()
    for name in reader.names():
        layer = layer_of(name)
        if layer is not None:
            count = 4
            for length in reader.shape(name):
                count *= length
            sizes[layer] += count
    return max(sizes.values()) / 2**30


def main(argv: list[str] | None = None) -> int:
    """Run the trials, write JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the checkpoint")
    add("--output", type=output_file, required=True, metavar="JSON", help="file to write")
    add("--kills", type=positive, default=10, help="in a row (default: 10)")
    add("--apart", type=positive, default=10, help="runs killed once (default: 10)")
    add("--seed", type=int, default=0, help="of the moments (default: 0)")
    add("--work", type=Path, help="where checkpoints are made (default: the system's temporary)")
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    flags = words[end + 1 :] or DEFAULTS
    try:
        layer = largest_layer_gib(args.model)
    except OssFusedError as error:
        print(f"measure_resume: {error}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            same = measure(args, flags, layer, Path(work))
    except OssFusedError as error:
        print(f"measure_resume: {error}", file=sys.stderr)
        return 1
    return 0 if same else 1


def measure(args: argparse.Namespace, flags: list[str], layer: float, work: Path) -> bool:
    """All trials; returns whether all outputs are alike."""
    trials, chosen = Trials(args.model, flags, work), random.Random(args.seed)
    seconds = trials.finish(trials.place("whole"))
    whole = digests(trials.place("whole"))
    peaks = dict(trials.peaks)
    figures: dict[str, Any] = {
        "kind": "oss_fused.measure_resume",
        "environment": fingerprint(),
        "flags": portable(flags),
        "seed": args.seed,
        "seconds": seconds,
        "peak_resident_gib": peaks["VmHWM"],
        "peak_anonymous_gib": peaks["RssAnon"],
        "largest_layer_gib": layer,
        "memory_bar_gib": 2 * layer + 1,
        "files": whole,
        "trials": [],
    }
    tell(f"uninterrupted: {seconds:.0f} s, at most {peaks['VmHWM']:.2f} GiB resident")

    def run(name: str, lives: list[float]) -> None:
        found = trials.trial(name, lives, whole)
        figures["trials"].append(found)
        killed = [kill for trial in figures["trials"] for kill in trial["kills"]]
        figures["kills"] = len(killed)
        figures["identical"] = not any(x["differ"] or x["left"] for x in figures["trials"])
        write_json(args.output, figures)
        moments = ", ".join(f"{k['after_s']:.1f} s ({k['steps_done']})" for k in found["kills"])
        verdict = f"differ: {found['differ']} {found['left']}"
        alike = not found["differ"] and not found["left"]
        tell(f"killed after (steps done) {moments}: {'identical' if alike else verdict}")

    run("row", [seconds * chosen.uniform(*_LIVES) for _ in range(args.kills)])
    parts = list(range(args.apart))
    chosen.shuffle(parts)
    for part in parts:
        run(f"cut-{part}", [seconds * (part + chosen.random()) / args.apart])
    tell(f"{figures['kills']} kills; all outputs alike: {figures['identical']}")
    return bool(figures["identical"])


def tell(line: str) -> None:
    """Print a line for the user."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
