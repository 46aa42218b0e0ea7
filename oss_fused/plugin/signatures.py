# SPDX-License-Identifier: MIT
"""Signatures of a Python package, read from its sources without importing it.

vLLM is imported in parts, some only on a GPU; reading its sources needs neither. It also works for
a release that is not installed, from an unpacked wheel.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_UNBOUND = ("staticmethod",)


@dataclass(frozen=True)
class _Written:
    """A default value, as the source has it."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Found:
    """What a path names: a function, a class, a module, or any other value.

    Attributes:
        node: its definition.
        module: the module that holds the definition.
        owner: the name of the class that holds it, if one does.
    """

    node: ast.AST
    module: str
    owner: str | None = None


class Package:
    """A package in a folder; ``find`` follows imports, base classes and re-exports in it."""

    def __init__(self, root: Path, name: str) -> None:
        """``root`` is the folder of the package ``name``."""
        self.root, self.name = root, name
        self.module = functools.cache(self._module)
        self._names = functools.cache(self._index)
        self._members = functools.cache(_class_index)

    def _file(self, module: str) -> Path | None:
        parts = module.split(".")
        if parts[0] != self.name:
            return None
        path = self.root.joinpath(*parts[1:])
        for file in (path / "__init__.py", path.with_suffix(".py") if parts[1:] else None):
            if file is not None and file.is_file():
                return file
        return None

    def _module(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return None if file is None else ast.parse(file.read_text())

    def find(self, path: str) -> Found | None:
        """The definition of ``path``, as ``package.module:Class.method``; None if there is none."""
        module, _, names = path.partition(":")
        first, *rest = names.split(".")
        found = self._global(module, first)
        for name in rest:
            found = None if found is None else self._member(found, name)
        return found

    def signature(self, path: str) -> Signature | None:
        """What the function, or the constructor of the class, at ``path`` takes, without self.

        None if it is neither.
        """
        found = self.find(path)
        if found is None:
            return None
        if isinstance(found.node, Function):
            bound = found.owner is not None and not _has_decorator(found.node, *_UNBOUND)
            return _signature(found.node, bound)
        if isinstance(found.node, ast.ClassDef):
            return self._constructor(found)
        return None

    def _constructor(self, found: Found) -> Signature:
        init = self._member(found, "__init__")
        if init is not None and isinstance(init.node, Function):
            return _signature(init.node, True)
        fields = [
            statement for kind in reversed(list(self._family(found))) for statement in kind.body
        ]
        return Signature([_field(f) for f in fields if _is_field(f)])

    def _family(self, found: Found) -> Iterator[ast.ClassDef]:
        """The class and its bases, as far as they stand in this package."""
        assert isinstance(found.node, ast.ClassDef)
        yield found.node
        for base in self._bases(found):
            yield from self._family(base)

    def _bases(self, found: Found) -> Iterator[Found]:
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                known = self._global(found.module, name.id)
                if known is not None and isinstance(known.node, ast.ClassDef):
                    yield known

    def _global(self, module: str, name: str) -> Found | None:
        tree = self.module(module)
        if tree is None:
            return None
        defined, imported, stars = self._names(module)
        if name in defined:
            return Found(defined[name], module)
        if name in imported:
            return self._resolve(*imported[name])
        for source in stars:
            if (found := self._global(source, name)) is not None:
                return found
        if lazy := self._lazy(tree, name):
            return self._resolve(*lazy)
        return self._resolve(f"{module}.{name}", "")

    def _index(
        self, module: str
    ) -> tuple[dict[str, ast.stmt], dict[str, tuple[str, str]], list[str]]:
        """Of a module: its definitions, its imports (module, name), modules imported with *."""
        tree = self.module(module)
        defined: dict[str, ast.stmt] = {}
        imported: dict[str, tuple[str, str]] = {}
        stars = []
        for node in _statements(tree.body if tree else []):
            for name in _defined(node):
                defined.setdefault(name, node)
            if isinstance(node, ast.ImportFrom):
                source = self._source(node, module)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(source)
                    imported[alias.asname or alias.name] = source, alias.name
        return defined, imported, stars

    def _resolve(self, module: str, name: str) -> Found | None:
        if name and (found := self._global(module, name)) is not None:
            return found
        whole = f"{module}.{name}" if name else module
        tree = self.module(whole) if whole else None
        return None if tree is None else Found(tree, whole)

    def _source(self, node: ast.ImportFrom, module: str) -> str:
        """The module from which ``node``, in ``module``, imports."""
        if not node.level:
            return node.module or ""
        file = self._file(module)
        inside = file is not None and file.name == "__init__.py"
        parents = module.split(".")
        parents = parents[: len(parents) - node.level + inside]
        return ".".join([*parents, *filter(None, [node.module])])

    def _lazy(self, tree: ast.Module, name: str) -> tuple[str, str] | None:
        """Of names that ``__getattr__`` imports, from a table of ``.module:name``."""
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values):
                    pair = (key, value)
                    if all(isinstance(p, ast.Constant) for p in pair) and key.value == name:  # type: ignore[union-attr]
                        module, _, inner = str(value.value).partition(":")  # type: ignore[attr-defined]
                        return (self.name + module, inner) if module.startswith(".") else None
        return None

    def _member(self, found: Found, name: str) -> Found | None:
        if isinstance(found.node, ast.Module):
            return self._global(found.module, name)
        if not isinstance(found.node, ast.ClassDef):
            return None
        member = self._members(found.node).get(name)
        if member is not None:
            return Found(member, found.module, found.node.name)
        for base in self._bases(found):
            if (inherited := self._member(base, name)) is not None:
                return inherited
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those of its branches too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [h.body for h in getattr(node, "handlers", [])]
            for part in (node.body, *handlers, node.orelse):
                yield from _statements(part)


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines; of overloads only the last is a definition."""
    if isinstance(node, Function):
        return [] if _has_decorator(node, "overload") else [node.name]
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _class_index(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Members of a class, and the attributes that its methods set on an object."""
    members: dict[str, ast.AST] = {}
    for statement in _statements(node.body):
        for name in _defined(statement):
            members.setdefault(name, statement)
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
        ):
            members.setdefault(inner.attr, inner)
    return members


