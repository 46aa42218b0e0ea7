# SPDX-License-Identifier: MIT
"""Where a checkpoint may be written: what exists there, and which run writes there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from oss_fused.errors import CheckpointError
from oss_fused.files import writable
from oss_fused.quant.checkpoint.assets import TEMPLATES

# what a run makes beside files
_OWN_FOLDERS = {"report", TEMPLATES}


def real(path: Path) -> Path:
    """``path`` with every link followed: a link to a folder means that folder."""
    return Path(os.path.realpath(path))


def check_apart(
    place: Path, flag: str, folders: Mapping[str, Path], files: Mapping[str, Path]
) -> None:
    """Refuse a place that holds what the user did not name.

    Args:
        place: folder to be written or removed, links followed.
        flag: what the user calls it, for the message.
        folders: name -> folder that ``place`` must neither contain nor lie in.
        files: name -> path that ``place`` must not contain.

    Raises:
        CheckpointError: names both.
    """
    users = {"the home folder": Path.home(), "the working directory": Path.cwd()}
    for name, path in (users | {**files, **folders}).items():
        for kept in {Path(os.path.abspath(path)), real(path)}:
            if kept == place or place in kept.parents:
                verb = "is" if kept == place else "contains"
                raise CheckpointError(f"{flag}: {verb} {name} ({path}); expected another folder")
            if name in folders and kept in place.parents:
                raise CheckpointError(
                    f"{flag}: lies inside {name} ({path}); expected a folder outside"
                )


def check_replaceable(place: Path, flag: str, overwrite: bool) -> None:
    """Refuse a place that exists, unless it is an output of calibration that may be replaced.

    An empty folder may be replaced as well.

    Raises:
        CheckpointError: says why it may not.
    """
    if place.is_symlink():
        raise CheckpointError(f"{flag}: is a link that leads to itself; expected a folder")
    if not place.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{flag}: exists; choose another folder or pass --overwrite")
    if not place.is_dir():
        raise CheckpointError(f"{flag}: is a file; expected a folder name")
    if os.path.ismount(place):
        raise CheckpointError(
            f"{flag}: is a mount point and cannot be replaced; name a folder in it"
        )
    foreign = [p.name for p in place.iterdir() if p.is_dir() and p.name not in _OWN_FOLDERS]
    if foreign or (any(place.iterdir()) and not _is_output(place)):
        found = f"holds the folder {foreign[0]!r}" if foreign else "has no recipe.yaml of ours"
        raise CheckpointError(
            f"{flag}: exists and {found}: it is no output of calibrate.py, so --overwrite does not "
            f"replace it; expected another folder, or remove it yourself"
        )


def check_writable(output: Path) -> Path:
    """Refuse an output that cannot be made, or that another run writes; nothing is made.

    Returns:
        The nearest folder around it that exists.

    Raises:
        CheckpointError: says why not.
        OSError: the disk is full.
    """
    with _writing_beside(output):
        folder = writable(output)
    if OutputLock.path_of(output).exists():
        OutputLock(output).release()
    return folder


def check_room(output: Path, folder: Path, needed: int) -> None:
    """Refuse an output that needs more bytes than are free on the disk of ``folder``.

    Raises:
        CheckpointError: names both.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"--output={str(output)!r}: needs {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are "
            f"free on that disk"
        )


@contextmanager
def _writing_beside(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"--output={str(output)!r}: nothing can be written beside it: {error.strerror}; "
            f"expected another place"
        ) from None


def replacement_of(output: Path) -> tuple[Path, Path]:
    """Where --overwrite keeps the old output until the new one is there, and the mark of that."""
    return output.with_name(f"{output.name}.replaced"), output.with_name(f".{output.name}.replaced")


def settle_replacement(output: Path) -> None:
    """Bring the old output back where the new one is not there, else remove it.

    A folder of that name without the mark is the user's, and stays. The caller holds the lock.
    """
    old, mark = replacement_of(output)
    if not mark.exists():
        return
    if old.exists() and output.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(output)
    mark.unlink()


class OutputLock:
    """Keeps other runs off an output, by a locked file beside it.

    The kernel drops the lock with the process, however it ends.
    """

    def __init__(self, output: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another run holds it, or the disk cannot lock or make files there.
            OSError: the disk is full.
        """
        self.path = self.path_of(output)
        self._handle: IO[str] | None = None
        while self._handle is None:
            handle = self._open(output)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the holder before may have removed the file between opening and locking it
                if os.path.samestat(os.fstat(handle.fileno()), os.stat(self.path)):
                    self._handle = handle
            except BlockingIOError:
                raise CheckpointError(
                    f"--output={str(output)!r}: another run is writing it; wait or stop it"
                ) from None
            except FileNotFoundError:
                pass
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be locked: {error.strerror}") from None
            finally:
                if self._handle is None:
                    handle.close()

    @staticmethod
    def path_of(output: Path) -> Path:
        """The file that is locked."""
        return output.with_name(f".{output.name}.lock")

    def _open(self, output: Path) -> IO[str]:
        with _writing_beside(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            return open(self.path, "a")

    def release(self) -> None:
        """Drop the lock. A second call does nothing."""
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            self._handle.close()
            self._handle = None


def _is_output(folder: Path) -> bool:
    """Whether calibration made ``folder``: its recipe and the config it goes with are there."""
    try:
        config: Any = json.loads((folder / "config.json").read_text())
        recipe: Any = yaml.safe_load((folder / "recipe.yaml").read_text())
        method = config["quantization_config"]["quant_method"]
        formats = {"oss_fp8": "oss-fp8", "mxfp4": "mxfp4", "compressed-tensors": method}
        return bool(formats[method] == recipe["format"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False
