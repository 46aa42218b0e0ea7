# SPDX-License-Identifier: MIT
"""Which kernel a function is: its name and a digest of the source that it runs.

Two lambdas of one name differ in their source or its place; two closures of one source in the
values that they hold. Functions and Triton kernels of the same package that the code names are
followed; what a function imports while it runs is not.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def kernel_identity(function: Callable[..., Any]) -> str:
    """``module.qualified_name@digest`` of a function, partial, Triton kernel or callable object."""
    digest = hashlib.sha256()
    for part in _parts(function, set()):
        digest.update(part.encode() + b"\0")
    return f"{_name(function)}@{digest.hexdigest()[:12]}"


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    named = _python_function(function) or type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _python_function(value: Any) -> Any:
    """The Python function in ``value``: of a method, of a Triton kernel, or behind a cache."""
    value = getattr(value, "__func__", value)
    while not isinstance(value, types.FunctionType):
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        elif hasattr(value, "fn"):
            value = value.fn
        else:
            return None
    return value


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, *value.args, *sorted(value.keywords.items())), seen)
    elif (function := _python_function(value)) is not None:
        if id(function) not in seen:
            seen.add(id(function))
            yield from _function_parts(function, seen)
    elif callable(value) and not isinstance(value, type):
        call = _python_function(type(value).__call__)
        if call is not None:
            # a callable object is its class
            yield from _parts(call, seen)
        else:
            # written in C
            name = getattr(value, "__qualname__", type(value).__qualname__)
            yield f"{getattr(value, '__module__', None)}.{name}"
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"


def _function_parts(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    code = function.__code__
    yield f"{function.__module__}.{function.__qualname__}"
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):
        # defined where no source is kept
        yield f"{code.co_code.hex()} {code.co_names} {code.co_consts}"
    if function.__name__ == "<lambda>":
        # a line may hold several: place and code tell them apart
        yield f"{Path(code.co_filename).name}:{list(code.co_positions())[:1]} {code.co_code.hex()}"
        yield from _parts([c for c in code.co_consts if isinstance(c, _PLAIN)], seen)
    yield from _parts(list(function.__defaults__ or ()), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:
            yield "empty"
    package = function.__module__.split(".")[0]
    for name in _names(code):
        used = function.__globals__.get(name)
        other = _python_function(used) if used is not None else None
        if other is not None and other.__module__.split(".")[0] == package:
            yield from _parts(other, seen)
        elif isinstance(used, _PLAIN):
            yield f"{name}={used!r}"


def _names(code: types.CodeType) -> list[str]:
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted({*code.co_names, *(name for inner in nested for name in _names(inner))})
