# SPDX-License-Identifier: MIT
"""``greedy_tokens``: the likeliest token of each row of logits.

Args of the operator:
    logits: [R, V] bf16, fp16 or float32, any row stride.
    arrivals: int32, at least R zeros, used as scratch and left at zero. Launches that overlap in
        time need buffers of their own.
    offsets: [V] int64, or None. What to add to an index: a head of drafts that knows a part of the
        vocabulary has tokens of its own.

Returns [R] int64: the index of the row's largest value, the lowest one among equals, and its offset
added. NaN is above all values, as in torch.argmax.
"""

from __future__ import annotations

import torch

from oss_fused.errors import ShapeMismatchError
from oss_fused.kernels.checks import FLOAT_DTYPES
from oss_fused.kernels.contract import Operand
from oss_fused.kernels.greedy import reference
from oss_fused.kernels.op import declare


def _check(logits: torch.Tensor, arrivals: torch.Tensor) -> None:
    if logits.shape[1] == 0:
        raise ShapeMismatchError(f"logits.shape={tuple(logits.shape)}: expected V >= 1")
    if arrivals.numel() < logits.shape[0] or not arrivals.is_contiguous():
        raise ShapeMismatchError(
            f"arrivals.numel()={arrivals.numel()}: expected at least {logits.shape[0]}, contiguous"
        )


declare(
    reference.greedy_tokens,
    {
        "logits": Operand("R V", *FLOAT_DTYPES, contiguous=True),
        "arrivals": Operand("...", torch.int32),
        "offsets": Operand("V", torch.int64),
    },
    {"triton": "triton"},
    mutates=("arrivals",),
    check=_check,
    fake=lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64),
    example={
        "R": 3,
        "V": 40,
        "arrivals": lambda _: torch.zeros(3, dtype=torch.int32),
        "offsets": lambda draw: torch.randint(0, 99, (40,), generator=draw),
    },
)
