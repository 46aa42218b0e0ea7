# SPDX-License-Identifier: MIT
"""Reference twins of ``greedy_tokens`` and ``verify_drafts``."""

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
    rates: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See kernels/greedy for the contract."""
    count = requests.shape[0]
    if count == 0:
        none = seq_lens.new_empty(0)
        return tokens.new_empty(0, most), none, none.clone()
    nth = torch.arange(most, device=tokens.device)
    first = starts[:-1, None].long()
    number = (starts[1:] - starts[:-1])[:, None]
    place = (first + nth).clamp(max=len(tokens) - 1)
    likeliest = torch.where(nth < number, tokens[place], 0)
    drafts = input_ids[rows[(place + 1).clamp(max=len(tokens) - 1)]]
    prompts = prompt_lens[requests]
    # the first step of a prompt that another engine has read pads its drafts
    proposed = (drafts >= 0) & (positions[rows[first]] >= prompts[:, None])
    if rates is None or seeds is None:
        right = drafts == likeliest
    else:
        drawn = uniform(seeds[requests][:, None], positions[rows[place]])
        right = drawn < torch.nn.functional.pad(rates[: most - 1], (0, 1))
    right = (right & proposed & (nth < number - 1)).int().cumprod(1).bool()
    sampled = torch.where(right, drafts, likeliest)
    unfinished = seq_lens[:count] < prompts
    taken = torch.where(unfinished, 0, right.sum(1) + 1)
    rejected = torch.where(unfinished, 0, number[:, 0] - taken)
    return sampled, taken.to(torch.int32), rejected.to(torch.int32)


def uniform(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``tl.rand``: float32 in [0, 1) of int64 seeds and offsets, by ten rounds of Philox 4x32."""
    low = 0xFFFFFFFF
    words = [offset & low, offset >> 32 & low, torch.zeros_like(offset), torch.zeros_like(offset)]
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        # products of 64 bits: the overflow into the sign is cut off
        even, odd = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (odd >> 32 & low) ^ words[1] ^ keys[0],
            odd & low,
            (even >> 32 & low) ^ words[3] ^ keys[1],
            even & low,
        ]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    # of a signed word without its sign
    bits = torch.where(words[0] > 0x7FFFFFFF, words[0] ^ low, words[0])
    return bits.to(torch.float32) * 4.6566127342e-10
