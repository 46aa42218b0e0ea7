# SPDX-License-Identifier: MIT
"""Reference twin of ``greedy_tokens``."""

from __future__ import annotations

import torch


def greedy_tokens(logits: torch.Tensor, arrivals: torch.Tensor) -> torch.Tensor:
    """See kernels/greedy for the contract."""
    if logits.shape[0] == 0:
        return logits.new_empty(0, dtype=torch.int64)
    best = logits.amax(1, keepdim=True)
    hit = torch.where(best.isnan(), logits.isnan(), logits == best)
    # of equal integers argmax may return any
    places = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    return torch.where(hit, places, 0).argmax(1)
