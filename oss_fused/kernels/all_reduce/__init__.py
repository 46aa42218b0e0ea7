# SPDX-License-Identifier: MIT
"""The sum of a tensor over the GPUs of a node, with memory that each can write.

``all_reduce``: the sum over ranks of x. All ranks call it in the same order, each on one stream,
with tensors of the same size and dtype; a rank waits for the others.

    x: [...], bf16, fp16 or float32, a multiple of 16 bytes.
    inboxes: [W] int64, addresses of the ranks' inboxes, divisible by 16. An inbox has
        ``inbox_bytes(W, blocks)`` bytes, all of which are 0xFF before the first call.
    rounds: [blocks] int32, zeros before the first call: how often each block of the inbox was used.
        Blocks of ``BLOCK_BYTES`` are summed at once; a larger x takes several rounds of all.
    rank: this process, 0 to W - 1.

Returns [...] of x's dtype, the same bits on every rank: parts are added in the order of ranks in
float32. The inboxes are written, of which PyTorch knows nothing: a graph that is traced must not
hold this operator.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.all_reduce import reference
from oss_fused.kernels.all_reduce.reference import BLOCK_BYTES
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import Operand
from oss_fused.kernels.op import declare


def inbox_bytes(world: int, blocks: int) -> int:
    """Bytes of a rank's inbox: two places for each rank's blocks."""
    return 2 * world * blocks * BLOCK_BYTES


def _check(x: torch.Tensor, inboxes: torch.Tensor, rounds: torch.Tensor, rank: int) -> None:
    if (size := x.numel() * x.itemsize) % 16:
        raise ShapeMismatchError(
            f"x.shape={tuple(x.shape)}: {size} bytes, expected a multiple of 16"
        )
    if not rounds.numel():
        raise ShapeMismatchError("rounds.shape=(0,): expected at least one block")
    if not 0 <= rank < inboxes.numel():
        raise SchemeError(f"rank={rank}: expected 0 to {inboxes.numel() - 1}")


declare(
    reference.all_reduce,
    {
        "x": Operand("...", *FLOAT_DTYPES, dense=True),
        "inboxes": Operand("W", torch.int64),
        "rounds": Operand("B", torch.int32),
    },
    {"triton": "triton"},
    mutates=("rounds",),
    check=_check,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    # alone: nobody else would write
    example={"...": (3, 40), "W": 1, "B": 2, "rank": 0},
)
