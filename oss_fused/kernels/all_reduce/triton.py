# SPDX-License-Identifier: MIT
"""``all_reduce`` in one launch, without a barrier between ranks.

A program writes its block into the inboxes of all other ranks and waits until theirs have arrived
in its own. No flag announces them: a place that waits for an element holds EMPTY. So a block takes
about as long as one write from GPU to GPU. Who reads a place leaves EMPTY in it.

A block has two places for each source, used in turn. A rank writes to a place for the second time
in the block's round after the next. By then it has received the next round from every rank, and a
rank sends that in a later launch, or behind a fence, than it read and emptied the place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.all_reduce.reference import BLOCK_BYTES, EMPTY, INTEGERS
from oss_fused.kernels.integers import cdiv
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs
from oss_fused.kernels.numerics import INTERPRETED, round_to

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _fence():
    """Other GPUs see what this thread wrote before the fence when they see what it writes after."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;",
            "=r,r",
            [tl.zeros((1,), tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _place(inbox, source, turn, capacity, column, WORLD: tl.constexpr, KIND: tl.constexpr):
    """Where a block of ``source`` stands in the inbox at this address."""
    start = inbox.to(tl.pointer_type(KIND)) + (turn * WORLD + source) * capacity
    # loads and stores of 16 bytes
    return tl.max_contiguous(tl.multiple_of(start + column, 16), column.shape[0])


@triton.jit(do_not_specialize=["vectors", "capacity", "rank"])
def _all_reduce_kernel(
    x,
    summed,
    inboxes,
    rounds,
    vectors,
    capacity,
    rank,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = program * BLOCK + tl.arange(0, BLOCK)
    KIND: tl.constexpr = x.dtype.element_ty
    # a vector of 16 bytes is inside or outside
    VECTOR: tl.constexpr = 128 // KIND.primitive_bitwidth
    # vectors of a program
    OWN: tl.constexpr = BLOCK // VECTOR
    wait_for_inputs()
    start_next()
    finished = tl.load(rounds + program)
    for first in range(0, vectors, tl.num_programs(0) * OWN):
        # a place must be seen empty by those whom this round's data lets write to it again
        if first > 0:
            _fence()
        inside = column < (vectors - first) * VECTOR
        own = tl.load(x + first * VECTOR + column, mask=inside, other=0)
        turn = (finished & 1).to(tl.int64)
        # EMPTY is a NaN, and another NaN is as good
        sent = tl.where(own == _EMPTY, 2 ** (own.dtype.primitive_bitwidth - 1) - 1, own)
        sent = sent.to(own.dtype)
        for step in tl.static_range(1, WORLD):
            inbox = tl.load(inboxes + (rank + step) % WORLD)
            there = _place(inbox, rank, turn, capacity, column, WORLD, KIND)
            tl.store(there, sent, mask=inside, cache_modifier=".wt")
        mine = tl.load(inboxes + rank)
        total = own.to(DTYPE, bitcast=True).to(tl.float32)
        for source in tl.static_range(WORLD):
            arrives = column < tl.where(rank == source, 0, vectors - first) * VECTOR
            here = _place(mine, source, turn, capacity, column, WORLD, KIND)
            part = tl.load(here, mask=arrives, other=0, volatile=True)
            while tl.max((part == _EMPTY).to(tl.int32), 0) != 0:
                part = tl.load(here, mask=arrives, other=0, volatile=True)
            tl.store(here, tl.full((BLOCK,), _EMPTY, KIND), mask=arrives)
            part = tl.where(rank == source, own, part)
            value = part.to(DTYPE, bitcast=True).to(tl.float32)
            # no sum begins with +0.0, which would turn the sum of negative zeros positive
            total = value if source == 0 else total + value
        rounded = round_to(total, DTYPE)
        tl.store(summed + first * VECTOR + column, rounded.to(KIND, bitcast=True), mask=inside)
        # a round without an element waits for nobody, so it must not count
        finished += tl.where(program * OWN < vectors - first, 1, 0)
    # all threads have read the number before it changes
    tl.debug_barrier()
    tl.store(rounds + program, finished)


def all_reduce(
    x: torch.Tensor, inboxes: torch.Tensor, rounds: torch.Tensor, rank: int
) -> torch.Tensor:
    """The sum over ranks; see kernels/all_reduce for the contract."""
    if x.data_ptr() % 16:
        x = x.clone()
    summed = torch.empty_like(x)
    if x.numel() == 0:
        return summed
    kind, block = INTEGERS[x.itemsize], BLOCK_BYTES // x.itemsize
    _all_reduce_kernel[(min(cdiv(x.numel(), block), rounds.numel()),)](
        x.view(kind),
        summed.view(kind),
        inboxes,
        rounds,
        x.nbytes // 16,
        rounds.numel() * block,
        rank,
        WORLD=inboxes.numel(),
        DTYPE=_DTYPES[x.dtype],
        BLOCK=block,
        # a thread has one vector, and no barrier is needed to ask whether all have arrived
        num_warps=1,
        **pdl_options(x.device),
    )
    return summed


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
