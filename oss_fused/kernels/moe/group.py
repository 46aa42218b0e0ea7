# SPDX-License-Identifier: MIT
"""Row groups of an expert's weight: which is a program's, where it begins, first bytes early.

P is moe/gemm.py's Product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oss_fused.kernels.launch import prefetch_line

# programs that run at once on an H200, and what each asks L2 for: the first 16 KB of weights, and
# before routing has ended 4 KB of scale words; more was not faster
_PREFETCHING = tl.constexpr(528)
_WEIGHT_LINES, _WORD_LINES = tl.constexpr(128), tl.constexpr(32)


@triton.jit
def first_group(P: tl.constexpr):
    """Of this program; the last one of an odd number of groups repeats one: same values."""
    return tl.minimum(tl.program_id(0) * P.groups, (P.n + 63) // 64 - P.groups)


@triton.jit
def of_group(weight, weight_scale, expert, group, P: tl.constexpr):
    """Where the group's packed weights and scale words begin, or those of an expert in FP8."""
    if P.mxfp4:
        weight += expert * (P.n * (P.k // 2)) + group * (64 * (P.k // 2))
        weight_scale += (expert * (P.n // 64) + group) * (64 * ((P.k + 127) // 128))
    else:
        weight += expert * (P.n * P.k)
        weight_scale += expert * P.n
    return weight, weight_scale


@triton.jit
def prefetch_first(packed, P: tl.constexpr):
    """Ask L2 for the first weights of a group, in lines of 128 bytes."""
    lines = tl.arange(0, _WEIGHT_LINES)
    prefetch_line(packed + tl.minimum(lines, P.k // 4 - 1) * 128)


@triton.jit
def prefetch_group(weight, weight_scale, EXPERTS: tl.constexpr, P: tl.constexpr):
    """Ask L2 for the first weights of this program if tile ``i`` is expert ``i``'s.

    Routing takes longer than these bytes. Where an expert has no tile or several, another program
    reads them.
    """
    expert = tl.program_id(1)
    if (expert < EXPERTS) & (expert * tl.num_programs(0) + tl.program_id(0) < _PREFETCHING):
        packed, words = of_group(weight, weight_scale, expert.to(tl.int64), first_group(P), P)
        prefetch_first(packed, P)
        lines = tl.arange(0, _WORD_LINES)
        prefetch_line(words + tl.minimum(lines, (P.k + 127) // 128 * 2 - 1) * 32)


@triton.jit
def group_of_next_wave(weight, tiles, WAVE: tl.constexpr, P: tl.constexpr):
    """Weights of the program ``WAVE`` places behind this one, and whether there is such a program.

    ``tiles``: as of Routing.
    """
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) + WAVE
    tile = program // tl.num_programs(0)
    expert = -1
    if tile < tl.num_programs(1):
        expert = tl.load(tiles + tile * 3)
    first = tl.minimum(program % tl.num_programs(0) * P.groups, (P.n + 63) // 64 - P.groups)
    packed, _ = of_group(weight, weight, tl.maximum(expert, 0).to(tl.int64), first, P)
    return packed, expert >= 0
