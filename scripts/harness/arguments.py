# SPDX-License-Identifier: MIT
"""Types of command-line arguments: what a script cannot work with, or write, ends it at once.

And the help's formatter, which adds defaults.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oss_fused.errors import OssFusedError
from oss_fused.files import writable

ROOT = Path(__file__).resolve().parents[2]


class Help(argparse.RawDescriptionHelpFormatter):
    """The description as it is written; an option says its default where its text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, value = action.help or "", action.default
        if "default" in text or value is None or value is False or not action.option_strings:
            return action.help
        if value in ([], "", argparse.SUPPRESS):
            return action.help
        if isinstance(value, Path) and value.is_relative_to(ROOT):
            value = value.relative_to(ROOT)
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f"{text} (default: {shown.replace('%', '%%')})"


def positive(text: str) -> int:
    """An integer of at least 1, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 1")
    return value


def duration(text: str) -> float:
    """Seconds or milliseconds above 0, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is 0, less, or not finite.
    """
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value}: expected a number above 0")
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


def place(text: str) -> Path:
    """A path that a file system can hold, as argparse's ``type``; nothing need be there.

    Raises:
        ArgumentTypeError: it is empty, or too long.
    """
    if not text:
        raise argparse.ArgumentTypeError("'': expected a path")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}...: {error.strerror}; expected a shorter one"
            ) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return Path(text)


def output_file(text: str) -> Path:
    """A file to write, as argparse's ``type``; its folder is made with it.

    Raises:
        ArgumentTypeError: it is a folder, or cannot be written.
    """
    path = Path(text)
    with _usage_error(text):
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}: is a folder; expected the name of a file")
        writable(path)
    return path


def summary_file(text: str) -> Path:
    """A JSON file to merge figures into, as argparse's ``type``; it need not exist.

    Raises:
        ArgumentTypeError: it holds something else, or cannot be written.
    """
    path = output_file(text)
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a JSON object")
    return path


def output_folder(text: str) -> Path:
    """A folder to write files into, as argparse's ``type``; it is made with the first of them.

    Raises:
        ArgumentTypeError: it is a file, or nothing can be written into it.
    """
    path = Path(text)
    with _usage_error(text):
        if path.exists() and not path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}: is a file; expected the name of a folder")
        writable(path / "file")
    return path


def seed(text: str) -> int:
    """A seed that torch takes, as argparse's ``type``.

    Raises:
        ArgumentTypeError: it is of more than 64 bits.
    """
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise argparse.ArgumentTypeError(f"{value}: expected -2**63 to 2**64 - 1")
    return value


@contextmanager
def content_of(flag: str, path: Path | str, expected: str) -> Iterator[None]:
    """Inside, a user's file is read: what another content leads to is an error about the argument.

    Args:
        flag: name of the argument.
        path: its value.
        expected: what the file should be.

    Raises:
        ValueError: whatever was raised inside; the package's own errors stay as they are.
    """
    try:
        yield
    except OssFusedError:
        raise
    except Exception as error:
        raise ValueError(f"{flag}={str(path)!r}: expected {expected} ({error!r})") from None


@contextmanager
def _usage_error(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: cannot be written: {error.strerror}; expected a place that can"
        ) from None
