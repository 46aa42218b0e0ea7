# SPDX-License-Identifier: MIT
"""Units of work that the programs of a persistent kernel take from a counter, in Gluon.

A unit is some row groups of an expert's weight for one tile of tokens. Units of few tokens end
earlier, and a program that has ended one takes the next: shares that are fixed beforehand leave
multiprocessors idle at the end. A unit's result does not depend on the program that computes it.

``Routing.progress`` [3] int32 is the number of tiles, and the units that programs have taken of
the first and of the second product, beside the one that each begins with. Routing sets these to 0,
and so does the program that takes the last unit: the products of a routing may be repeated.

The loading warp takes units and says in shared memory which one the chunks from a slot of the ring
on belong to. A consumer reads that when the slot's chunk is there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# the number is in lane 0, and nothing waits for it here
_TAKE_ASM = gl.constexpr(
    """
    {
    .reg .pred first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b32 $0, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }
    """
)
_LANE_0_ASM = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def notes_of(STAGES: gl.constexpr):
    """What ``announce`` writes, for each slot of a ring."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [STAGES, 4], layout)


@gluon.jit
def ask_for_unit(progress, SECOND: gl.constexpr):
    """Ask for a unit of the first or the second product, in a warp; ``taken_unit`` has it."""
    counter = (progress + (2 if SECOND else 1)).to(gl.uint64, bitcast=True)
    return gl.inline_asm_elementwise(
        _TAKE_ASM, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def taken_unit(asked, progress, total, SECOND: gl.constexpr):
    """The unit that was asked for; ``total`` and above where none was left."""
    number = gl.inline_asm_elementwise(
        _LANE_0_ASM, "=r,r", [asked], dtype=gl.int32, is_pure=False, pack=1
    )
    # every unit that was computed asked for one
    if number == total - 1:
        gl.store(progress + (2 if SECOND else 1), 0)
    return number + gl.num_programs(0)


@gluon.jit
def announce(note, unit, expert, begin, count):
    """Say to which unit, and to which tile, the chunks from a free slot on belong."""
    at = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    tile = gl.where(at == 1, expert, gl.where(at == 2, begin, count))
    note.store(gl.where(at == 0, unit, tile))


@gluon.jit
def announce_end(note, full):
    """Say that no unit follows, in a free slot."""
    announce(note, -1, 0, 0, 0)
    mbarrier.arrive(full, count=1)


@gluon.jit
def announced(note, full, phase):
    """Unit, or -1; expert, first position and tokens of its tile. Waits for the slot's chunk."""
    mbarrier.wait(full, phase)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 4, layout)
    said = note.load(layout)
    unit = gl.sum(gl.where(at == 0, said, 0), 0)
    expert = gl.sum(gl.where(at == 1, said, 0), 0)
    begin = gl.sum(gl.where(at == 2, said, 0), 0)
    return unit, expert.to(gl.int64), begin, gl.sum(gl.where(at == 3, said, 0), 0)
