# SPDX-License-Identifier: MIT
"""The declaration of an operation, and the registry that finds its kernels.

An operation is a folder of this package. Its ``__init__.py`` calls ``declare`` with the reference
twin. Everything else follows: the schema from the twin's signature, the fake from the twin run on
meta tensors, the argument checks from the contract, ``torch.ops.oss_fused.<name>``, and example
arguments for the tests that compare backends.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oss_fused import envs
from oss_fused.errors import BackendUnavailableError
from oss_fused.kernels.contract import Contract, Rule

# ``Library`` rather than ``custom_op``: its dispatch costs a few microseconds less per call, which
# counts where vLLM runs a layer outside CUDA graphs (lm_head)
LIBRARY = torch.library.Library("oss_fused", "DEF")

REFERENCE, CPU, NVCC = "torch", "cpu", "nvcc"
# backend -> what it needs
BACKENDS = {
    REFERENCE: "nothing",
    CPU: "the package numba, and no NVIDIA GPU",
    "triton": "the package triton and an NVIDIA GPU, or TRITON_INTERPRET=1 on a CPU",
    "cuda": "an NVIDIA GPU",
    "tilelang": "an NVIDIA GPU, nvcc and TileLang: pip install tilelang",
    NVCC: "an NVIDIA GPU, and what nvcc and ninja build: python -m oss_fused.kernels.compiled",
}

Observer = Callable[[str, tuple[Any, ...]], None]
_observer: Observer | None = None


@dataclass(frozen=True)
class Operation:
    """A declared operation."""

    name: str
    reference: Callable[..., Any]
    contract: Contract
    # backend -> module that holds the function of the operation's name
    modules: Mapping[str, str]
    mutates: tuple[str, ...]

    def kernel(self, backend: str) -> Callable[..., Any]:
        """The function of ``backend``, without the argument checks.

        Raises:
            BackendUnavailableError: the backend is unknown, cannot run here, or has no kernel.
        """
        return _kernel(backend, self.name)


OPERATIONS: dict[str, Operation] = {}


def declare(
    reference: Callable[..., Any],
    rules: Mapping[str, Rule],
    backends: Mapping[str, str],
    *,
    mutates: Sequence[str] = (),
    check: Callable[..., None] | None = None,
    fake: Callable[..., Any] | None = None,
    example: Mapping[str, Any],
) -> None:
    """Register ``oss_fused::<name of the reference>``, run by the backend of the first tensor.

    Args:
        reference: the twin, in plain PyTorch. Its annotated signature is the operator's.
        rules: argument -> what it must be; see checks.py.
        backends: backend -> module beside the declaration that holds the function of that name.
        mutates: arguments that the operation writes.
        check: for what no rule says; called with those arguments that it names as parameters.
        fake: empty results, where the twin cannot run on meta tensors; called as ``check`` is.
        example: dimension -> size and argument -> value, of arguments for the tests.
    """
    name = reference.__name__
    package = reference.__module__.rpartition(".")[0]
    parameters = inspect.signature(reference).parameters
    contract = Contract(parameters, rules, check, example, mutates)
    modules = {REFERENCE: reference.__module__}
    modules.update({backend: f"{package}.{module}" for backend, module in backends.items()})
    OPERATIONS[name] = Operation(name, reference, contract, modules, tuple(mutates))

    def run(*args: Any) -> Any:
        if _observer is not None:
            _observer(name, args)
        args = contract.prepare(args)
        return _kernel(backend_for(name, args[0].device), name)(*args)

    run.__name__ = run.__qualname__ = name
    schema = name + torch.library.infer_schema(reference, mutates_args=list(mutates))
    LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    propagate = reference if fake is None else contract.select(fake)
    torch.library.register_fake(f"oss_fused::{name}", propagate, lib=LIBRARY)


def direct(operation: str) -> Callable[..., Any]:
    """``torch.ops.oss_fused.<operation>`` for a layer that makes the arguments itself.

    On a CPU, PyTorch's dispatcher and the checks take longer than the operation of a short row, and
    are left out. A graph that is traced gets the operator.
    """
    operator = getattr(torch.ops.oss_fused, operation)

    def call(*args: Any) -> Any:
        if not args[0].is_cpu or torch.compiler.is_compiling():
            return operator(*args)
        if _observer is not None:
            _observer(operation, args)
        return _kernel(backend_for(operation, args[0].device), operation)(*args)

    return call


def check_arguments(operation: str, *args: Any) -> None:
    """Raise what ``operation`` raises for these arguments.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, UnsupportedDeviceError, SchemeError.
    """
    OPERATIONS[operation].contract.check(args)


def set_observer(observer: Observer | None) -> None:
    """Call ``observer(operation's name, its positional arguments)`` before each run; None ends it.

    A CUDA graph that is replayed runs no operation, so nothing is called for it.
    """
    global _observer
    _observer = observer


def observed() -> bool:
    """Whether an observer is set for the operations that run."""
    return _observer is not None


def available_backends() -> list[str]:
    """Names of the backends that can run on this machine."""
    return [backend for backend in BACKENDS if _runs(backend)]


def _runs(backend: str) -> bool:
    if backend == REFERENCE:
        return True
    # vLLM's operations, and what nvcc has built, are looked for when one is asked for
    if backend not in (CPU, NVCC, "cuda") and importlib.util.find_spec(backend) is None:
        return False
    if backend == CPU:
        return importlib.util.find_spec("numba") is not None and not torch.cuda.is_available()
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted or torch.cuda.is_available()


@functools.cache
def default_backend(device: torch.device) -> str:
    """Backend for ``device``: OSS_FUSED_BACKEND, or triton on a GPU, cpu or torch elsewhere.

    The variable is read once a device: every call of an operation asks.
    """
    chosen = envs.get("OSS_FUSED_BACKEND")
    if chosen == "auto":
        if device.type == "cuda":
            return "triton"
        return CPU if device.type == "cpu" and _runs(CPU) else REFERENCE
    return chosen


def backend_for(operation: str, device: torch.device) -> str:
    """Backend that runs ``operation`` on ``device`` when none is named."""
    backend = default_backend(device)
    # backend "cpu" has the operations whose twins take many steps, and their results
    return REFERENCE if backend == CPU and CPU not in OPERATIONS[operation].modules else backend


def operations(backend: str) -> list[str]:
    """Names of the operations that ``backend`` implements.

    Raises:
        BackendUnavailableError: the backend is unknown.
    """
    _check_backend(backend)
    return sorted(name for name, operation in OPERATIONS.items() if backend in operation.modules)


@functools.cache
def get_kernel(backend: str, operation: str) -> Callable[..., Any]:
    """The function that checks its arguments and runs ``operation`` on ``backend``.

    Raises:
        BackendUnavailableError: the backend is unknown or cannot run here, or it does not
            implement the operation.
    """
    kernel = _kernel(backend, operation)
    contract = OPERATIONS[operation].contract

    @functools.wraps(kernel)
    def checked(*args: Any, **named: Any) -> Any:
        return kernel(*contract.prepare(contract.bind(args, named)))

    return checked


@functools.cache
def _kernel(backend: str, name: str) -> Callable[..., Any]:
    _check_backend(backend)
    operation = OPERATIONS.get(name)
    if operation is None or backend not in operation.modules:
        have = ", ".join(operation.modules) if operation else "none"
        raise BackendUnavailableError(
            f"operation={name!r} is not implemented by backend={backend!r}; "
            f"backends that have it: {have}"
        )
    if backend not in available_backends():
        raise BackendUnavailableError(
            f"backend={backend!r} cannot run here: it needs {BACKENDS[backend]}"
        )
    return getattr(importlib.import_module(operation.modules[backend]), name)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise BackendUnavailableError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
