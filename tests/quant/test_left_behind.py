# SPDX-License-Identifier: MIT
"""What a kill or a full disk leaves, and how the next run settles it."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from oss_fused.errors import CheckpointError
from oss_fused.quant import streaming
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint import writer
from oss_fused.quant.pipeline import end_replacements
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import SETTINGS, Models, calibrate, changed, digests
from tests.quant.test_interrupted_and_bad import Stop, stop_after


@pytest.mark.parametrize("moved", [False, True], ids=["nothing-there", "new-one-there"])
def test_a_kill_while_an_output_is_replaced_leaves_one(
    models: Models, tmp_path: Path, monkeypatch, moved: bool
) -> None:
    output, old = tmp_path / "out", tmp_path / "out.replaced"
    calibrate(models("llama"), output)
    before, rename = digests(output), Path.rename
    options = RunOptions(models("llama"), output, overwrite=True)

    def killed(path: Path, target: Path) -> Path:
        if ".partial-" in path.name and not moved:
            raise Stop
        return rename(path, target)

    with monkeypatch.context() as patch, contextlib.suppress(Stop):
        patch.setattr(writer, "settle_replacement", lambda _: None)
        patch.setattr(Path, "rename", killed)
        Run(make_recipe({"scheme": "W8A16"}), options).execute()
    assert old.is_dir() and output.exists() == moved
    with pytest.raises(CheckpointError, match="exists"):
        end_replacements(options) if moved else None
        calibrate(models("llama"), output)
    assert (digests(output) == before) is not moved
    assert not list(tmp_path.glob("*.replaced")) and not list(tmp_path.glob(".*"))


def test_a_users_folder_of_the_replaced_ones_name_is_kept(models: Models, tmp_path: Path) -> None:
    output, mine = tmp_path / "out", tmp_path / "out.replaced"
    calibrate(models("llama"), mine)
    calibrate(models("llama"), output)
    before = digests(mine)
    options = RunOptions(models("llama"), output, overwrite=True)
    end_replacements(options)
    with pytest.raises(CheckpointError, match=r"--overwrite: .*out\.replaced exists"):
        Run(make_recipe({}), options).execute()
    assert digests(mine) == before


def test_a_resume_keeps_no_file_that_the_source_has_no_more(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "additional_chat_templates").mkdir()
    for name in ("notes.txt", "additional_chat_templates/tool.jinja"):
        (source / name).write_text("x")

    def stop(_: Path) -> None:
        raise Stop

    with pytest.raises(Stop):
        Run(make_recipe({}), RunOptions(source, tmp_path / "out")).execute(complete=stop)
    (source / "notes.txt").unlink()
    (source / "additional_chat_templates" / "tool.jinja").unlink()
    Run(make_recipe({}), RunOptions(source, tmp_path / "out", resume=True)).execute()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"notes.txt", "additional_chat_templates"} and "model.safetensors" in names


def test_a_disk_that_is_full_of_hidden_states_is_told_as_such(
    models: Models, tmp_path: Path, text_file: Path, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    settings = {**SETTINGS, "dataset": str(text_file)}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as error:
        patch.setattr(streaming, "save_file", full)
        calibrate(models("llama"), tmp_path / "out", **settings)
    assert error.value.errno == errno.ENOSPC
    calibrate(models("llama"), tmp_path / "out", resume=True, **settings)


def test_hidden_states_are_as_large_as_said(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {**SETTINGS, "dataset": str(text_file)}
    run = Run(make_recipe(settings), RunOptions(models("llama"), tmp_path / "out"))
    with pytest.raises(Stop):
        run.execute(stop_after(20))
    (saved,) = tmp_path.rglob("hidden-*.safetensors")
    assert 0 <= 2 * saved.stat().st_size - run.state_bytes < 2000
