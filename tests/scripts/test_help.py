# SPDX-License-Identifier: MIT
"""--help says what every option of every script is for, and its default."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest
from harness.arguments import Help

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "scripts").rglob("*.py"))
# defaults that say nothing
EMPTY = ("None", "False", "[]", "()", "''", "argparse.SUPPRESS")


def options(path):
    """(line, name, keywords) of every argument that a file adds to a parser."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            name = node.args[0].value
            if called == "add_argument" or (called == "add" and str(name).startswith("--")):
                yield node.lineno, name, {k.arg: ast.unparse(k.value) for k in node.keywords}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_option_says_what_it_is_for(path):
    assert [(line, name) for line, name, given in options(path) if "help" not in given] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_default_is_hidden(path):
    hidden = [
        (line, name)
        for line, name, given in options(path)
        if given.get("default", "None") not in EMPTY and "default" not in given["help"]
    ]
    assert not hidden or "formatter_class=Help" in path.read_text(), "see harness.arguments.Help"


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (0.0, "N (default: 0.0)"),
        ([1, 32], "N (default: 1 32)"),
        ("50%", "N (default: 50%)"),
        (SCRIPTS[0].parents[1] / "docs" / "x.json", "N (default: docs/x.json)"),
        (None, "N"),
        (False, "N"),
        ([], "N"),
    ],
)
def test_the_formatter_adds_defaults(default, shown):
    parser = argparse.ArgumentParser(formatter_class=Help, add_help=False)
    parser.add_argument("--n", help="N", default=default)
    parser.add_argument("--m", help="default: what is there", default=3)
    lines = parser.format_help().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines[-2:]] == [shown, "default: what is there"]


def test_options_are_found():
    assert sum(1 for path in SCRIPTS for _ in options(path)) > 300
