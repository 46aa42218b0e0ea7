# SPDX-License-Identifier: MIT
"""Types of command-line arguments: what a script writes is tried before its work, not after it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


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
