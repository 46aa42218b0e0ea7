# SPDX-License-Identifier: MIT
"""How an operator is registered: schema, fake, and a body that asks the kernel registry.

``torch.library.Library`` rather than ``custom_op``: its dispatch costs a few microseconds less
per call, which counts where vLLM runs a layer outside CUDA graphs (lm_head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oss_fused.kernels.registry import default_backend, get_kernel

LIBRARY = torch.library.Library("oss_fused", "DEF")

Observer = Callable[[str, tuple[Any, ...]], None]
_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Call ``observer(operator's name, its positional arguments)`` before each run; None ends it.

    A CUDA graph that is replayed runs no operator, so nothing is called for it.
    """
    global _observer
    _observer = observer


def observed() -> bool:
    """Whether an observer wants to see the operators that run."""
    return _observer is not None


def register_op(schema: str, fake: Callable[..., Any]) -> None:
    """Define ``oss_fused::<schema>``, run by the kernel of that name on the inputs' device.

    Args:
        schema: e.g. ``"dequantize_fp8(Tensor q, Tensor scale, ScalarType out_dtype) -> Tensor"``.
            The first argument is a tensor; its device picks the backend.
        fake: shape and dtype propagation with the same arguments.
    """
    name = schema.split("(", 1)[0]

    def run(*args: Any) -> Any:
        if _observer is not None:
            _observer(name, args)
        return get_kernel(default_backend(args[0].device), name)(*args)

    run.__name__ = run.__qualname__ = name
    LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"oss_fused::{name}", fake, lib=LIBRARY)
