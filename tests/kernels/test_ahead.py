# SPDX-License-Identifier: MIT
"""kernels/ahead.py: what is launched in its block is compiled on threads, and does not run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kernels.hopper import run_program

_PROGRAM = """
import json
import threading

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from oss_fused.kernels.ahead import compiling_only
from tests.kernels.hopper import Gpu

driver.set_active(Gpu())


@triton.jit
def kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + 1)


@triton.jit
def wrong(x, out, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 16)
    tl.store(out, tl.load(x))


launch, threads = JITFunction.run, set()
compiled = triton.compile
x, out = torch.ones(64), torch.zeros(64)


def compile_here(*args, **options):
    threads.add(threading.get_ident())
    return compiled(*args, **options)


with compiling_only(2):
    for size in (16, 32, 64, 32):
        kernel[(1,)](x, out, SIZE=size)
        kernel.compile = wrong.compile = compile_here
    wrong[(1,)](x, out, SIZE=32)
ready = kernel.device_caches[0][0]
print(json.dumps({
    "ready": sorted(each.metadata.num_warps for each in ready.values()),
    "failed": len(wrong.device_caches[0][0]),
    "elsewhere": threading.get_ident() not in threads,
    "restored": JITFunction.run is launch,
    "sum": out.sum().item(),
}))
"""


def test_launches_compile_on_threads_and_do_not_run(tmp_path: Path) -> None:
    shown = run_program(tmp_path, _PROGRAM)
    assert json.loads(shown.splitlines()[-1]) == {
        "ready": [4, 4, 4],
        "failed": 0,
        "elsewhere": True,
        "restored": True,
        "sum": 0.0,
    }
