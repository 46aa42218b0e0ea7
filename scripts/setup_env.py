#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Make .venv with everything the project needs, from a complete lock; a rerun takes seconds.

Runs on any Python 3.11 to 3.14 with nothing installed. On a machine with an NVIDIA GPU the
environment holds vLLM's CUDA build, elsewhere its CPU build.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 11), (3, 14))
TORCH_REMEDY = (
    "If the index lacks PyTorch's CPU build, install it with uv (python3 -m pip install uv):\n"
    "    uv venv --seed .venv\n"
    "    uv pip install --python .venv --torch-backend cpu torch==2.13.0\n"
    "  and run this again."
)


class StepFailed(Exception):
    """A step of the set-up ended with an error; the text says which and how to retry."""


def main() -> int:
    """Parse the command line, run the steps, return the exit code."""
    args = parse_args()
    version = sys.version_info[:2]
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        print(
            f"setup: python={version[0]}.{version[1]}: expected 3.11 to 3.14; "
            f"run e.g. `make PYTHON=python3.12 setup`",
            file=sys.stderr,
        )
        return 2
    flavour = detect_flavour() if args.flavour == "auto" else args.flavour
    venv, lock = Path(args.venv).resolve(), ROOT / "deploy" / flavour / "requirements.lock"
    stamp, wanted = venv / ".oss-fused-setup", fingerprint(flavour, lock)
    if stamp.exists() and stamp.read_text() == wanted and not args.force:
        print(f"setup: {venv.name} is up to date ({flavour})", file=sys.stderr)
        return 0
    # what a killed run leaves is not up to date, whatever was installed before it
    stamp.unlink(missing_ok=True)
    try:
        install(venv, flavour, lock)
    except StepFailed as error:
        print(f"\nsetup failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    stamp.write_text(wanted)
    return 0


def parse_args() -> argparse.Namespace:
    """Command line of the set-up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--venv", default=str(ROOT / ".venv"), help="environment to make (default: .venv)"
    )
    parser.add_argument(
        "--flavour",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="vLLM build: auto takes cuda where nvidia-smi finds a GPU (default: auto)",
    )
    parser.add_argument(
        "--force", action="store_true", help="install again even if nothing changed"
    )
    return parser.parse_args()


def detect_flavour() -> str:
    """Return "cuda" where nvidia-smi lists a GPU, else "cpu"."""
    tool = shutil.which("nvidia-smi")
    if tool and subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.strip():
        return "cuda"
    return "cpu"


def fingerprint(flavour: str, lock: Path) -> str:
    """Hash of everything that decides what the environment holds."""
    digest = hashlib.sha256(f"{flavour} {sys.version}".encode())
    for path in (
        lock,
        ROOT / "pyproject.toml",
        Path(__file__),
        ROOT / "deploy/cpu/vllm/pyproject.toml",
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Step(NamedTuple):
    """Commands that run side by side, and what to do if one of them fails."""

    title: str
    commands: Sequence[Sequence[str]]
    remedy: str = ""


def install(venv: Path, flavour: str, lock: Path) -> None:
    """Run the steps, each with its number, name and duration."""
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    local = [*pip, "--quiet", "--no-build-isolation"]
    steps: list[Step] = []
    if not python.exists():
        steps.append(Step(f"make {venv.name}", [[sys.executable, "-m", "venv", str(venv)]]))
    elif not (venv / "bin" / "pip").exists():
        # made by `uv venv` without --seed
        steps.append(
            Step(f"install pip in {venv.name}", [[str(python), "-m", "ensurepip", "--default-pip"]])
        )
    hint = TORCH_REMEDY if flavour == "cpu" else "check the network and the free disk (12 GB)"
    with tempfile.TemporaryDirectory() as scratch:
        count, shares = divide(lock, Path(scratch))
        commands = [[*pip, "--no-compile", "-r", str(share)] for share in shares]
        steps.append(Step(f"install {count} locked packages ({flavour})", commands, hint))
        # pip would do it on one core; what does not compile is no fault, some files are for others
        compiler = "import compileall as c, re, sys\nrx = re.compile('/tests?/')\n"
        compiler += "c.compile_dir(sys.argv[1], quiet=2, workers=0, rx=rx)"
        steps.append(Step("byte-compile them", [[str(python), "-c", compiler, str(venv / "lib")]]))
        if flavour == "cpu":
            # built from a copy: setuptools leaves build folders beside the source
            alias = Path(shutil.copytree(ROOT / "deploy/cpu/vllm", Path(scratch) / "vllm"))
            steps.append(Step("name the CPU build of vLLM `vllm`", [[*local, str(alias)]]))
        steps.append(Step("install oss_fused", [[*local, "--editable", str(ROOT)]]))
        check = [str(python), "-c", "import torch, transformers, vllm, oss_fused"]
        steps.append(Step("check the imports", [check]))
        for number, step in enumerate(steps, 1):
            run_step(step._replace(title=f"[{number}/{len(steps)}] {step.title}"))


def divide(lock: Path, folder: Path) -> tuple[int, list[Path]]:
    """The number of packages of ``lock``, and files that each list a share of them.

    pip uses one core and waits for the network: two of them take half the time.
    """
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    options = [line for line in lines if line.startswith("-")]
    packages = [line for line in lines if not line.startswith("-")]
    files = []
    for share in range(2):
        files.append(folder / f"requirements-{share}.txt")
        files[-1].write_text("\n".join([*options, *packages[share::2]]) + "\n")
    return len(packages), files


def run_step(step: Step) -> None:
    """Run its commands; stream one status line, keep the ends of their output for the error."""
    print(step.title, end=" ", flush=True, file=sys.stderr)
    start = last_dot = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        running = []
        for number, command in enumerate(step.commands):
            log = stack.enter_context((Path(logs) / str(number)).open("w+"))
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
            stack.callback(process.wait)
            # of an interrupt, or of another command's failure
            stack.callback(process.terminate)
            running.append((command, process, log))
        while any(process.poll() is None for _, process, _ in running):
            if any(process.poll() for _, process, _ in running):
                break
            time.sleep(0.05)
            if time.monotonic() - last_dot > 1:
                print(".", end="", flush=True, file=sys.stderr)
                last_dot = time.monotonic()
        for command, process, log in running:
            if process.poll():
                log.seek(0)
                raise StepFailed(failure(step, command, log.read()))
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)


def failure(step: Step, command: Sequence[str], output: str) -> str:
    """The error message of a command that failed."""
    tail = [line for line in output.splitlines()[-25:] if not line.startswith("WARNING")]
    lines = [step.title, f"  command: {' '.join(command)}", *tail]
    if step.remedy:
        lines.append(f"  {step.remedy}")
    return "\n".join([*lines, "  Retry with the same command; finished steps are quick."])


if __name__ == "__main__":
    sys.exit(main())
