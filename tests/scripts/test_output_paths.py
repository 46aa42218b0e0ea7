# SPDX-License-Identifier: MIT
"""A path that cannot be written ends a script before its work, and not after it."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from pathlib import Path

import pytest
from harness.arguments import output_file, output_folder, summary_file

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# scripts whose checks are in the code that makes the file, or that write where they read
OWN_CHECKS = {
    "compare_options",
    "generate_fp8_report",
    "make_model",
    "make_smollm2",
    "train_tiny_gpt_oss",
    "calibrate_options",
}


WRITTEN = ("--output", "--json", "--summary", "--trend", "--csv", "--markdown", "--record")
CHECKS = ("output_file", "output_folder", "summary_file", "trend_file")


def unchecked():
    """Scripts with an argument for a file or folder to write that is a plain path."""
    for path in sorted(SCRIPTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = getattr(node.args[0], "value", None)
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            kind = getattr(given.get("type"), "id", None)
            if name in WRITTEN and kind not in CHECKS and "action" not in given:
                yield path.stem


def test_every_script_checks_what_it_writes():
    assert sorted(set(unchecked()) - OWN_CHECKS) == []


@pytest.mark.parametrize("kind", [output_file, output_folder, summary_file])
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
    assert output_folder(str(tmp_path / "new")) == tmp_path / "new"


@pytest.mark.parametrize("kind", [output_file, output_folder, summary_file])
def test_a_check_leaves_no_folder_behind(tmp_path: Path, kind) -> None:
    kind(str(tmp_path / "new" / "folder" / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [output_file, output_folder])
def test_a_name_that_no_disk_takes_is_a_usage_error(tmp_path: Path, kind) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: File name too long"):
        kind(str(tmp_path / ("x" * 300)))


@pytest.mark.parametrize("content", ["[1]", "no JSON"])
def test_figures_go_into_a_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(argparse.ArgumentTypeError, match=r"summary\.json.*JSON"):
        summary_file(str(tmp_path / "summary.json"))
    (tmp_path / "summary.json").write_text("{}")
    assert summary_file(str(tmp_path / "summary.json")).read_text() == "{}"


@pytest.mark.parametrize(
    "command",
    [
        "analyze_model.py nowhere --output new/folder",
        "bench_library.py --output new/folder --device foo",
        "bench_scheduler.py --output new/folder/x.json --steps 0",
        "generate_fp8_report.py nowhere.json --output new/folder",
    ],
)
def test_bad_input_leaves_no_folder_behind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert stopped.value.code == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["doctor.py --json", "measure_house.py --output"])
def test_scripts_end_with_a_usage_error(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    name, flag = script.split()
    monkeypatch.setattr(sys, "argv", [name, flag, str(tmp_path / "file" / "out.json")])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in said
    assert f"argument {flag}: " in said and "cannot be written" in said
