# SPDX-License-Identifier: MIT
"""What the arguments of an operation must be.

A contract maps each argument to a rule: ``Operand("M K", FP8)`` is a matrix of FP8 codes, and every
other "M" of the same call is the same size. ``...`` stands for any leading dimensions. The errors
name the argument, its value and what was expected.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from oss_fused.errors import (
    SchemeError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from oss_fused.kernels.checks import check_dtype, check_eps, check_on_device, shown

Dims = dict[str, Any]
# what passed is forgotten beyond it: prompts have many lengths
_MOST_PASSED = 1024


class Rule(Protocol):
    """What one argument must be."""

    def check(self, name: str, value: Any, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise unless ``value`` fits; learn the sizes of ``dims`` that it is the first to show."""

    def example(self, dims: Dims, generator: torch.Generator) -> Any:
        """A value that fits the sizes ``dims``."""


class Operand:
    """A tensor: dimensions by name, dtypes, layout."""

    def __init__(
        self,
        dims: str,
        *dtypes: torch.dtype,
        like: str | None = None,
        contiguous: bool = False,
        dense: bool = False,
        cpu: tuple[torch.dtype, ...] = (),
    ) -> None:
        """Make the rule.

        Args:
            dims: e.g. "M K", "... K", "E N 1"; a number is a size, a name stands for one size.
            dtypes: those allowed.
            like: the argument whose dtype is allowed as well.
            contiguous: the last dimension has unit stride.
            dense: kernels read it without strides, so that they get a copy of one that has some.
                A vector is read so, too.
            cpu: dtypes allowed on a CPU beside the others.
        """
        self.dims = tuple(int(d) if d.isdigit() else d for d in dims.split())
        self.text = f"[{', '.join(dims.split())}]"
        self.prefix = self.dims[:1] == ("...",)
        self.own = self.dims[1:] if self.prefix else self.dims
        self.dtypes = dtypes
        self.like = like
        self.contiguous = contiguous
        self.dense = dense or (len(self.dims) == 1 and not self.prefix)
        self.cpu = cpu

    def check(self, name: str, value: torch.Tensor, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise unless ``value`` fits.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, UnsupportedDeviceError: name the argument.
        """
        shape = value.shape
        if self.prefix:
            lead = len(shape) - len(self.own)
            fits = lead >= 0 and dims.setdefault("...", shape[:lead]) == shape[:lead]
            shape = shape[lead:] if fits else shape
        else:
            fits = len(shape) == len(self.own)
        if not fits:
            self._fail(name, value, dims)
        for size, dim in zip(shape, self.own):
            if size != (dims.setdefault(dim, size) if isinstance(dim, str) else dim):
                self._fail(name, value, dims)
        if value.dtype not in self.dtypes:
            self._check_dtype(name, value, args)
        if self.contiguous and value.stride(-1) != 1 and shape[-1] > 1 and value.numel():
            raise ShapeMismatchError(
                f"{name}.stride()={value.stride()}: expected unit stride along the last dimension"
            )
        if value.device != dims["device"]:
            check_on_device(dims["device"], name, value)

    def _check_dtype(self, name: str, value: torch.Tensor, args: Mapping[str, Any]) -> None:
        allowed = self.dtypes if value.is_cuda else (*self.dtypes, *self.cpu)
        if self.like is not None:
            allowed = (*allowed, args[self.like].dtype)
        check_dtype(name, value, allowed)

    def _fail(self, name: str, value: torch.Tensor, dims: Dims) -> None:
        known = [
            f"{dim}={tuple(dims[dim]) if dim == '...' else dims[dim]}"
            for dim in self.dims
            if dim in dims
        ]
        where = f" with {', '.join(known)}" if known else ""
        raise ShapeMismatchError(f"{name}.shape={tuple(value.shape)}: expected {self.text}{where}")

    def example(self, dims: Dims, generator: torch.Generator) -> torch.Tensor:
        """Normal values; codes of FP8 and small whole numbers for those dtypes."""
        shape: list[int] = []
        for dim in self.dims:
            size: Any = dim if isinstance(dim, int) else dims[dim]
            shape.extend(size if dim == "..." else [size])
        dtype = self.dtypes[0] if self.like is None else dims["dtype"](self.like)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, 256 if dtype == torch.uint8 else 2, shape, generator=generator).to(
            dtype
        )


class Scale(Operand):
    """Dequantisation multipliers, float32: one, or one for each row ``[rows, 1]``."""

    def __init__(self, rows: str = "1") -> None:
        """``rows``: the dimension that has a scale each."""
        super().__init__(f"{rows} 1", torch.float32, dense=True)

    def check(self, name: str, value: torch.Tensor, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise unless ``value`` is float32 with one element or one per row."""
        if value.numel() != 1:
            super().check(name, value, dims, args)
            return
        check_dtype(name, value, self.dtypes)
        check_on_device(dims["device"], name, value)

    def example(self, dims: Dims, generator: torch.Generator) -> torch.Tensor:
        """Positive values."""
        return super().example(dims, generator).abs() * 0.01 + 0.005


class OneOf:
    """A value out of a few: a string, a dtype, a flag."""

    def __init__(self, *values: Any) -> None:
        """``values``: those allowed."""
        self.values = values

    def check(self, name: str, value: Any, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise SchemeError, or UnsupportedDtypeError of a dtype, unless ``value`` is allowed."""
        if value not in self.values:
            error = UnsupportedDtypeError if isinstance(value, torch.dtype) else SchemeError
            given = value if isinstance(value, torch.dtype) else repr(value)
            raise error(f"{name}={given}: expected one of {', '.join(map(shown, self.values))}")

    def example(self, dims: Dims, generator: torch.Generator) -> Any:
        """The first."""
        return self.values[0]


class Between:
    """A number within bounds, both included."""

    def __init__(self, low: float, high: float = math.inf) -> None:
        """``low`` and ``high``: the bounds."""
        self.low, self.high = low, high

    def check(self, name: str, value: Any, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise SchemeError unless ``value`` lies within the bounds; NaN does not."""
        if not self.low <= value <= self.high:
            raise SchemeError(f"{name}={value!r}: expected {self.low} to {self.high}")

    def example(self, dims: Dims, generator: torch.Generator) -> Any:
        """The lower bound."""
        return self.low


class Epsilon:
    """What a norm adds to a mean square."""

    def check(self, name: str, value: Any, dims: Dims, args: Mapping[str, Any]) -> None:
        """Raise SchemeError unless ``value`` is a finite number of at least 0."""
        check_eps(value, name)

    def example(self, dims: Dims, generator: torch.Generator) -> Any:
        """A usual one."""
        return 1e-5


def _metadata(value: Any) -> Any:
    """What rules see of an argument, hashable."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list):
        return tuple(map(_metadata, value))
    # True == 1 == 1.0
    return type(value), value


class Contract:
    """The rules of an operation's arguments."""

    def __init__(
        self,
        parameters: Mapping[str, inspect.Parameter],
        rules: Mapping[str, Rule],
        check: Callable[..., None] | None,
        example: Mapping[str, Any],
        mutates: Sequence[str] = (),
    ) -> None:
        """Make the contract; ``rules`` may leave out arguments that take any value."""
        self.names = tuple(parameters)
        unknown = rules.keys() - parameters.keys()
        if unknown:
            raise TypeError(f"rules={sorted(unknown)}: expected names of {self.names}")
        flags = {
            # an example takes the default
            name: OneOf(parameter.default is True, parameter.default is not True)
            for name, parameter in parameters.items()
            if parameter.annotation in (bool, "bool") and name not in rules
        }
        rules = {**rules, **flags}
        # in the order of the declaration: what comes first binds the dimensions
        self.rules = tuple((self.names.index(name), name, rules[name]) for name in rules)
        self.sizes = example
        self._parameters = parameters
        self._extra = self.select(check) if check else None
        self._mutates = frozenset(mutates)
        # what passed, and which of its arguments kernels need a copy of
        self._passed: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise unless every argument fits its rule; a trailing default may be left out.

        No rule reads a tensor's values. What passed once passes again without a look: the layers of
        a model call with the same shapes, and checks take longer than a launch.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, UnsupportedDeviceError, SchemeError.
        """
        self.prepare(args)

    def prepare(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``args``, checked, with copies of those that kernels read without strides.

        Raises:
            As ``check``.
        """
        # beyond the names come a kernel's own options
        key = tuple([_metadata(value) for value in args[: len(self.names)]])
        strided = self._passed.get(key)
        if strided is None:
            strided = self._check(args)
            if len(self._passed) >= _MOST_PASSED:
                self._passed.clear()
            self._passed[key] = strided
        if not strided:
            return args
        return tuple(a.contiguous() if i in strided else a for i, a in enumerate(args))

    def _check(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        named = dict(zip(self.names, args))
        dims: Dims = {"device": args[0].device}
        strided = []
        for i, name, rule in self.rules:
            if i < len(args) and args[i] is not None:
                rule.check(name, args[i], dims, named)
                if isinstance(rule, Operand) and rule.dense and not args[i].is_contiguous():
                    strided.append(i)
                    self._check_written(name, args[i])
        if self._extra is not None:
            self._extra(*args)
        return tuple(strided)

    def _check_written(self, name: str, value: torch.Tensor) -> None:
        if name in self._mutates:
            raise ShapeMismatchError(
                f"{name}.stride()={value.stride()}: expected a contiguous tensor to write to"
            )

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """``args`` followed by the arguments ``named``, defaults between them filled in.

        Raises:
            TypeError: as Python does for such a call.
        """
        if not named:
            return args
        signature = inspect.Signature(list(self._parameters.values()))
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        return bound.args

    def select(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of some of the arguments, by name, as a function of all of them."""
        wanted = [
            (self.names.index(name), self._parameters[name].default)
            for name in inspect.signature(function).parameters
        ]

        def call(*args: Any) -> Any:
            return function(*(args[i] if i < len(args) else default for i, default in wanted))

        return call

    def example(self, seed: int = 0, **changes: Any) -> tuple[Any, ...]:
        """Arguments that fit, on the CPU: drawn with ``seed``, ``changes`` taking precedence."""
        generator = torch.Generator().manual_seed(seed)
        dims = {**self.sizes, **changes, "dtype": self._example_dtype}
        rules = {name: rule for _, name, rule in self.rules}
        values: list[Any] = []
        for name, parameter in self._parameters.items():
            if name in dims:
                value = dims[name]
                value = value(generator) if callable(value) else value
            elif name in rules:
                value = rules[name].example(dims, generator)
            else:
                value = parameter.default
            values.append(value)
        return tuple(values)

    def _example_dtype(self, name: str) -> torch.dtype:
        if isinstance(self.sizes.get(name), torch.Tensor):
            return self.sizes[name].dtype
        rule: Any = next(rule for _, n, rule in self.rules if n == name)
        return rule.dtypes[0] if rule.like is None else self._example_dtype(rule.like)
