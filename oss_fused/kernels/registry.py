# SPDX-License-Identifier: MIT
"""Which backend runs which operation.

A backend is a package ``oss_fused.kernels.<backend>`` whose ``OPERATIONS`` maps an operation's
name to the module that holds the function of that name. Modules load on first use, so that
listing backends imports no compiler.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from oss_fused import envs
from oss_fused.errors import BackendUnavailableError

_PACKAGES = {
    "torch": "oss_fused.kernels.reference",
    "triton": "oss_fused.kernels.triton",
    "cuda": "oss_fused.kernels.cuda",
    "tilelang": "oss_fused.kernels.tilelang",
}
_REMEDIES = {
    "triton": "it needs the package triton and an NVIDIA GPU, or TRITON_INTERPRET=1 on a CPU",
    "cuda": "it needs an NVIDIA GPU",
    "tilelang": 'it needs an NVIDIA GPU, nvcc and TileLang: pip install "oss-fused[tilelang]"',
}


def _runs(backend: str) -> bool:
    if backend == "torch":
        return True
    # vLLM's operations are looked for when one is asked for: cuBLASLt's need no vLLM
    if backend != "cuda" and importlib.util.find_spec(backend) is None:
        return False
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted or torch.cuda.is_available()


def available_backends() -> list[str]:
    """Names of the backends that can run on this machine."""
    return [backend for backend in _PACKAGES if _runs(backend)]


@functools.cache
def default_backend(device: torch.device) -> str:
    """Backend for ``device``: OSS_FUSED_BACKEND, or triton on a GPU and torch elsewhere.

    The variable is read once a device: every call of an operator asks.
    """
    chosen = envs.get("OSS_FUSED_BACKEND")
    if chosen == "auto":
        return "triton" if device.type == "cuda" else "torch"
    return chosen


def operations(backend: str) -> list[str]:
    """Names of the operations that ``backend`` implements."""
    return sorted(_operation_table(backend))


@functools.cache
def get_kernel(backend: str, operation: str) -> Callable[..., Any]:
    """Return the function that runs ``operation`` on ``backend``.

    Raises:
        BackendUnavailableError: the backend is unknown or cannot run here, or it does not
            implement the operation.
    """
    table = _operation_table(backend)
    if operation not in table:
        have = [name for name in _PACKAGES if operation in _operation_table(name)]
        raise BackendUnavailableError(
            f"operation={operation!r} is not implemented by backend={backend!r}; "
            f"backends that have it: {', '.join(have) or 'none'}"
        )
    if backend not in available_backends():
        raise BackendUnavailableError(f"backend={backend!r} cannot run here: {_REMEDIES[backend]}")
    module = importlib.import_module(f"{_PACKAGES[backend]}.{table[operation]}")
    return getattr(module, operation)


def _operation_table(backend: str) -> dict[str, str]:
    if backend not in _PACKAGES:
        raise BackendUnavailableError(
            f"backend={backend!r}: expected one of {', '.join(_PACKAGES)}"
        )
    return importlib.import_module(_PACKAGES[backend]).OPERATIONS
