# SPDX-License-Identifier: MIT
"""vLLM's compiled operations, loaded as a shared library: none of vLLM's Python runs."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import BackendUnavailableError

_LIBRARY = "_C_stable_libtorch.abi3.so"


def library_file() -> Path | None:
    """vLLM's CUDA operations beside its package, which is looked up and not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_LIBRARY)
    return path if path.is_file() else None


@functools.cache
def vllm_ops() -> Any:
    """``torch.ops._C`` with vLLM's operations in it.

    Raises:
        BackendUnavailableError: vLLM's CUDA build is not installed, or does not load here.
    """
    path = library_file()
    if path is None:
        raise BackendUnavailableError(
            f"backend='cuda': this operation is vLLM's, and no {_LIBRARY} was found; "
            "pip install vllm (a CUDA build)"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BackendUnavailableError(f"backend='cuda': {path} does not load: {error}") from error
    return torch.ops._C
