# SPDX-License-Identifier: MIT
"""Imports run one way, between parts and between files; who may import vLLM, Triton, TileLang."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "oss_fused"

# a part imports parts of a lower rank, and itself
RANK = {
    "errors": 0,
    "files": 0,
    "envs": 1,
    "environment": 2,
    "kernels": 3,
    "specs": 4,
    "autograd": 5,
    "functional": 6,
    "normalization": 6,
    "convolution": 6,
    "layers/hf": 7,
    "quant": 7,
    "attention": 8,
    "bench": 9,
    "analysis": 10,
    "tuning": 10,
    "layers/vllm": 11,
    "plugin": 12,
}
# module -> folders whose files may import it
ONLY_IN = {
    "vllm": ("oss_fused/layers/vllm/", "oss_fused/plugin/"),
    "triton": ("oss_fused/kernels/",),
    "tilelang": ("oss_fused/kernels/",),
    "numba": ("oss_fused/kernels/",),
    # measuring code is not installed
    "harness": (),
}
# declarations and twins run without a compiler
COMPILER_FREE = ("__init__.py", "reference.py", "op.py", "checks.py", "integers.py", "config.py")
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def imported_modules(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, anywhere or while it is imported itself."""
    tree = ast.parse(path.read_text())
    nodes = list(_at_import(tree)) if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}: relative import at line {node.lineno}")
    return names


def _at_import(node: ast.AST) -> list[ast.AST]:
    """Nodes outside functions and outside ``if TYPE_CHECKING``."""
    found = []
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not typing_only:
            found += [child, *_at_import(child)]
    return found


def part_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "oss_fused" or len(parts) < 2:
        return None
    if parts[1] == "layers":
        return "/".join(parts[1:3]) if len(parts) > 2 else None
    return parts[1]


def own_part(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return "/".join(parts[:2]) if parts[0] == "layers" else parts[0].removesuffix(".py")


def backward_imports(own: str, path: Path) -> set[str]:
    """Modules that the file of part ``own`` imports although they rank no lower."""
    return {
        module
        for module in imported_modules(path)
        if (part := part_of(module)) in RANK and part != own and RANK[part] >= RANK[own]
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = own_part(path)
    if own in ("__init__", "layers/__init__.py"):  # the lazy front door may name everything
        return
    assert own in RANK, f"{own} has no rank: add it to RANK and to the docs"
    assert not backward_imports(own, path)


def test_files_import_each_other_in_no_circle() -> None:
    graph = {
        name: {m for m in imported_modules(path, top_level_only=True) if m in MODULES and m != name}
        for name, path in MODULES.items()
        # a package's declaration names its files, which name the package only to import a sibling
    }
    for name, targets in graph.items():
        targets -= {package for package in targets if name.startswith(package + ".")}
    assert find_circle(graph) is None


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    """A circle of imports, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph.get(name, ())):
            circle = visit(target, [*path, name])
            if circle:
                return circle
        done.add(name)
        return None

    return next((c for name in sorted(graph) if (c := visit(name, []))), None)


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_some_parts_import_vllm_and_compilers(path: Path) -> None:
    for module in imported_modules(path):
        homes = ONLY_IN.get(module.split(".")[0])
        if homes is not None:
            assert path.relative_to(ROOT).as_posix().startswith(homes), f"imports {module}"
            compiler = module.split(".")[0] in ("triton", "tilelang")
            assert not (compiler and path.name in COMPILER_FREE), f"imports {module}"


def test_a_backward_import_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import torch\nfrom oss_fused import errors\nfrom oss_fused.plugin import x\n")
    assert backward_imports("kernels", path) == {"oss_fused.plugin", "oss_fused.plugin.x"}
    assert not backward_imports("plugin", path)
    path.write_text("from oss_fused.layers.vllm.linear import x\n")
    assert backward_imports("layers/hf", path)
    assert not backward_imports("layers/vllm", path) and not backward_imports("plugin", path)


def test_import_is_light() -> None:
    code = (
        "import sys, oss_fused; oss_fused.register; dir(oss_fused);"
        "print([m for m in ('vllm', 'triton', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_declarations_import_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import oss_fused.kernels;"
        "print(sorted({'triton', 'tilelang', 'vllm'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    import oss_fused

    with pytest.raises(AttributeError, match="no_such_name"):
        oss_fused.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_vllm_shows_what_is_logged_as_info(path: Path) -> None:
    """vLLM shows INFO of loggers below "vllm" only; of others it shows warnings."""
    text = path.read_text()
    if "logger.info" in text:
        assert 'logger = init_logger(f"vllm.{__name__}")' in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "one subject a file: split it"


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name, in folders that are no packages, are not collected together."""
    folders = [p.parent for p in (ROOT / "tests").rglob("test_*.py")]
    names = [
        path.name
        for folder in set(folders)
        if not (folder / "__init__.py").exists()
        for path in folder.glob("test_*.py")
    ]
    assert sorted(set(names)) == sorted(names)
