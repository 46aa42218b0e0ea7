# SPDX-License-Identifier: MIT
"""Nothing is deleted that the user did not name, and nothing finished is lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oss_fused.errors import CheckpointError, NumericalOverflowError
from oss_fused.quant import pipeline
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from oss_fused.quant.checkpoint.place import OutputLock
from oss_fused.quant.pipeline import calibrate as search
from oss_fused.quant.policy import PolicySearch
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import SETTINGS, Models, calibrate, digests, tensors
from tests.quant.test_interrupted_and_bad import Stop, stop_after

SPECS = [TensorSpec("a", torch.float32, (3, 4)), TensorSpec("b", torch.bfloat16, (64,))]


def writer_of(output: Path, identity: str = "id", **options) -> CheckpointWriter:
    return CheckpointWriter(output, SPECS, 10**6, identity, **options)


def fill(writer: CheckpointWriter, value: float = 1.0) -> CheckpointWriter:
    for spec in SPECS:
        writer.write(spec.name, torch.full(spec.shape, value, dtype=spec.dtype))
        writer.done(spec.name, {})
    return writer


@pytest.fixture
def own(models: Models, tmp_path: Path) -> tuple[Path, Path]:
    """A model's copy in a folder beside a note, and that folder."""
    parent = tmp_path / "mine"
    source = parent / "model"
    shutil.copytree(models("llama"), source)
    (parent / "note").write_text("mine")
    return source, parent


def run_of(source: Path, output: Path, **options) -> Run:
    return Run(make_recipe(options.pop("recipe", {})), RunOptions(source, output, **options))


# --- the place of the output


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".", "contains MODEL"),
        ("model", "is MODEL"),
        ("model/out", "lies inside MODEL"),
        ("link", "contains MODEL"),
        ("model/../model/deep/out", "lies inside MODEL"),
    ],
)
def test_an_output_around_or_inside_the_source_is_refused(own, place, message) -> None:
    source, parent = own
    (parent / "link").symlink_to(parent)
    before = sorted(parent.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"--output=.*: {message}"):
        run_of(source, parent / place, overwrite=True)
    assert sorted(parent.rglob("*")) == before


def test_a_source_reached_by_links_is_kept_too(own, tmp_path: Path) -> None:
    source, parent = own
    link = tmp_path / "elsewhere"
    link.symlink_to(source)
    with pytest.raises(CheckpointError, match="contains MODEL"):
        run_of(link, parent, overwrite=True)


@pytest.mark.parametrize("name", ["home", "cwd"])
def test_folders_people_live_in_are_refused(own, tmp_path: Path, monkeypatch, name) -> None:
    lived = tmp_path / "user" / "deep"
    lived.mkdir(parents=True)
    if name == "home":
        monkeypatch.setenv("HOME", str(lived))
    else:
        monkeypatch.chdir(lived)
    for place in (lived, lived.parent, Path("/")):
        with pytest.raises(CheckpointError, match=r"--output=.*(is|contains) (the|MODEL)"):
            run_of(own[0], place, overwrite=True)


def test_a_folder_that_is_no_output_of_ours_is_refused(own, tmp_path: Path) -> None:
    source, _ = own
    output = tmp_path / "out"
    output.mkdir()
    run_of(source, output, overwrite=True)  # empty: nothing can be lost
    (output / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="no output of calibrate.py"):
        run_of(source, output, overwrite=True)
    output = tmp_path / "plain"
    shutil.copytree(source, output)
    with pytest.raises(CheckpointError, match="no output of calibrate.py"):
        run_of(source, output, overwrite=True)
    output = tmp_path / "made"
    run_of(source, output, recipe={"format": "compressed-tensors"}).execute()
    run_of(source, output, overwrite=True)
    (output / "adapters").mkdir()
    with pytest.raises(CheckpointError, match="holds the folder 'adapters'"):
        run_of(source, output, overwrite=True)


def test_files_the_run_reads_or_writes_elsewhere_are_kept(own, tmp_path: Path, text_file) -> None:
    source, _ = own
    output, stage = tmp_path / "out", tmp_path / "stage"
    calibrate(source, output)
    shutil.copy(text_file, output / "text.txt")
    data = {"dataset": str(output / "text.txt"), "num_samples": 2, "max_seq_length": 16}
    with pytest.raises(CheckpointError, match="contains --dataset"):
        run_of(source, output, overwrite=True, recipe=data)
    with pytest.raises(CheckpointError, match="contains --trend"):
        run_of(source, output, overwrite=True, kept={"--trend": output / "trend.json"})
    for place in (output, output / "stage", tmp_path):
        with pytest.raises(CheckpointError, match="--fp8-stage|MODEL"):
            run_of(source, output, overwrite=True, stage=place)
    with pytest.raises(CheckpointError, match="--fp8-stage=.*lies inside MODEL"):
        run_of(source, tmp_path / "o", stage=source / "stage")
    run_of(source, output, overwrite=True, stage=stage)


