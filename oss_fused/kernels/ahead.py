# SPDX-License-Identifier: MIT
"""Compile kernels on several cores, before their first launch.

Triton compiles a kernel when it is launched for the first time, one after the other. Nine tenths of
that time is spent in LLVM and ptxas, which other threads need not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """In this block a launch compiles its kernel, on one of ``threads`` threads, and runs nothing.

    What launches would have written is left as it is; PyTorch's own operators run on it. Kernels
    are ready when the block ends; one that cannot be compiled raises where it is launched later.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        return launch(self, *args, **{**options, "warmup": True})

    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
