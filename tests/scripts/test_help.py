# SPDX-License-Identifier: MIT
"""--help says what every option of every script is for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "scripts").rglob("*.py"))


def options(path):
    """(line, name, names of keywords) of every argument that a file adds to a parser."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            name = node.args[0].value
            if called == "add_argument" or (called == "add" and str(name).startswith("--")):
                yield node.lineno, name, {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_option_says_what_it_is_for(path):
    assert [(line, name) for line, name, given in options(path) if "help" not in given] == []


def test_options_are_found():
    assert sum(1 for path in SCRIPTS for _ in options(path)) > 300
