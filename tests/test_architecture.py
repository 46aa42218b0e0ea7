# SPDX-License-Identifier: MIT
"""Imports run one way, and importing the package loads neither vLLM nor Triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "oss_fused"

# a part may import parts of a lower rank, and its own
RANK = {
    "errors": 0,
    "envs": 1,
    "kernels": 2,
    "specs": 3,
    "ops": 4,
    "autograd": 5,
    "functional": 6,
    "layers": 7,
    "quant": 7,
    "bench": 8,
    "tuning": 9,
    "plugin": 10,
}
ONLY_IN = {
    "vllm": "oss_fused/plugin/",
    "triton": "oss_fused/kernels/triton/",
    "tilelang": "oss_fused/kernels/tilelang/",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}: relative import at line {node.lineno}")
    return names


def part_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "oss_fused" and len(parts) > 1 else None


def backward_imports(own: str, path: Path) -> set[str]:
    """Modules that the file of part ``own`` imports although they rank no lower."""
    return {
        module
        for module in imported_modules(path)
        if (part := part_of(module)) in RANK and part != own and RANK[part] >= RANK[own]
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":  # the lazy front door may name everything
        return
    assert own in RANK, f"{own} has no rank: add it to RANK and to the docs"
    assert not backward_imports(own, path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_part_imports_vllm_and_one_triton(path: Path) -> None:
    for module in imported_modules(path):
        home = ONLY_IN.get(module.split(".")[0])
        if home:
            assert path.relative_to(ROOT).as_posix().startswith(home), f"imports {module}"


def test_backward_import_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import torch\nfrom oss_fused import errors\nfrom oss_fused.plugin import x\n")
    assert backward_imports("kernels", path) == {"oss_fused.plugin", "oss_fused.plugin.x"}
    assert not backward_imports("plugin", path)


def test_import_is_light() -> None:
    code = (
        "import sys, oss_fused; oss_fused.register; dir(oss_fused);"
        "print([m for m in ('vllm', 'triton', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    import oss_fused

    with pytest.raises(AttributeError, match="no_such_name"):
        oss_fused.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "one subject a file: split it"
