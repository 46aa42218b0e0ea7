# SPDX-License-Identifier: MIT
"""Loads a script as a module, by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load_script(name: str, folder: Path = SCRIPTS) -> ModuleType:
    """``name``.py of ``folder`` as a new module, which is not kept for imports by that name."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # the decorator of a dataclass looks its module up
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module