def _has_decorator(node: Function, *names: str) -> bool:
    found = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(getattr(d, "id", getattr(d, "attr", None)) in names for d in found)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def _field(node: ast.stmt) -> Parameter:
    assert isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    return _parameter(node.target.id, Parameter.KEYWORD_ONLY, node.value)


def _parameter(name: str, kind: object, default: ast.expr | None) -> Parameter:
    value = Parameter.empty if default is None else _Written(ast.unparse(default))
    return Parameter(name, kind, default=value)  # type: ignore[arg-type]


def _signature(node: Function, bound: bool) -> Signature:
    given = node.args
    plain: list[tuple[ast.arg, object]] = [
        (a, Parameter.POSITIONAL_ONLY) for a in given.posonlyargs
    ]
    plain += [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    found = [_parameter(a.arg, kind, value) for (a, kind), value in zip(plain, defaults)]
    if given.vararg:
        found.append(_parameter(given.vararg.arg, Parameter.VAR_POSITIONAL, None))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults):
        found.append(_parameter(argument.arg, Parameter.KEYWORD_ONLY, value))
    if given.kwarg:
        found.append(_parameter(given.kwarg.arg, Parameter.VAR_KEYWORD, None))
    return Signature(found[1:] if bound else found)


def takes(signature: Signature, call: str) -> bool:
    """Whether a function of ``signature`` can be called as ``f(call)``."""
    node = ast.parse(f"f({call})").body[0].value  # type: ignore[attr-defined]
    try:
        signature.bind(*node.args, **{keyword.arg: None for keyword in node.keywords})
    except TypeError:
        return False
    return True


def missing_arguments(ours: Signature, theirs: Signature) -> list[str]:
    """Arguments of ``theirs`` that a function of ``ours`` in its place does not take.

    An argument that only ``ours`` demands counts too.
    """
    kinds = {p.kind for p in ours.parameters.values()}
    missing = []
    for name, parameter in theirs.parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        by_name = name in ours.parameters or Parameter.VAR_KEYWORD in kinds
        if not by_name and Parameter.VAR_POSITIONAL not in kinds:
            missing.append(name)
    open_ended = any(p.kind == Parameter.VAR_POSITIONAL for p in theirs.parameters.values())
    for name, parameter in ours.parameters.items():
        demanded = parameter.default is Parameter.empty and parameter.kind not in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        )
        if demanded and name not in theirs.parameters and not open_ended:
            missing.append(name)
    return missing
