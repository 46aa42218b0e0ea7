# SPDX-License-Identifier: MIT
"""Types of command-line arguments: what a script cannot work with, or write, ends it at once."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def positive(text: str) -> int:
    """An integer of at least 1, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 1")
    return value


def share(text: str) -> float:
    """A number from 0 to 1, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is another, or NaN.
    """
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value}: expected 0 to 1")
    return value


def writable(path: Path) -> None:
    """Find out before the work, not after it, whether ``path`` can be created.

    Raises:
        OSError: its folder cannot be made, or nothing can be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def output_file(text: str) -> Path:
    """A file to write, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is a folder, or cannot be written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: is a folder; expected the name of a file")
    return _writable_path(path, path)


def output_folder(text: str) -> Path:
    """A folder to write files into, as argparse's ``type``; it is made.

    Raises:
        ArgumentTypeError: it is a file, or nothing can be written into it.
    """
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: is a file; expected the name of a folder")
    return _writable_path(path, path / "file")


def _writable_path(path: Path, file: Path) -> Path:
    try:
        writable(file)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{str(path)!r}: cannot be written: {error.strerror}; expected a place that can"
        ) from None
    return path
