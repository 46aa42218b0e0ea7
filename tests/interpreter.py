# SPDX-License-Identifier: MIT
"""Triton's interpreter with less work per call of a helper; what kernels compute is unchanged.

Triton replaces functions of triton.language for a launch, and again for each call of a helper, and
looks through all members of its modules each time: half the time of launches. Here the names are
looked up once a process, and a launch replaces the functions of a module once. NumPy's type of each
of Triton's is looked up once, too, and Triton's tuples of a shape are made once for each shape. The
check of integer sums for overflow, seven operations that report nothing, is left out.
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
    checked = hasattr(tl.semantic.TritonSemantic, "binary_op_sanitize_overflow_impl")
    if not checked or not all(hasattr(interpreter, name) for name in used):
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
    _spare_shapes(tl)
    _spare_unread_checks()


def _spare_shapes(tl: Any) -> None:
    """Types and tensors of a shape share its tuples."""
    core = tl.core
    make_type = core.block_type.__init__
    of_types: dict[Any, tuple[Any, int, str]] = {}
    of_tensors: dict[Any, tuple[Any, Any]] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        # True is 1, and is refused
        plain = all(type(size) is int for size in sizes)
        if not plain or sizes not in of_types:
            make_type(self, element_ty, shape)
            if plain:
                of_types[sizes] = self.shape, self.numel, f"{self.shape}"
            return
        self.element_ty = element_ty
        self.shape, self.numel, shown = of_types[sizes]
        self.name = f"<{shown}, {element_ty}>"

    def type_eq(self: Any, other: Any) -> bool:
        if not isinstance(other, core.block_type):
            return False
        return self.element_ty == other.element_ty and self.shape.values == other.shape.values

    make_tensor = core.tensor.__init__

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    core.block_type.__init__, core.block_type.__eq__ = type_init, type_eq
    core.tensor.__init__ = tensor_init


def _spare_unread_checks() -> None:
    """A sum's check for overflow ends in a device_assert, which does nothing without debug."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
