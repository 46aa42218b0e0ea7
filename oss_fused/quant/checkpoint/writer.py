# SPDX-License-Identifier: MIT
"""Writes a checkpoint into ``<output>.partial-<id>`` and renames it when it is complete.

Every tensor's place is known before the first byte is written, so that tensors may be written one
at a time in any order, and a killed run goes on where its journal ends. A line of the journal is
written after the data it speaks of has reached the disk, and holds that data's checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oss_fused import __version__
from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.place import (
    OutputLock,
    check_replaceable,
    check_room,
    check_writable,
    real,
    replacement_of,
    settle_replacement,
)
from oss_fused.quant.checkpoint.reader import INDEX, SINGLE

_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
}
_CHUNK = 1 << 24  # bytes read at once to check a shard
_PARTIAL = ".partial-"  # between the output's name and the run's identity
_STATE = "state"  # inside the partial folder; removed before the rename


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    file: str
    start: int
    spec: TensorSpec


class CheckpointWriter:
    """Writes tensors to their places; ``finish`` makes the output folder appear."""

    def __init__(
        self,
        output: Path,
        specs: Sequence[TensorSpec],
        max_shard_bytes: int,
        identity: str,
        resume: bool = False,
        overwrite: bool = False,
        lock: OutputLock | None = None,
        state_bytes: int = 0,
    ) -> None:
        """Make or take over the working folder.

        Args:
            output: the folder to make; a link means the folder that it leads to.
            specs: every tensor that will be written, in the order that decides the shards.
            max_shard_bytes: shards close before they exceed it (a larger tensor has its own).
            identity: hash of the settings; a partial folder of the same identity can be resumed.
            resume: go on from such a folder instead of starting over.
            overwrite: ``finish`` may replace an earlier output of calibration.
            lock: of the output, if the caller holds it; else it is taken here.
            state_bytes: what the caller will write into ``state``.

        Raises:
            CheckpointError: another run writes the same output, something stands there that may
                not be replaced, another release of this package began the work, two tensors have
                one name, or the disk has too little room.
        """
        self.output = real(output)
        self.overwrite = overwrite
        self.partial = self.output.with_name(f"{self.output.name}{_PARTIAL}{identity}")
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self._needed = self.total_bytes + state_bytes
        self._shards = _split(specs, max_shard_bytes)
        self._places = _place(self._shards)
        self.state = self.partial / _STATE
        self._journal = self.state / "journal.jsonl"
        self._release = self.state / "release"  # that began the work
        self._written: dict[str, int] = {}  # checksum of each tensor since the last step
        self._own_lock = None if lock is not None else OutputLock(self.output)
        try:
            settle_replacement(self.output)
            self._check_output()
            self._claim(resume)
            self._create_shards()
            self.steps: dict[str, dict[str, Any]] = self._read_journal()
        except BaseException:
            self.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place.

        Raises:
            CheckpointError: the tensor was not announced so, or a scale in it is not a positive
                finite number.
        """
        place = self._places.get(name)
        if place is None or (tensor.dtype, tuple(tensor.shape)) != (
            place.spec.dtype,
            place.spec.shape,
        ):
            expected = place.spec if place else "no such tensor"
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}: expected {expected}"
            )
        # compressed e8m0 scales are bytes; every float scale must be a usable multiplier
        is_scale = name.endswith("_scale") and tensor.is_floating_point()
        if is_scale and not bool((tensor.isfinite() & (tensor > 0)).all()):
            raise CheckpointError(
                f"{self.output}: tensor {name!r} holds a zero, negative or non-finite scale"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with open(self.partial / place.file, "r+b") as handle:
            handle.seek(place.start)
            handle.write(data.data)
        self._written[name] = zlib.crc32(data.data)

    def done(self, step: str, metrics: dict[str, Any]) -> None:
        """Note that every tensor of ``step`` is written; ``metrics`` come back after a resume."""
        # the journal lists only data that survives a power cut
        for file in {self._places[name].file for name in self._written}:
            sync(self.partial / file)
        self.steps[step] = metrics
        entry = {"step": step, "facts": metrics, "sums": self._written}
        with open(self._journal, "a") as handle:
            handle.write(json.dumps(entry) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self._written = {}

    def finish(self) -> None:
        """Write the index, drop the working state and move the folder to its name.

        Raises:
            CheckpointError: something stands there now that may not be replaced; the working
                folder stays.
            OSError: nothing was moved, or (the output is complete) the replaced folder could not
                be removed.
        """
        self._check_output()
        if len(self._shards) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {name: p.file for name, p in sorted(self._places.items())},
            }
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.state)
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        if self.output.exists():
            # --overwrite: the old folder goes only now that the new one is complete
            old, mark = replacement_of(self.output)
            mark.touch()
            self.output.rename(old)
            try:
                self.partial.rename(self.output)
                sync(self.output.parent)
            finally:
                settle_replacement(self.output)
        else:
            # fails on a folder that appeared since the check, unless it is empty
            self.partial.rename(self.output)
            sync(self.output.parent)
        self.close()

    def close(self) -> None:
        """Release the output. The working folder stays for a resume."""
        if self._own_lock is not None:
            self._own_lock.release()

    def drop_assets(self) -> None:
        """Remove files that an interrupted run left beside the shards: they may be outdated."""
        kept = {_STATE, *(file for file, _ in self._shards)}
        for path in self.partial.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def discard(self) -> None:
        """Remove the working folder."""
        self._remove(ignore_errors=True)
        self.close()

    def _check_output(self) -> None:
        check_replaceable(self.output, f"--output={str(self.output)!r}", self.overwrite)
        old, _ = replacement_of(self.output)
        if self.output.exists() and old.exists():
            raise CheckpointError(
                f"--overwrite: {old} exists, where the old output waits for the new one; expected "
                f"no such file or folder"
            )

    def _claim(self, resume: bool) -> None:
        if self.partial.exists() and not resume:
            self._remove()
        if self._journal.exists():
            self._check_release()
        check_room(self.output, self.output.parent, self._needed - _held([self.partial]))
        self.state.mkdir(parents=True, exist_ok=True)
        self._release.write_text(__version__)
        sync(self._release)

    def _check_release(self) -> None:
        """Refuse the work of another release, whose rounding may be another."""
        begun = self._release.read_text() if self._release.exists() else "an earlier release"
        if begun != __version__:
            raise CheckpointError(
                f"--resume: {self.partial} was begun by oss_fused {begun}, this is {__version__}; "
                f"expected the release that began it, or no --resume, to start over"
            )

    def _remove(self, ignore_errors: bool = False) -> None:
        # the journal first: after a kill it must not list shards that no longer exist
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors)

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """The steps whose data is on the disk as it was written.

        The first that is not, and all after it, are done again: a layer's inputs come from those
        before it.
        """
        steps, lines = {}, []
        if self._journal.exists():
            # a last line without a newline is incomplete: the run was killed while writing it
            for line in self._journal.read_text(errors="replace").split("\n")[:-1]:
                try:
                    entry = json.loads(line)
                    step, metrics, sums = entry["step"], entry["facts"], entry["sums"]
                except (ValueError, KeyError, TypeError):
                    break
                if any(self._checksum(name) != known for name, known in sums.items()):
                    break
                steps[step] = metrics
                lines.append(f"{line}\n")
        part = self._journal.with_suffix(".part")
        part.write_text("".join(lines))
        sync(part)
        part.replace(self._journal)
        for folder in (self.state, self.partial, self.output.parent):
            sync(folder)
        return steps

    def _checksum(self, name: str) -> int:
        """Of a tensor's bytes on the disk; -1 if there is no such tensor."""
        place, total = self._places.get(name), 0
        if place is None:
            return -1
        with open(self.partial / place.file, "rb") as handle:
            handle.seek(place.start)
            rest = place.spec.nbytes
            while rest:
                data = handle.read(min(rest, _CHUNK))
                if not data:
                    return -1
                total, rest = zlib.crc32(data, total), rest - len(data)
        return total

    def _create_shards(self) -> None:
        for file, specs in self._shards:
            header = _header(specs)
            path = self.partial / file
            size = len(header) + sum(spec.nbytes for spec in specs)
            if path.is_file() and path.stat().st_size == size:
                with open(path, "rb") as handle:
                    if handle.read(len(header)) == header:
                        continue
            with open(path, "wb") as handle:
                handle.write(header)
                handle.truncate(size)


