# SPDX-License-Identifier: MIT
"""Greedy requests: their likeliest tokens, and which of their drafts these confirm.

``greedy_tokens``: the likeliest token of each row of logits.

    logits: [R, V] bf16, fp16 or float32, any row stride.
    arrivals: int32, at least R zeros, used as scratch and left at zero. Launches that overlap in
        time need buffers of their own.
    offsets: [V] int64, or None. What to add to an index: a head of drafts that knows a part of the
        vocabulary has tokens of its own.

Returns [R] int64: the index of the row's largest value, the lowest one among equals, and its offset
added. NaN is above all values, as in torch.argmax.

``verify_drafts``: of each request the drafts up to the first that is not the likeliest token, and
the likeliest token behind them. A request has one row of logits, and one more for each draft.

    tokens: [L] int64, the likeliest token of each row.
    input_ids: [T] int32, positions: [T] int64, of all tokens of the step. A draft below 0 is wrong,
        and so are drafts of a request whose first row lies within its prompt.
    rows: [L] int64, where a row's token stands among them; a draft's follows that of its row.
    starts: [R + 1] int32, ascending: rows of request r are starts[r] to starts[r + 1] - 1, at least
        one and at most ``most``.
    requests: [R] int64, a request's place in prompt_lens [M] int32 and seeds [M].
    seq_lens: [>= R] int32, of a request with this step's tokens.
    rates: [>= most - 1] float32 and seeds: [M] int64, or None. With them a draft counts as right
        with the probability of its place in rates, whatever is likeliest: vLLM's synthetic
        acceptance. The draw is that of ``tl.rand`` for the request's seed and its row's position.

Returns sampled [R, most] int64, the number of tokens taken from it [R] int32, and of rows that are
rejected [R] int32. Both numbers are 0 for a request whose prompt goes on after this step. What
follows the tokens taken has no meaning.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
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


def _check_requests(
    tokens: torch.Tensor,
    input_ids: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    most: int,
    rates: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
) -> None:
    count = requests.shape[0]
    least = {
        "tokens": (tokens, count),
        "input_ids": (input_ids, min(count, 1)),
        "seq_lens": (seq_lens, count),
        "prompt_lens": (prompt_lens, min(count, 1)),
    }
    for name, (value, rows) in least.items():
        if value.shape[0] < rows:
            raise ShapeMismatchError(
                f"{name}.shape={tuple(value.shape)}: expected at least {rows} rows"
            )
    if starts.shape[0] != count + 1:
        raise ShapeMismatchError(f"starts.shape={tuple(starts.shape)}: expected [{count + 1}]")
    if most < 1:
        raise SchemeError(f"most={most}: expected at least 1")
    if (rates is None) != (seeds is None):
        raise SchemeError("rates and seeds: expected both or neither")
    if rates is not None and rates.shape[0] < most - 1:
        raise ShapeMismatchError(f"rates.shape={tuple(rates.shape)}: expected at least {most - 1}")


declare(
    reference.verify_drafts,
    {
        "tokens": Operand("L", torch.int64),
        "input_ids": Operand("T", torch.int32),
        "positions": Operand("T", torch.int64),
        "rows": Operand("L", torch.int64),
        "starts": Operand("R1", torch.int32),
        "requests": Operand("R", torch.int64),
        "seq_lens": Operand("Q", torch.int32),
        "prompt_lens": Operand("M", torch.int32),
        "rates": Operand("S", torch.float32),
        "seeds": Operand("M", torch.int64),
    },
    {"triton": "verify_drafts"},
    check=_check_requests,
    example={
        "L": 8,
        "T": 9,
        "R": 3,
        "R1": 4,
        "Q": 4,
        "M": 5,
        "S": 3,
        "most": 4,
        "rows": lambda _: torch.arange(1, 9),
        "starts": lambda _: torch.tensor([0, 1, 5, 8], dtype=torch.int32),
    },
)
