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