def test_overwriting_through_a_link_replaces_what_it_leads_to(own, tmp_path: Path) -> None:
    source, _ = own
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "disk" / "out")
    calibrate(source, link)
    before = digests(tmp_path / "disk" / "out")
    run_of(source, link, overwrite=True, recipe={"scheme": "W8A16"}).execute()
    assert link.is_symlink() and digests(link) != before
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match="leads to itself"):
        run_of(source, loop)


# --- two runs at once


def test_two_runs_of_different_settings_cannot_write_one_output(tmp_path: Path) -> None:
    first = writer_of(tmp_path / "out", "one")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for place in ("out", "link"):
        with pytest.raises(CheckpointError, match=r"--output=.*another run is writing it"):
            writer_of(tmp_path / place, "two", overwrite=True)
    fill(first).finish()
    with pytest.raises(CheckpointError, match="exists"):
        writer_of(tmp_path / "out", "two")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}


def test_an_output_that_appears_meanwhile_is_kept_and_so_is_the_work(own, tmp_path: Path) -> None:
    source, _ = own
    output = tmp_path / "out"

    def appear(partial: Path) -> None:
        # it could be replaced, were that asked for
        shutil.copytree(partial, output, ignore=shutil.ignore_patterns("state"))
        (output / "mine").touch()

    with pytest.raises(CheckpointError, match=r"--output=.*exists"):
        run_of(source, output).execute(complete=appear)
    assert (output / "mine").exists()
    (partial,) = tmp_path.glob("out.partial-*")
    assert (partial / "state" / "journal.jsonl").exists()
    shutil.rmtree(output)
    calibrated = run_of(source, output, resume=True).execute()
    assert calibrated.output.is_dir() and not partial.exists()


def test_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path\n"
        "from oss_fused.quant.checkpoint.place import OutputLock\n"
        f"lock = OutputLock(Path({str(tmp_path / 'out')!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / ".out.lock").exists()
    OutputLock(tmp_path / "out").release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_removed_while_waiting_is_not_trusted(tmp_path: Path, monkeypatch) -> None:
    flock, calls = fcntl.flock, []

    def removed_before(handle, how) -> None:
        if not calls:
            (tmp_path / ".out.lock").unlink()
        calls.append(how)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    lock = OutputLock(tmp_path / "out")
    assert len(calls) == 2 and (tmp_path / ".out.lock").exists()
    lock.release()


def test_a_search_holds_its_output_to_the_end(own, tmp_path: Path, text_file, monkeypatch) -> None:
    seen = []

    def rank(self) -> None:
        with pytest.raises(CheckpointError, match="another run is writing it"):
            OutputLock(tmp_path / "out")
        seen.append(True)
        raise Stop

    monkeypatch.setattr(PolicySearch, "rank", rank)
    with pytest.raises(Stop):
        search(target_recipe(text_file), RunOptions(own[0], tmp_path / "out"))
    assert seen
    OutputLock(tmp_path / "out").release()


# --- what is on the disk after a power cut


def test_data_reach_the_disk_before_the_journal_speaks_of_them(tmp_path, monkeypatch) -> None:
    events: list[tuple[str, int]] = []
    fsync = os.fsync
    writer = writer_of(tmp_path / "out")
    journal = writer.state / "journal.jsonl"

    def watched(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        events.append((name, journal.read_text().count("\n") if journal.exists() else -1))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    fill(writer)
    shard, lines = "model.safetensors", "journal.jsonl"
    assert events == [(shard, 0), (lines, 1), (shard, 1), (lines, 2)]
    events.clear()
    writer.finish()
    names = [name for name, _ in events]
    assert names[-1] == tmp_path.name and writer.partial.name in names and shard in names


@pytest.mark.parametrize("damage", ["lost", "short", "zeros", "header"])
@pytest.mark.parametrize("data", [True, False])
def test_a_lost_or_damaged_shard_is_written_again(
    models: Models, tmp_path: Path, text_file: Path, damage: str, data: bool
) -> None:
    settings = {**SETTINGS, "dataset": str(text_file)} if data else {}
    source, whole, cut = models("qwen3"), tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(22), **settings)
    (partial,) = cut.parent.iterdir()
    shard = sorted(partial.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    if damage == "lost":
        shard.unlink()
    elif damage == "short":
        shard.write_bytes(content[:-100])
    elif damage == "zeros":
        shard.write_bytes(content[:-4000] + bytes(4000))
    else:
        shard.write_bytes(bytes(64) + content[64:])
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)


