# SPDX-License-Identifier: MIT
"""``verify_drafts`` in one launch, a program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import next_power_of_2
from oss_fused.kernels.launch import pdl_options, start_next, wait_for_inputs


@triton.jit
def _verify_drafts_kernel(
    tokens,
    input_ids,
    positions,
    rows,
    starts,
    requests,
    seq_lens,
    prompt_lens,
    rates,
    seeds,
    sampled,
    taken,
    rejected,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    wait_for_inputs()
    start_next()
    first = tl.load(starts + request)
    number = tl.load(starts + request + 1) - first
    place = tl.load(requests + request)
    prompt = tl.load(prompt_lens + place)
    token = tl.load(tokens + first + nth, mask=nth < number, other=0)
    # the draft that follows a row stands in the next one
    drafted = nth < number - 1
    row = tl.load(rows + first + 1 + nth, mask=drafted, other=0)
    draft = tl.load(input_ids + row, mask=drafted, other=-1)
    proposed = (draft >= 0) & (tl.load(positions + tl.load(rows + first)) >= prompt)
    if rates is None:
        right = proposed & (draft == token)
    else:
        position = tl.load(positions + tl.load(rows + first + nth, mask=drafted, other=0))
        rate = tl.load(rates + nth, mask=drafted, other=0.0)
        right = proposed & (tl.rand(tl.load(seeds + place), position) < rate)
    # up to the first wrong one; behind the last draft none is right
    accepted = tl.min(tl.where(right, BLOCK, nth), 0)
    token = tl.where(nth < accepted, draft.to(tl.int64), token)
    tl.store(sampled + request * MOST + nth, token, mask=nth < MOST)
    unfinished = tl.load(seq_lens + request) < prompt
    tl.store(taken + request, tl.where(unfinished, 0, accepted + 1))
    tl.store(rejected + request, tl.where(unfinished, 0, number - accepted - 1))


def verify_drafts(
    tokens: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    most: int,
    rates: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The right drafts and one token more; see kernels/greedy for the contract."""
    count = requests.shape[0]
    sampled = tokens.new_empty(count, most)
    taken = seq_lens.new_empty(count)
    rejected = seq_lens.new_empty(count)
    if count:
        _verify_drafts_kernel[(count,)](
            *(tokens, input_ids, positions, rows, starts, requests, seq_lens, prompt_lens),
            *(rates, seeds),
            *(sampled, taken, rejected),
            MOST=most,
            BLOCK=next_power_of_2(most),
            num_warps=1,
            **pdl_options(tokens.device),
        )
    return sampled, taken, rejected
