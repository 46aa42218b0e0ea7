# SPDX-License-Identifier: MIT
"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel launched with ``launch_pdl=True`` touches nothing before ``wait_for_inputs``, outputs
included: the allocator may have handed us memory that the kernel before still reads. Where the
caller vouches for it (PREFETCH), the kernel asks for operands before it waits: for weights that no
kernel of the step writes, for a block table and lengths made before the step began, or for what the
kernels before the one ahead wrote, if the one ahead calls ``start_next`` after its own wait.
Without that ``wait_unless`` waits above those loads. The cache is never read early: another
sequence of the same step may be writing a block that this one shares (docs/kernels.md).

One kernel writes before its wait: the norm with the router of one token, to scratch that is no
kernel's operand. The kernel behind it reads that before its own wait. What it reads may be old: it
only decides which weights L2 is asked for.

A kernel that streams weights calls ``start_next`` after ``wait_for_inputs``, so that one such
kernel at most fetches its weights beside the one that runs: when more pile up they compete (a layer
of Llama-8B took 78 us so instead of 72 for one token). The small kernels between two of them
(norms, attention, routing, quantisation) call it first: the next weights are on their way while
they run. Attention with large heads calls it behind its first loads, the norm with the router of
one token behind what it writes early, the combination of several tokens' shares and
add_rms_norm_quant of more than 64 rows after their wait.
docs/results/notes/decode.md has the times.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver

from oss_fused.kernels.eviction import EVICT_LAST
from oss_fused.kernels.numerics import INTERPRETED

# eviction policy of kernels whose results are always few
KEPT = tl.constexpr(EVICT_LAST)


@triton.jit
def start_next():
    """Let the next kernel of the stream start; it waits for our end before it reads our output."""
    # older GPUs have no such instruction, and launch kernels one after the other
    if not INTERPRETED and cuda_capability_geq(9):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    """Wait until the kernels before this one have finished and their writes are visible."""
    if not INTERPRETED and cuda_capability_geq(9):
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_unless(PREFETCH: tl.constexpr):
    """``wait_for_inputs`` above loads that only a caller's word lets come before it."""
    if not PREFETCH:
        wait_for_inputs()


@triton.jit
def prefetch_line(pointers):
    """Bring the cache line of each pointer into L2."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels written for programmatic dependent launch (Hopper and later)."""
    if device.type != "cuda" or INTERPRETED.value:
        return {}
    return {"launch_pdl": torch.cuda.get_device_capability(device) >= (9, 0)}


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon run on ``device``: Hopper, and a Triton that has Gluon."""
    if device.type != "cuda" or INTERPRETED.value:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from oss_fused.kernels import pipeline as warp_pipeline  # noqa: F401
    except (ImportError, AttributeError):
        # Gluon is experimental: another Triton may lack it, or a name that we use
        return False
    return True


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; a Hopper GPU's for the interpreter."""
    if device.type != "cuda":
        return 227 * 1024
    device_index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(device_index)["max_shared_mem"])
