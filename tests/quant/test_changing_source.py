# SPDX-License-Identifier: MIT
"""A source that somebody writes while a run reads it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint.source import SourceReader
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import Models
from tests.quant.test_source import factors, lora, write_adapter

NAME = "model.layers.0.mlp.up_proj.weight"


def replace_file(path: Path) -> None:
    state = load_file(path)
    state["model.norm.weight"] += 1
    save_file(state, path.with_name("new.safetensors"))
    path.with_name("new.safetensors").rename(path)


def write_in_place(path: Path) -> None:
    """Change a byte in the middle of a tensor."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        start, stop = json.loads(file.read(length))[NAME]["data_offsets"]
        assert stop - start == 96 * 64 * 2
        place = 8 + length + start + 5000
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), place)


@pytest.mark.parametrize("write", [replace_file, write_in_place])
def test_weights_that_change_during_the_run_are_refused(
    models: Models, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(models("llama"), source)

    def progress(steps, _):
        for number, step in enumerate(steps):
            if number == 5:
                write(source / "model.safetensors")
            yield step

    def complete(partial: Path) -> None:
        raise AssertionError("the run went on")

    with pytest.raises(CheckpointError, match="weights changed while the run read them"):
        Run(make_recipe({}), RunOptions(source, tmp_path / "out")).execute(progress, complete)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, None], ids=["emptied", "garbled", "removed"]
)
def test_a_shard_that_is_damaged_meanwhile_is_named(
    models: Models, tmp_path: Path, content: bytes | None
) -> None:
    source = tmp_path / "source"
    shutil.copytree(models("llama"), source)
    path = source / "model.safetensors"

    def progress(steps, _):
        yield from steps
        path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"source/model\.safetensors: cannot be read as"):
        Run(make_recipe({}), RunOptions(source, tmp_path / "out")).execute(progress)


def test_an_adapter_is_part_of_what_must_not_change(models: Models, tmp_path: Path) -> None:
    linear = "model.layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "lora", lora(linear, *factors(64, 64, 4)))
    before = SourceReader(models("llama"), adapter).identity()
    assert SourceReader(models("llama"), adapter).identity() == before
    os.utime(adapter / "adapter_model.safetensors", ns=(0, 0))
    assert SourceReader(models("llama"), adapter).identity() != before
