# SPDX-License-Identifier: MIT
"""Selects tests of one file for another."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def selected(module: ModuleType, *words: str) -> dict[str, Callable[..., Any]]:
    """Tests of ``module`` whose name has one of ``words``; at least one for each word."""
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_")}
    for word in words:
        assert any(word in name for name in tests), f"{module.__name__}: no test has {word!r}"
    return {name: test for name, test in tests.items() if any(word in name for word in words)}
