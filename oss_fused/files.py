# SPDX-License-Identifier: MIT
"""Files that a reader never sees half-written, and places where one can be made."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def writable(path: Path) -> Path:
    """Find out before the work, not after it, whether ``path`` can be created; nothing is made.

    Returns:
        The nearest folder around ``path`` that exists.

    Raises:
        OSError: its folder cannot be made, or nothing can be written there.
    """
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to a temporary file, then rename it to ``path``."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file, then rename it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
