# SPDX-License-Identifier: MIT
"""Reference twin of ``greedy_tokens``."""

from __future__ import annotations

import torch


def greedy_tokens(
    logits: torch.Tensor, arrivals: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """See kernels/greedy for the contract."""
    if logits.shape[0] == 0:
        return logits.new_empty(0, dtype=torch.int64)
    best = logits.amax(1, keepdim=True)
    hit = torch.where(best.isnan(), logits.isnan(), logits == best)
    # of equal integers argmax may return any
    places = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    tokens = torch.where(hit, places, 0).argmax(1)
    return tokens if offsets is None else tokens + offsets[tokens]


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See kernels/greedy for the contract."""
    count = requests.shape[0]
    if count == 0:
        none = seq_lens.new_empty(0)
        return tokens.new_empty(0, most), none, none.clone()
    nth = torch.arange(most, device=tokens.device)
    first = starts[:-1, None].long()
    number = (starts[1:] - starts[:-1])[:, None]
    place = first + nth
    sampled = torch.where(nth < number, tokens[place.clamp(max=len(tokens) - 1)], 0)
    drafts = input_ids[rows[(place + 1).clamp(max=len(tokens) - 1)]]
    prompts = prompt_lens[requests]
    # the first step of a prompt that another engine has read pads its drafts
    proposed = (drafts >= 0) & (positions[rows[first]] >= prompts[:, None])
    right = proposed & (drafts == sampled) & (nth < number - 1)
    unfinished = seq_lens[:count] < prompts
    taken = torch.where(unfinished, 0, right.int().cumprod(1).sum(1) + 1)
    rejected = torch.where(unfinished, 0, number[:, 0] - taken)
    return sampled, taken.to(torch.int32), rejected.to(torch.int32)
