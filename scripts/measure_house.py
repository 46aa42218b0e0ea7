#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure how large the package is: lines, files, long functions, lines that no user reaches.

A module counts as reached when a chain of imports leads to it from `import oss_fused`, from the
vLLM plugin, from a script that users run, or from a module that README, docs or deploy name. A
string that names a module counts as an import of it: backends and lazy names are given so. Code
that only measures, plots or tests is then unreached, where no such script asks for it.
Exit codes: 0 done, 2 bad input.

    python scripts/measure_house.py --output docs/results/house.json \\
        --summary docs/results/h200/summary.json
    python scripts/measure_house.py --tree ../another-checkout
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.arguments import output_file, summary_file
from harness.summary import merge_summary

from oss_fused.environment import fingerprint
from oss_fused.files import write_json

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "oss_fused"
LONG = 60
# what users run; the other scripts measure
SCRIPTS = (
    "analyze_model.py",
    "calibrate.py",
    "count_hardware.py",
    "demo.py",
    "doctor.py",
    "evaluate.py",
    "preflight.py",
    "tune.py",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout (default: this one)")
    parser.add_argument("--output", type=output_file, help="JSON to write")
    parser.add_argument("--summary", type=summary_file, help="summary.json to add house.* to")
    args = parser.parse_args(argv)
    if not (args.tree / PACKAGE / "__init__.py").is_file():
        print(f"measure_house: --tree={args.tree}: expected a checkout", file=sys.stderr)
        return 2
    if args.summary and not args.output:
        parser.error("--summary needs --output, the file that it names as the source")
    figures = measure(args.tree)
    for name, value in figures.items():
        print(f"{name:36} {value}")
    if args.output:
        write_json(args.output, {"environment": fingerprint(), "house": figures})
    if args.summary:
        chosen = {f"house.{k}": v for k, v in figures.items() if isinstance(v, int)}
        merge_summary(args.summary, chosen, args.output)
    return 0


def measure(tree: Path) -> dict[str, Any]:
    """The figures of the package in ``tree``."""
    modules = dict(_modules(tree))
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    reached = _reached(tree, modules)
    functions = sorted(
        (
            (length, f"{name}.{function}")
            for name, path in modules.items()
            for function, length in _functions(path)
        ),
        reverse=True,
    )
    long = [name for length, name in functions if length > LONG]
    kernels = sum(n for name, n in lines.items() if name.startswith(f"{PACKAGE}.kernels"))
    largest = max(lines, key=lambda name: lines[name])
    return {
        "package_lines": sum(lines.values()),
        "package_files": len(lines),
        "package_lines_unreached_by_users": sum(n for k, n in lines.items() if k not in reached),
        "median_file_lines": int(statistics.median(lines.values())),
        "largest_file_lines": lines[largest],
        "functions_over_60_lines": len(long),
        "kernels_lines": kernels,
        "largest_file": largest,
        "functions_over_60": long,
        "unreached": sorted(set(modules) - reached),
    }


def _modules(tree: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted((tree / PACKAGE).rglob("*.py")):
        parts = path.relative_to(tree).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _reached(tree: Path, modules: dict[str, Path]) -> set[str]:
    roots = [PACKAGE, f"{PACKAGE}.plugin"]
    for script in (*SCRIPTS, *(p.name for p in (tree / "scripts").glob("quantize*.py"))):
        if (path := tree / "scripts" / script).is_file():
            roots += _imports(path, "", modules)
    harness = {f"harness.{path.stem}": path for path in (tree / "scripts/harness").glob("*.py")}
    modules = modules | harness
    roots += _named_in_texts(tree, modules)
    reached: set[str] = set()
    while roots:
        name = roots.pop()
        if name in modules and name not in reached:
            reached.add(name)
            parent = name.rpartition(".")[0]
            roots += [parent, *_imports(modules[name], name, modules)]
    return reached


def _named_in_texts(tree: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that users read of, alone or with a name in them."""
    deploy = (path for path in (tree / "deploy").rglob("*") if path.is_file())
    for path in (tree / "README.md", *(tree / "docs").glob("*.md"), *deploy):
        text = path.read_text(errors="replace") if path.is_file() else ""
        for name in re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text):
            yield from ({name, name.rpartition(".")[0]} & modules.keys())


def _imports(path: Path, module: str, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports or names: whole, or beside it, as backends are named."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # a module, a class in one, or a module beside this file
            whole = node.value.split(":")[0]
            for name in (whole, whole.rpartition(".")[0], f"{package}.{whole}"):
                if name in modules:
                    yield name


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


if __name__ == "__main__":
    sys.exit(main())