def check_places(places: Mapping[Path, int]) -> None:
    """Refuse, before a run, outputs that cannot be made or do not fit their disks together.

    What unfinished runs hold counts as free: a resume has it, and any other run removes its own.

    Args:
        places: output -> its bytes.

    Raises:
        CheckpointError: names the output.
        OSError: the disk is full.
    """
    needed: dict[int, int] = {}
    for place, size in places.items():
        output = real(place)
        folder = check_writable(output)
        begun = f"{output.name}{_PARTIAL}"
        held = _held(path for path in folder.iterdir() if path.name.startswith(begun))
        disk = folder.stat().st_dev
        needed[disk] = needed.get(disk, 0) + max(0, size - held)
        check_room(output, folder, needed[disk])


def _held(partials: Iterable[Path]) -> int:
    """Bytes on the disk of working folders."""
    files = (file for partial in partials for file in partial.rglob("*.safetensors"))
    return sum(file.stat().st_blocks * 512 for file in files)


def _split(specs: Sequence[TensorSpec], limit: int) -> list[tuple[str, list[TensorSpec]]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return [(SINGLE, _aligned(groups[0]))]
    total = len(groups)
    return [
        (f"model-{number:05d}-of-{total:05d}.safetensors", _aligned(group))
        for number, group in enumerate(groups, 1)
    ]


def _aligned(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Wide dtypes first, as safetensors orders them: every tensor is aligned to its item size."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _place(shards: Sequence[tuple[str, list[TensorSpec]]]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for file, specs in shards:
        start = len(_header(specs))
        for spec in specs:
            if spec.name in places:
                raise CheckpointError(
                    f"tensor {spec.name!r}: would be written twice; expected each name once"
                )
            places[spec.name] = _Place(file, start, spec)
            start += spec.nbytes
    return places


def sync(path: Path) -> None:
    """Wait until a file's or folder's contents are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
