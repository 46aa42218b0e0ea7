# SPDX-License-Identifier: MIT
"""scripts/setup_env.py: shares of the lock, commands side by side, a failure told with its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
script = load_script("setup_env")
Step, StepFailed = script.Step, script.StepFailed


@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_the_shares_are_the_lock(tmp_path: Path, flavour: str) -> None:
    lock = ROOT / "deploy" / flavour / "requirements.lock"
    count, files = script.divide(lock, tmp_path)
    shares = [file.read_text().splitlines() for file in files]
    packages = [line for share in shares for line in share if not line.startswith("-")]
    wanted = [line for line in lock.read_text().splitlines() if "==" in line and line[0] != "#"]
    assert sorted(packages) == sorted(wanted) and len(packages) == count
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_commands_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other's file."""
    wait = "import pathlib, sys, time; a, b = map(pathlib.Path, sys.argv[1:]); a.touch()\n"
    wait += "while not b.exists(): time.sleep(0.01)"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    script.run_step(
        Step("wait", [[sys.executable, "-c", wait, *files] for files in ((a, b), (b, a))])
    )


def test_a_failure_ends_the_others_and_is_told() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    fail = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    begin = time.monotonic()
    with pytest.raises(StepFailed, match=r"(?s)\[1/1\] install.*no such package\n  check the disk"):
        script.run_step(Step("[1/1] install", [sleep, fail], "check the disk"))
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("flags", [["--force"], []])
def test_a_killed_run_leaves_nothing_that_looks_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """The lock of before may come back (git checkout) while the packages are of both."""
    main, stamp = script.main, tmp_path / ".oss-fused-setup"
    wanted = script.fingerprint("cpu", ROOT / "deploy/cpu/requirements.lock")
    stamp.write_text(wanted if flags else "of another lock")
    argv = ["setup_env.py", "--venv", str(tmp_path), "--flavour", "cpu", *flags]
    monkeypatch.setattr(sys, "argv", argv)

    def killed(*arguments: object) -> None:
        assert not stamp.exists(), "SIGKILL runs no handler"
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "install", killed)
    assert main() == 130 and not stamp.exists()
    monkeypatch.setattr(script, "install", lambda *arguments: None)
    assert main() == 0 and stamp.read_text() == wanted


def test_an_environment_without_pip_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `uv venv` makes it without --seed."""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    titles = []
    install = script.install
    monkeypatch.setattr(script, "run_step", lambda step: titles.append(step.title))
    lock = ROOT / "deploy/cuda/requirements.lock"
    install(venv, "cuda", lock)
    assert titles[0] == f"[1/{len(titles)}] install pip in .venv"
    (venv / "bin/pip").touch()
    del titles[:]
    install(venv, "cuda", lock)
    assert titles[0].startswith("[1/") and "locked packages" in titles[0]
