# SPDX-License-Identifier: MIT
"""Triton's interpreter with less work per call of a helper; what kernels compute is unchanged.

Triton replaces functions of triton.language for a launch, and again for each call of a helper, and
looks through all members of its modules each time: half the time of launches. Here the names are
looked up once a process, and a launch replaces the functions of a module once. NumPy's type of each
of Triton's is looked up once, too.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def spare_lookups() -> None:
    """For all launches of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    used = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in used):
        # another Triton: its tests take longer
        return
    # modules whose functions the running launch has replaced
    replaced: set[Any] = set()
    replace = interpreter._patch_lang

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    @functools.cache
    def names_in(package: Any) -> list[str]:
        members = inspect.getmembers(package)
        return [name for name, member in members if tl.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_in(package):
            member = getattr(package, name)
            # a replaced one is none
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang(kernel: Any) -> Any:
        modules = {each for each in kernel.__globals__.values() if each is tl or each is tl.core}
        if modules and modules <= replaced:
            return Scope()
        scope = replace(kernel)
        replaced.update(modules)
        return scope

    find_type = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def type_of(dtype: Any) -> Any:
        if isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, tl.pointer_type):
            return find_type(dtype)
        if dtype.name not in types:
            types[dtype.name] = find_type(dtype)
        return types[dtype.name]

    # before the first launch
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        names_in(package)
    interpreter._LangPatchScope = Scope
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = type_of
