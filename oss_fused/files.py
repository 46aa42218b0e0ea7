# SPDX-License-Identifier: MIT
"""Files that a reader never sees half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to a temporary file, then rename it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
