# SPDX-License-Identifier: MIT
"""A path that cannot be written ends a script before its work, and not after it."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import pytest
from harness.arguments import output_file, output_folder

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# scripts whose checks are in the code that makes the file, or that write where they read
OWN_CHECKS = {
    "bench_api_server",
    "bench_decode",
    "bench_kv_cache",
    "bench_monitor",
    "bench_scheduler",
    "bench_streaming",
    "bench_switch",
    "calibration_report",
    "compare_options",
    "evaluate",
    "evaluate_logits",
    "make_model",
    "make_smollm2",
    "mutants",
    "train_tiny_gpt_oss",
    "tune",
    "calibrate_options",
}


def unchecked():
    """Scripts with an --output or --json that is a plain path."""
    for path in sorted(SCRIPTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = getattr(node.args[0], "value", None)
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            kind = getattr(given.get("type"), "id", None)
            if name in ("--output", "--json") and not str(kind).startswith("output_"):
                yield path.stem


def test_every_script_checks_what_it_writes():
    assert sorted(set(unchecked()) - OWN_CHECKS) == []


@pytest.mark.parametrize("kind", [output_file, output_folder])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, kind) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match="file/new.*cannot be written"):
        kind(str(tmp_path / "file" / "new"))


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder"):
        output_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="is a file"):
        output_folder(str(tmp_path / "file"))
    assert output_file(str(tmp_path / "file")).read_text() == "kept"
    assert output_folder(str(tmp_path / "new")).is_dir()


@pytest.mark.parametrize("script", ["doctor.py --json", "measure_house.py --output"])
def test_scripts_end_with_a_usage_error(tmp_path: Path, script: str) -> None:
    (tmp_path / "file").write_text("")
    name, flag = script.split()
    command = [sys.executable, str(SCRIPTS / name), flag, str(tmp_path / "file" / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"argument {flag}: " in done.stderr and "cannot be written" in done.stderr