@pytest.mark.parametrize("line", ["\0\0\0\0", "[]", '{"step": "a"}', "{"])
def test_a_journal_is_believed_up_to_its_first_bad_line(tmp_path: Path, line: str) -> None:
    writer = fill(writer_of(tmp_path / "out"))
    journal = writer.state / "journal.jsonl"
    first, second = journal.read_text().splitlines()
    journal.write_text(f"{first}\n{line}\n{second}\n")
    writer.close()
    assert set(writer_of(tmp_path / "out", resume=True).steps) == {"a"}


def test_damaged_states_between_layers_are_computed_again(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {**SETTINGS, "dataset": str(text_file)}
    source, whole, cut = models("qwen3"), tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(22), **settings)
    (states,) = cut.parent.rglob("hidden-*.safetensors")
    states.write_bytes(states.read_bytes()[:-10])
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)


# --- the stage of a search


def target_recipe(text_file: Path, target: float = 1.5):
    settings = {"dataset": str(text_file), "max_seq_length": 32, "num_samples": 12}
    return make_recipe({**settings, "accuracy_target": target})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), NumericalOverflowError()]
)
def test_no_error_in_the_search_deletes_the_stage(
    own, tmp_path: Path, text_file, monkeypatch, error
) -> None:
    def fails(self) -> None:
        raise error

    said: list[str] = []
    options = RunOptions(own[0], tmp_path / "out", resume=True)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(PolicySearch, "rank", fails)
        search(target_recipe(text_file), options, say=said.append)
    (stage,) = tmp_path.glob("out.all-fp8-*")
    assert str(stage) in said[-1]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_make_base", fails)
        search(target_recipe(text_file), options)
    assert not stage.exists() and (tmp_path / "out" / "config.json").exists()


def test_a_stage_of_other_weights_or_samples_is_refused(own, tmp_path: Path, text_file) -> None:
    source, parent = own
    text = tmp_path / "text.txt"
    shutil.copy(text_file, text)
    stage = tmp_path / "stage"
    search(target_recipe(text), RunOptions(source, tmp_path / "out", stage=stage))
    # the same model elsewhere is the same model
    moved = parent / "moved"
    shutil.copytree(source, moved)
    for path in moved.iterdir():
        os.utime(path, (1, 1))
    search(target_recipe(text, 1.6), RunOptions(moved, tmp_path / "two", stage=stage))
    state = tensors(moved)
    state["model.layers.1.mlp.up_proj.weight"][48, 0] += 1
    save_file(state, moved / "model.safetensors")
    with pytest.raises(CheckpointError, match="--fp8-stage=.*from other weights than those of MOD"):
        search(target_recipe(text), RunOptions(moved, tmp_path / "three", stage=stage))
    text.write_text(text.read_text().replace("colliers", "trawlers"))
    with pytest.raises(CheckpointError, match="--fp8-stage=.*other calibration samples"):
        search(target_recipe(text), RunOptions(source, tmp_path / "four", stage=stage))
    record = json.loads((stage / "calibration.json").read_text())
    (stage / "calibration.json").write_text(json.dumps({**record, "source": None}))
    with pytest.raises(CheckpointError, match="--fp8-stage=.*from other weights"):
        search(target_recipe(text), RunOptions(source, tmp_path / "five", stage=stage))


def test_the_digest_is_of_the_weights_and_not_of_their_place(tmp_path: Path) -> None:
    def made(name: str, **changes: torch.Tensor) -> CheckpointReader:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        base = {"w": torch.zeros(3 << 20), "b": torch.zeros(5)}
        save_file({**base, **changes}, folder / "model.safetensors")
        return CheckpointReader(folder)

    first = made("a").digest()
    assert made("b").digest() == first
    for at in (0, 5000, 1 << 20, (3 << 20) - 1):
        changed = torch.zeros(3 << 20)
        changed[at] = 1
        assert made(f"at-{at}", w=changed).digest() != first
    assert made("shape", b=torch.zeros(5, 1)).digest() != first
