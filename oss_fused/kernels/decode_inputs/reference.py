# SPDX-License-Identifier: MIT
"""Reference twin of ``advance_decode``."""

from __future__ import annotations

import torch


def advance_decode(
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    column: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mappings: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
) -> None:
    """See kernels/decode_inputs for the contract."""
    rows = sampled.shape[0]
    tokens[:, column] = sampled
    input_ids[:rows] = sampled.to(torch.int32)
    positions[:rows] += 1
    seq_lens[:rows] += 1
    here = positions[:rows]
    for slots, table, size in zip(slot_mappings, block_tables, block_sizes):
        block = table[:rows].gather(1, (here // size)[:, None])[:, 0]
        slots[:rows] = block.to(torch.int64) * size + here % size
