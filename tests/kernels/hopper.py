# SPDX-License-Identifier: MIT
"""Compile kernels for Hopper without a GPU.

A process of its own does it (``run``): in the tests' own Triton interprets kernels. In a block of
``hopper()`` tensors on "cuda" have a shape and no memory, and a launch compiles its kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# bytes of shared memory that a program may have
SHARED_MEMORY = 232448
REGISTERS = 65536


def run(folder: Path, *arguments: object) -> str:
    """What Python prints with these arguments; ``folder`` holds Triton's cache."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    # where an error ends a program, Gluon's objects outlive it and are listed
    assert done.returncode == 0, done.stderr.split("nanobind: leaked")[0][-2000:]
    return done.stdout


def run_program(folder: Path, program: str) -> str:
    """What a program prints; Triton reads kernels from files."""
    file = folder / "program.py"
    file.write_text(program)
    return run(folder, file)


class Gpu:
    """Stands for Triton's driver of an H200."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY, "warpSize": 32}
    )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(NamedTuple):
    """A kernel, its code by kind, and what a program of it takes.

    ``threads`` of a program; ``registers`` of a thread, and bytes of its ``stack``, where registers
    are spilled; bytes of ``shared`` memory.
    """

    name: str
    asm: dict[str, Any]
    threads: int
    registers: int
    stack: int
    shared: int


def _compiled(name: str, kernel: Any) -> Compiled:
    import triton

    file = Path(triton.knobs.cache.dir) / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    used = [re.findall(rf"{key}:(\d+)", shown.stdout)[-1] for key in ("REG", "STACK")]
    threads = 32 * kernel.metadata.num_warps
    return Compiled(name, dict(kernel.asm), threads, *map(int, used), kernel.metadata.shared)


def _item(tensor: Any, index: Any) -> Any:
    """``tensor[index]``, which PyTorch's own code does for no GPU that it was not built for."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
    dim = 0
    for part in parts:
        if isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(dim)
        else:
            begin, end, step = part.indices(tensor.shape[dim])
            tensor = tensor.as_strided(
                (*tensor.shape[:dim], max(0, -(-(end - begin) // step)), *tensor.shape[dim + 1 :]),
                (*tensor.stride()[:dim], tensor.stride(dim) * step, *tensor.stride()[dim + 1 :]),
                tensor.storage_offset() + begin * tensor.stride(dim),
            )
        dim += 1
    return tensor


def _contiguous(tensor: Any, **layout: Any) -> Any:
    """As ``_item`` does; a copy has no memory either."""
    import torch

    return tensor if tensor.is_contiguous(**layout) else torch.empty_like(tensor, **layout)


@contextmanager
def hopper() -> Iterator[list[Compiled]]:
    """A block in which launches compile for an H200; the kernels in the order of launches."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    made: list[Compiled] = []

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        kernel = launch(self, *args, **{**options, "warmup": True})
        made.append(_compiled(self.__name__, kernel))
        return kernel

    device_properties = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        shared_memory_per_block_optin=SHARED_MEMORY,
        total_memory=140 << 30,
    )
    driver.set_active(Gpu())
    with ExitStack() as stack:
        # before PyTorch believes in a GPU: this mode then lets it do without one
        stack.enter_context(FakeTensorMode())
        for owner, name, value in (
            (JITFunction, "run", compile_only),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device=None: device_properties),
            (torch.cuda, "get_device_name", lambda device=None: device_properties.name),
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            # the allocator's memory is aligned
            (FakeTensor, "data_ptr", lambda self: self.storage_offset() * self.itemsize),
            (FakeTensor, "__getitem__", _item),
            (FakeTensor, "contiguous", _contiguous),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield made
